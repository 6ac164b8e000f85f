/** @jsxImportSource smithers-orchestrator */
// What the guide uses without showing it.
import { createSmithers, Sandbox } from "smithers-orchestrator";
import { z } from "zod";

const shape = { input: z.object({ prompt: z.string() }), sandboxResult: z.object({ summary: z.string() }) };

const child = createSmithers(shape);
export const remoteChildWorkflow = child.smithers(() => (
  <child.Workflow name="unused">
    <child.Task id="nothing" output={child.outputs.sandboxResult}>
      {{ summary: "nothing" }}
    </child.Task>
  </child.Workflow>
));

export const { smithers, Workflow, outputs } = createSmithers(shape);
export { Sandbox };
