// The Claude Agent SDK runs here, the Claude Code CLI in a VM: `spawnClaudeCodeProcess` for `query()`.
import { EventEmitter } from "node:events";
import { PassThrough, Writable } from "node:stream";
import type { SpawnedProcess, SpawnOptions } from "@anthropic-ai/claude-agent-sdk";
import { startProcess, type VmProcess } from "../process.ts";

export type InVmOptions = {
  /** Variables of the caller that the CLI in the VM gets, besides those that start with CLAUDE. */
  pass?: string[];
  /** Variables for the CLI in the VM. */
  env?: Record<string, string>;
  /** Called with what the CLI prints to standard error. */
  onStderr?: (text: string) => void;
};

const PASSED = ["ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "CLAUDE_CODE_OAUTH_TOKEN"];

export function inVm(vmId: string, { pass = PASSED, env = {}, onStderr }: InVmOptions = {}) {
  return ({ command, args, cwd, env: given, signal }: SpawnOptions): SpawnedProcess => {
    const events = new EventEmitter();
    const stdout = new PassThrough();
    let exitCode: number | null = null;
    let killed = false;

    const passed = Object.entries(given).filter(([name, value]) => {
      return value !== undefined && (pass.includes(name) || name.startsWith("CLAUDE"));
    });
    const started: Promise<VmProcess> = startProcess(vmId, [command, ...args], {
      cwd: cwd ?? "/root",
      env: { HOME: "/root", ...(Object.fromEntries(passed) as Record<string, string>), ...env },
      onStdout: (bytes) => stdout.write(bytes),
      onStderr: (bytes) => onStderr?.(new TextDecoder().decode(bytes)),
    });
    started
      .then((process) => process.exited)
      .then((ended) => {
        exitCode = ended.exitCode;
        stdout.end();
        events.emit("exit", killed ? null : exitCode, killed ? "SIGTERM" : null);
      })
      .catch((error) => {
        stdout.end();
        events.emit("error", error);
      });

    const kill = (name: NodeJS.Signals = "SIGTERM") => {
      killed = true;
      started.then((process) => process.signal(name)).catch(() => {});
      return true;
    };
    signal.addEventListener("abort", () => kill());

    const stdin = new Writable({
      write: (chunk, _, done) => void started.then((process) => process.write(chunk)).then(() => done(), done),
      final: (done) => void started.then((process) => process.closeStdin()).then(() => done(), done),
    });
    return {
      stdin,
      stdout,
      kill,
      get killed() {
        return killed;
      },
      get exitCode() {
        return exitCode;
      },
      on: (event, listener) => void events.on(event, listener),
      once: (event, listener) => void events.once(event, listener),
      off: (event, listener) => void events.off(event, listener),
    };
  };
}
