// Claude Code in a VM that has it, from TypeScript: `node ask.ts VM_ID "List /etc"`, with ANTHROPIC_API_KEY set.
import { query, type Options } from "@anthropic-ai/claude-agent-sdk";
import { inVm, type InVmOptions } from "./vm-process.ts";

export async function ask(vmId: string, prompt: string, options: Options = {}, bridge: InVmOptions = {}) {
  const messages = query({
    prompt,
    options: {
      pathToClaudeCodeExecutable: "/root/.local/bin/claude",
      canUseTool: async (_, input) => ({ behavior: "allow", updatedInput: input }),
      ...options,
      spawnClaudeCodeProcess: inVm(vmId, bridge),
    },
  });
  let answer: string | undefined;
  for await (const message of messages) {
    if (message.type === "result") answer = "result" in message ? message.result : message.subtype;
  }
  return answer;
}

if (import.meta.main) console.log(await ask(process.argv[2], process.argv[3]));
