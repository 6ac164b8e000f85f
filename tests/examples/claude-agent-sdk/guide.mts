// The bridge of the published guide, which the test has written to guide-bridge.ts: the CLI runs between pipes on a
// terminal of the VM, which has no end of input, so the loop is left at the result.
import assert from "node:assert/strict";
import test from "node:test";
import { query } from "@anthropic-ai/claude-agent-sdk";
import { freestyle } from "freestyle";
import { spawnInVm } from "./guide-bridge.ts";

const vm = freestyle.vms.ref({ vmId: process.env.VM_ID! });
const options = { timeout: 900_000 };

async function ask(prompt: string, executable: string): Promise<string | undefined> {
  const response = query({
    prompt,
    options: {
      spawnClaudeCodeProcess: spawnInVm(vm),
      pathToClaudeCodeExecutable: executable,
      env: { ANTHROPIC_API_KEY: "sk-ant-stand-in", HOME: "/root", PATH: "/root/.local/bin:/usr/bin:/bin" },
      canUseTool: async (_, input) => ({ behavior: "allow", updatedInput: input }),
    },
  });
  for await (const message of response) {
    if (message.type === "result") return "result" in message ? message.result : message.subtype;
  }
}

test("the stand-in of the CLI answers through the bridge of the guide", options, async () => {
  const answer = JSON.parse((await ask("what is here?", "/root/fake/claude"))!);
  assert.partialDeepStrictEqual(answer, { start: "what is here?", host: vm.vmId, key: "sk-ant-stand-in" });
});

test("the real CLI runs its Bash tool through the bridge of the guide", options, async () => {
  const answer = await ask("Write the name of this host to a file.", "/root/.local/bin/claude");
  assert.equal(answer, "it is written");
});
