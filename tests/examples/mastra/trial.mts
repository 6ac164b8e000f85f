// The example, or with GUIDE set the class of the published guide, in a Workspace and in an agent's loop.
import assert from "node:assert/strict";
import test from "node:test";
import { MastraLanguageModelV2Mock, simulateReadableStream } from "@mastra/core/test-utils/llm-mock";
import { createWorkspaceTools, Workspace } from "@mastra/core/workspace";
import { freestyle } from "freestyle";
import { ask } from "./agent.ts";
import { get } from "./https.mts";

const guide = Boolean(process.env.GUIDE);
const { default: newSandbox } = await import(guide ? "./guide-client.mts" : "./example-client.mts");
const vms = async () => (await freestyle.vms.list()).vms.map((vm: { id: string }) => vm.id);
const options = { timeout: 600_000 };

type Part = { type: "tool-call"; toolCallId: string; toolName: string; input: string } | { type: "text"; text: string };

/** A model whose answers are given; each sees the prompt with what tools have returned. */
function scripted(...turns: ((prompt: string) => Part)[]) {
  const usage = { inputTokens: 1, outputTokens: 1, totalTokens: 2 };
  const next = (prompt: unknown) => {
    const turn = turns.shift();
    assert.ok(turn, "the model was asked too often");
    const part = turn(JSON.stringify(prompt));
    const finishReason = part.type === "text" ? ("stop" as const) : ("tool-calls" as const);
    return { part, finishReason };
  };
  return new MastraLanguageModelV2Mock({
    doGenerate: async ({ prompt }) => {
      const { part, finishReason } = next(prompt);
      return { content: [part], finishReason, usage, warnings: [] };
    },
    doStream: async ({ prompt }) => {
      const { part, finishReason } = next(prompt);
      const parts =
        part.type === "text"
          ? [
              { type: "text-start" as const, id: "1" },
              { type: "text-delta" as const, id: "1", delta: part.text },
              { type: "text-end" as const, id: "1" },
            ]
          : [part];
      const chunks = [{ type: "stream-start" as const, warnings: [] }, ...parts, { type: "finish" as const, finishReason, usage }];
      return { stream: simulateReadableStream({ chunks }) };
    },
  });
}

const command = (id: string, input: object, toolName = "mastra_workspace_execute_command"): Part => ({
  type: "tool-call",
  toolCallId: id,
  toolName,
  input: JSON.stringify(input),
});

test("commands of a workspace run in a VM, which is deleted with it", options, async () => {
  const before = await vms();
  const workspace = new Workspace({ sandbox: newSandbox() });
  await workspace.init();
  assert.equal((await vms()).length, before.length + 1);
  const run = workspace.sandbox!.executeCommand!.bind(workspace.sandbox);
  const uname = await run("uname", ["-s"]);
  assert.partialDeepStrictEqual(uname, { success: true, exitCode: 0, stdout: "Linux\n" });
  assert.equal((await run("pwd", [], { cwd: "/tmp" })).stdout, "/tmp\n");
  const shown = await run("printenv", ["GREETING"], { env: { GREETING: "it's é" } });
  assert.equal(shown.stdout, "it's é\n");
  const failed = await run("sh", ["-c", "echo out; echo err >&2; exit 7"]);
  assert.partialDeepStrictEqual(failed, { success: false, exitCode: 7, stdout: "out\n", stderr: "err\n" });
  await workspace.destroy();
  assert.deepEqual(await vms(), before);
});

test("an agent runs commands, sees their output, and reports", options, async () => {
  const before = await vms();
  const model = scripted(
    () => command("1", { command: "uname -s && nproc" }),
    (prompt) => {
      assert.match(prompt, /Linux\\+n\d/);
      return command("2", { command: "printf 'print(2**10)' > /tmp/p.py && python3 /tmp/p.py; exit 3" });
    },
    (prompt) => {
      assert.match(prompt, /1024\\+n/);
      assert.match(prompt, /Exit code: 3/);
      return { type: "text", text: "it is 1024" };
    },
  );
  assert.equal(await ask("Compute 2 to the power of 10.", model, newSandbox()), "it is 1024");
  assert.deepEqual(await vms(), before);
});

