// Claude Code in a VM, from TypeScript: `node ask.ts "List /etc"`, with ANTHROPIC_API_KEY set.
import { query, type Options } from "@anthropic-ai/claude-agent-sdk";
import { freestyle } from "freestyle";
import { inVm, type InVmOptions } from "./vm-process.ts";

const INSTALL = "npm install --global --prefix /root/.local @anthropic-ai/claude-code";

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

if (import.meta.main) {
  const { vm, vmId } = await freestyle.vms.create();
  try {
    const command = `HOME=/root ${INSTALL}`;
    const installed = await vm.exec({ command, timeoutMs: 600_000 });
    if (installed.statusCode !== 0) throw new Error(`cannot install the CLI: ${installed.stderr}`);
    console.log(await ask(vmId, process.argv[2]));
  } finally {
    await freestyle.vms.delete({ vmId });
  }
}
