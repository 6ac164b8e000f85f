// The Claude Agent SDK with a CLI in a VM: the stand-in of tests/conformance, and the real one (with REAL_CLI set),
// which asks a stand-in of the Messages API in the same VM.
import assert from "node:assert/strict";
import test from "node:test";
import { ask } from "./ask.ts";

const vmId = process.env.VM_ID!;
const options = { timeout: 900_000 };

test("the stand-in: a long prompt, a tool that needs permission, a long answer, the end of input", options, async () => {
  const prompt = `what is here? ${"é漢🙂".repeat(20_000)} that is all`;
  const tools: unknown[] = [];
  const answer = await ask(vmId, prompt, {
    pathToClaudeCodeExecutable: "/root/fake/claude",
    env: { ANTHROPIC_API_KEY: "it's a key", HOME: "/elsewhere" },
    canUseTool: async (name, input) => {
      tools.push([name, input]);
      return { behavior: "allow", updatedInput: input };
    },
  });
  const { long, ...others } = JSON.parse(answer!);
  assert.deepEqual(tools, [["Bash", { command: "hostname" }]]);
  assert.deepEqual(others, {
    length: Array.from(prompt).length,
    start: Array.from(prompt).slice(0, 40).join(""),
    end: Array.from(prompt).slice(-40).join(""),
    host: vmId,
    key: "it's a key",
    folder: "/root",
  });
  assert.equal(long, "漢é🙂x".repeat(50_000));
});

test("a CLI that does not exist is an error", options, async () => {
  await assert.rejects(ask(vmId, "hello", { pathToClaudeCodeExecutable: "/root/nowhere/claude" }));
});

test("the real CLI runs its Bash tool in the VM", { ...options, skip: !process.env.REAL_CLI }, async () => {
  const said: string[] = [];
  const answer = await ask(
    vmId,
    "Write the name of this host to a file.",
    { env: { ANTHROPIC_API_KEY: "sk-ant-stand-in", ANTHROPIC_BASE_URL: "http://127.0.0.1:8999" } },
    { onStderr: (text) => said.push(text), env: { CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1" } },
  );
  assert.equal(answer, "it is written", said.join(""));
});
