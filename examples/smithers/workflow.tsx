/** @jsxImportSource smithers-orchestrator */
// A workflow whose one step edits this repository in a VM. The changes come back as a diff and are applied here.
//   smithers up workflow.tsx --input '{"name": "Ann"}'
import { freestyle } from "freestyle";
import { createSmithers, Sandbox } from "smithers-orchestrator";
import { z } from "zod";
import { createFreestyleSandboxProvider } from "./provider.ts";

const SCRIPT = `
import json, pathlib
request = json.load(open("/workspace/smithers-request.json"))
greeting = pathlib.Path("/workspace/repo/greeting.txt")
before = greeting.read_text() if greeting.exists() else ""
greeting.write_text(f"{before}hello {request['input']['name']}\\n")
result = {"status": "finished", "output": {"summary": f"greeted {request['input']['name']}"}}
json.dump(result, open("/workspace/smithers-result.json", "w"))
`;

const provider = createFreestyleSandboxProvider({
  freestyle,
  command: "python3 /workspace/greet.py",
  setupFiles: { "/workspace/greet.py": { content: SCRIPT } },
  repository: "/workspace/repo",
  timeoutMs: 300_000,
  idleTimeoutSeconds: 600,
});

const shape = { input: z.object({ name: z.string() }), result: z.object({ summary: z.string() }) };
// <Sandbox> needs a workflow; this provider runs its command instead.
const unused = createSmithers(shape);
const child = unused.smithers(() => (
  <unused.Workflow name="unused">
    <unused.Task id="nothing" output={unused.outputs.result}>
      {{ summary: "nothing" }}
    </unused.Task>
  </unused.Workflow>
));

const { smithers, Workflow, outputs } = createSmithers(shape);

export const greeting = (review: { reviewDiffs?: boolean; autoAcceptDiffs?: boolean }) =>
  smithers((ctx) => (
    <Workflow name="greeting">
      <Sandbox
        id="greet"
        provider={provider}
        workflow={child}
        input={{ name: ctx.input.name }}
        output={outputs.result}
        retries={0}
        {...review}
      />
    </Workflow>
  ));

export default greeting({ autoAcceptDiffs: true });