test("a sandbox in a VPC has its private address", options, async () => {
  const { vpcId } = await freestyle.vpc.create({ cidr: "192.168.10.0/24" });
  const nics = [{ default: true, vpc: vpcId, mode: "routed", ipv4: "192.168.10.10" }];
  const workspace = new Workspace({ sandbox: newSandbox({ create: { nics } }) });
  await workspace.init();
  const { stdout } = await workspace.sandbox!.executeCommand!("hostname", ["-I"]);
  assert.equal(stdout.trim(), "192.168.10.10");
  await workspace.destroy();
  assert.equal((await freestyle.fetch(`/v1/vpcs/${vpcId}`, { method: "DELETE" })).status, 200);
});

test("processes in the background, with their own streams and an end of input", { ...options, skip: guide }, async () => {
  const workspace = new Workspace({ sandbox: newSandbox({ env: { LEVEL: "high" } }) });
  await workspace.init();
  try {
    const { processes } = workspace.sandbox!;
    const sorted = await processes!.spawn('sort -n; echo "$LEVEL" >&2; exit 4');
    await sorted.sendStdin("10\n9\n");
    await sorted.closeStdin();
    assert.partialDeepStrictEqual(await sorted.wait(), { exitCode: 4, stdout: "9\n10\n", stderr: "high\n" });
    const endless = await processes!.spawn("echo begun; sleep 600");
    await new Promise<void>((resolve) => endless.reader.once("data", () => resolve()));
    assert.equal(endless.stdout, "begun\n");
    assert.equal(await endless.kill(), true);
    assert.equal((await endless.wait()).exitCode, 137);
    const listed = await processes!.list();
    assert.deepEqual(listed.map(({ running, exitCode }) => [running, exitCode]), [[false, 4], [false, 137]]);
    const late = await workspace.sandbox!.executeCommand!("sh", ["-c", "echo early; sleep 600"], { timeout: 10_000 });
    assert.partialDeepStrictEqual(late, { success: false, stdout: "early\n", timedOut: true });

    const tools = await createWorkspaceTools(workspace);
    assert.ok(tools.mastra_workspace_get_process_output && tools.mastra_workspace_kill_process);
  } finally {
    await workspace.destroy();
  }
});

test("files, the URL of a port, stop, and the same VM found again by its id", { ...options, skip: guide }, async () => {
  const id = `mastra-test-${crypto.randomUUID()}`;
  const first = newSandbox({ id, workingDirectory: "/srv/app" });
  const workspace = new Workspace({ sandbox: first });
  await workspace.init();
  const { vmId } = first;
  await first.writeFiles([
    { path: "/srv/app/index.html", content: "from é\n" },
    { path: "/srv/app/run.sh", content: Buffer.from("#!/bin/sh\necho ran\n"), mode: 0o755 },
  ]);
  assert.equal((await first.executeCommand("./run.sh")).stdout, "ran\n");
  await first.processes.spawn("python3 -m http.server 8000");
  await first.executeCommand("sh", ["-c", "until curl -sf -o /dev/null http://127.0.0.1:8000; do sleep 0.2; done"]);
  const url = await first.networking.getPortUrl(8000);
  assert.deepEqual(await get(url), { status: 200, body: "from é\n" });
  await first._stop();
  assert.equal((await (await freestyle.fetch(`/v1/vms/${vmId}`)).json()).state, "suspended");

  const again = newSandbox({ id });
  assert.deepEqual(await again._start(), { outcome: "connected" });
  assert.equal(again.vmId, vmId);
  assert.deepEqual(await get(url), { status: 200, body: "from é\n" });
  await again._destroy();
});
