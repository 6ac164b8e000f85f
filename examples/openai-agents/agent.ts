// An agent with a VM of its own: `node agent.ts "What OS do you run on?"`, with OPENAI_API_KEY set.
import { run, type Model } from "@openai/agents";
import { SandboxAgent, shell } from "@openai/agents/sandbox";
import { steadSandbox } from "./stead-sandbox.ts";

export async function ask(task: string, model: string | Model = "gpt-5.5", client = steadSandbox()) {
  const agent = new SandboxAgent({
    name: "operator",
    model,
    instructions: "You operate a Linux VM with exec_command. Run commands to do the task, then report.",
    capabilities: [shell()],
  });
  const result = await run(agent, task, { sandbox: { client } });
  return String(result.finalOutput);
}

if (import.meta.main) console.log(await ask(process.argv[2] ?? "Which OS and how many CPUs do you have?"));
