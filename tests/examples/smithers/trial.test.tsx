/** @jsxImportSource smithers-orchestrator */
// The example's workflow, and with GUIDE set the provider of the published page, in real runs of Smithers.
import { afterAll, expect, setDefaultTimeout, test } from "bun:test";
import { execFileSync } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Effect } from "effect";
import { freestyle } from "freestyle";
import { createSmithers, runWorkflow, Sandbox } from "smithers-orchestrator";
import { z } from "zod";
import { createFreestyleSandboxProvider } from "./provider.ts";
import { greeting } from "./workflow.tsx";

setDefaultTimeout(900_000);
const folders: string[] = [];
afterAll(() => folders.forEach((folder) => rmSync(folder, { recursive: true })));

function repository(): string {
  const folder = mkdtempSync(join(tmpdir(), "trial-"));
  folders.push(folder);
  const git = (...words: string[]) => execFileSync("git", words, { cwd: folder });
  git("init", "--quiet", "--initial-branch=main");
  git("config", "user.email", "ann@example.com");
  git("config", "user.name", "Ann");
  writeFileSync(join(folder, "greeting.txt"), "first line\n");
  git("add", "greeting.txt");
  git("commit", "--quiet", "--message=first");
  return folder;
}

const vms = async () => (await freestyle.vms.list()).vms.map((vm: { id: string }) => vm.id);
const start = (workflow: any, input: object, rootDir: string) =>
  Effect.runPromise(runWorkflow(workflow, { input, rootDir }) as any) as Promise<any>;

test("changes that a VM made are applied to the repository here, and the VM is deleted", async () => {
  const before = await vms();
  const rootDir = repository();
  const run = await start(greeting({ autoAcceptDiffs: true }), { name: "Ann" }, rootDir);
  expect(run.error).toBeUndefined();
  expect(run.status).toBe("finished");
  expect(readFileSync(join(rootDir, "greeting.txt"), "utf8")).toBe("first line\nhello Ann\n");
  expect(await vms()).toEqual(before);
});

test("changes without a review are refused", async () => {
  const before = await vms();
  const rootDir = repository();
  const run = await start(greeting({ reviewDiffs: true }), { name: "Ann" }, rootDir);
  expect(run.status).toBe("failed");
  expect(readFileSync(join(rootDir, "greeting.txt"), "utf8")).toBe("first line\n");
  expect(await vms()).toEqual(before);
});

const shape = { input: z.object({ prompt: z.string() }), sandboxResult: z.object({ summary: z.string() }) };

function workflowOf(provider: unknown) {
  const child = createSmithers(shape);
  const unused = child.smithers(() => (
    <child.Workflow name="unused">
      <child.Task id="nothing" output={child.outputs.sandboxResult}>
        {{ summary: "nothing" }}
      </child.Task>
    </child.Workflow>
  ));
  const { smithers, Workflow, outputs } = createSmithers(shape);
  return smithers((ctx) => (
    <Workflow name="one-sandbox">
      <Sandbox
        id="remote-edit"
        provider={provider}
        workflow={unused}
        input={{ prompt: ctx.input.prompt }}
        output={outputs.sandboxResult}
        reviewDiffs={false}
        retries={0}
      />
    </Workflow>
  ));
}

test("a command that fails fails the run with its message, and the VM is deleted", async () => {
  const before = await vms();
  const provider = createFreestyleSandboxProvider({ freestyle, command: "echo broken >&2; exit 7", timeoutMs: 300_000 });
  const run = await start(workflowOf(provider), { prompt: "x" }, repository());
  expect(run.status).toBe("failed");
  expect(JSON.stringify(run.error)).toContain("exited with 7");
  expect(await vms()).toEqual(before);
});

test.skipIf(!process.env.GUIDE)("the provider of the published page", async () => {
  const before = await vms();
  const { freestyleProvider } = await import("./guide-provider.ts");
  const rootDir = repository();
  let result: any;
  const noted = {
    ...freestyleProvider,
    run: async (request: any) => (result = await freestyleProvider.run(request)),
  };
  const run = await start(workflowOf(noted), { prompt: "write docs" }, rootDir);
  expect(run.error).toBeUndefined();
  expect(run.status).toBe("finished");
  expect(result).toMatchObject({
    status: "finished",
    output: { summary: "handled write docs" },
    runId: "freestyle:remote-edit",
  });
  expect(existsSync(join(rootDir, "smithers-result.json"))).toBe(false);
  expect(await vms()).toEqual(before);
});
