/** @jsxImportSource smithers-orchestrator */
// The example's workflow and its provider in real runs of Smithers.
import { afterAll, expect, setDefaultTimeout, test } from "bun:test";
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { freestyle } from "freestyle";
import { outputs, remoteChildWorkflow, Sandbox, smithers, Workflow } from "./guide-parts.tsx";
import { createFreestyleSandboxProvider } from "./provider.ts";
import { removeRepositories, repository, start, vms } from "./runs.ts";
import { greeting } from "./workflow.tsx";

setDefaultTimeout(900_000);
afterAll(removeRepositories);

const oneSandbox = (provider: unknown) =>
  smithers((ctx) => (
    <Workflow name="one-sandbox">
      <Sandbox
        id="edit"
        provider={provider}
        workflow={remoteChildWorkflow}
        input={{ prompt: ctx.input.prompt }}
        output={outputs.sandboxResult}
        reviewDiffs={false}
        retries={0}
      />
    </Workflow>
  ));

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
  const bundle = join(rootDir, ".smithers", "sandboxes", run.runId, "greet", "result", "README.md");
  expect(JSON.parse(readFileSync(bundle, "utf8")).outputs).toEqual({ summary: "greeted Ann" });
  expect(readFileSync(join(rootDir, "greeting.txt"), "utf8")).toBe("first line\n");
  expect(await vms()).toEqual(before);
});

test("added, changed and deleted files come back, also binary ones", async () => {
  const edit = `cd /workspace/repo && printf '\\0\\377' > 'new file.bin' && rm old.txt && echo é >> greeting.txt`;
  const result = `echo '{"status": "finished", "output": {"summary": "done"}}' > /workspace/smithers-result.json`;
  const provider = createFreestyleSandboxProvider({
    freestyle,
    command: `${edit} && ${result}`,
    repository: "/workspace/repo",
  });
  const rootDir = repository();
  const run = await start(oneSandbox(provider), { prompt: "edit" }, rootDir);
  expect(run.error).toBeUndefined();
  expect(readFileSync(join(rootDir, "new file.bin"))).toEqual(Buffer.from([0, 255]));
  expect(existsSync(join(rootDir, "old.txt"))).toBe(false);
  expect(readFileSync(join(rootDir, "greeting.txt"), "utf8")).toBe("first line\né\n");
});

test("a command that fails fails the run with its message, and the VM is deleted", async () => {
  const before = await vms();
  const provider = createFreestyleSandboxProvider({ freestyle, command: "echo broken >&2; exit 7" });
  const run = await start(oneSandbox(provider), { prompt: "fail" }, repository());
  expect(run.status).toBe("failed");
  expect(JSON.stringify(run.error)).toContain("exited with 7");
  expect(await vms()).toEqual(before);
});
