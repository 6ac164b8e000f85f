// An agent of Mastra that works in a VM: `node agent.ts "Which OS is this?"`, with OPENAI_API_KEY set.
import { Agent, type AgentConfig } from "@mastra/core/agent";
import { Workspace, type WorkspaceSandbox } from "@mastra/core/workspace";
import { SteadSandbox } from "./stead-sandbox.ts";

export async function ask(
  task: string,
  model: AgentConfig["model"] = "openai/gpt-5.5",
  sandbox: WorkspaceSandbox = new SteadSandbox(),
) {
  const workspace = new Workspace({ sandbox });
  try {
    const agent = new Agent({
      id: "operator",
      name: "operator",
      model,
      instructions: "You operate a Linux VM. Run commands to do the task, then report.",
      workspace,
    });
    return (await agent.generate(task)).text;
  } finally {
    await workspace.destroy();
  }
}

if (import.meta.main) console.log(await ask(process.argv[2] ?? "Which OS and how many CPUs do you have?"));
