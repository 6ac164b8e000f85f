// The provider and the workflow of the published guide, which the test has written to guide-workflow.tsx.
import { afterAll, expect, setDefaultTimeout, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import workflow from "./guide-workflow.tsx";
import { removeRepositories, repository, start, vms } from "./runs.ts";

setDefaultTimeout(900_000);
afterAll(removeRepositories);

test("the workflow of the guide runs its program in a VM, which is deleted", async () => {
  const before = await vms();
  const rootDir = repository();
  const run = await start(workflow, { prompt: "write docs" }, rootDir);
  expect(run.error).toBeUndefined();
  expect(run.status).toBe("finished");
  const bundle = join(rootDir, ".smithers", "sandboxes", run.runId, "remote-edit", "result", "README.md");
  expect(JSON.parse(readFileSync(bundle, "utf8"))).toMatchObject({
    status: "finished",
    outputs: { summary: "handled write docs" },
    runId: "freestyle:remote-edit",
  });
  expect(await vms()).toEqual(before);
});
