// A sandbox client of the OpenAI Agents SDK: each session is a VM.
import {
  getRecordedExposedPortEndpoint,
  normalizeSandboxClientCreateArgs,
  recordExposedPortEndpoint,
} from "@openai/agents/sandbox";
import type {
  ExecCommandArgs,
  SandboxClient,
  SandboxClientCreateArgs,
  SandboxSession,
  SandboxSessionState,
  Manifest,
} from "@openai/agents/sandbox";
import { freestyle } from "freestyle";

export type SteadSandboxOptions = {
  /** A snapshot that new VMs start from. */
  snapshotId?: string;
  /** How long a command of the agent may run. */
  timeoutMs?: number;
};

type Vm = ReturnType<typeof freestyle.vms.ref>;

const quoted = (word: string) => `'${word.replaceAll("'", `'\\''`)}'`;

export function steadSandbox(options: SteadSandboxOptions = {}) {
  return {
    backendId: "stead",
    async create(args?: SandboxClientCreateArgs | Manifest, more?: Record<string, unknown>) {
      const { manifest } = normalizeSandboxClientCreateArgs(args, more);
      const { vm, vmId } = await freestyle.vms.create({ snapshotId: options.snapshotId });
      await vm.exec(`mkdir -p ${quoted(manifest.root)}`);
      return session(vm, vmId, { manifest }, options.timeoutMs ?? 300_000);
    },
  } satisfies SandboxClient;
}

function session(vm: Vm, vmId: string, state: SandboxSessionState, timeoutMs: number) {
  let deleted: Promise<unknown> | undefined;
  return {
    state,
    vm,
    async execCommand({ cmd, workdir }: ExecCommandArgs) {
      const folder = quoted(workdir ?? state.manifest.root);
      const start = performance.now();
      const ended = await vm.exec({ command: `cd ${folder} || exit\n${cmd}`, timeoutMs });
      const seconds = ((performance.now() - start) / 1000).toFixed(3);
      const output = `${ended.stdout ?? ""}${ended.stderr ?? ""}`;
      return `exit code ${ended.statusCode} after ${seconds} s\n${output}`;
    },
    /** The URL of a port of the VM: Stead maps a name of its first preview zone to it. */
    async resolveExposedPort(port: number) {
      const known = getRecordedExposedPortEndpoint(state, port);
      if (known) return known;
      const answer = await freestyle.fetch(`/v1/vms/${vmId}/urls/${port}`, { method: "PUT" });
      const url = new URL((await answer.json()).url);
      const endpoint = { host: url.hostname, port: Number(url.port || 443), tls: true };
      return recordExposedPortEndpoint(state, endpoint, port);
    },
    async close() {
      deleted ??= freestyle.vms.delete({ vmId });
      await deleted;
    },
  } satisfies SandboxSession & { vm: Vm };
}
