// A sandbox of Mastra on a VM: commands and background processes with separate streams, files, URLs of ports.
// `stop` suspends the VM, and another process finds it again by the sandbox's id.
import { MastraSandbox, ProcessHandle, SandboxProcessManager } from "@mastra/core/workspace";
import type {
  CommandResult,
  ProcessInfo,
  ProviderStatus,
  SandboxFileInput,
  SpawnProcessOptions,
} from "@mastra/core/workspace";
import { freestyle } from "freestyle";
import { startProcess, type Ended, type VmProcess } from "../process.ts";

type CreateOptions = NonNullable<Parameters<typeof freestyle.vms.create>[0]>;
type Vm = ReturnType<typeof freestyle.vms.ref>;

export type SteadSandboxOptions = {
  /** The name of the VM. A sandbox with the id of an earlier one uses the same VM. */
  id?: string;
  env?: Record<string, string>;
  workingDirectory?: string;
  create?: CreateOptions;
};

export class SteadSandbox extends MastraSandbox<string> {
  readonly id: string;
  readonly name = "SteadSandbox";
  readonly provider = "stead";
  status: ProviderStatus = "pending";
  #vmId?: string;
  readonly #create: CreateOptions;

  constructor({ id, env, workingDirectory, create }: SteadSandboxOptions = {}) {
    super({ name: "SteadSandbox", env, workingDirectory, processes: new VmProcesses({ env }) });
    this.id = id ?? `mastra-${crypto.randomUUID()}`;
    this.#create = create ?? {};
  }

  get vmId(): string {
    if (!this.#vmId) throw new Error(`sandbox ${this.id} has no VM: it is ${this.status}`);
    return this.#vmId;
  }

  /** The VM, for everything that Mastra has no word for: fork, snapshot, terminals. */
  get vm(): Vm {
    return freestyle.vms.ref({ vmId: this.vmId });
  }

  protected override async find(): Promise<string | undefined> {
    const answer = await freestyle.fetch(`/v1/vms?search=${encodeURIComponent(this.id)}`);
    const { vms } = (await answer.json()) as { vms: { id: string; name?: string; state: string }[] };
    return vms.find((vm) => vm.name === this.id && vm.state !== "lost")?.id;
  }

  protected override connect(vmId: string): void {
    this.#vmId = vmId; // a suspended VM wakes when it is used
  }

  protected override async create(): Promise<void> {
    const { vmId } = await freestyle.vms.create({ ...this.#create, name: this.id });
    this.#vmId = vmId;
    if (this.workingDirectory) await this.vm.exec({ command: `mkdir -p '${this.workingDirectory}'` });
  }

  override async stop(): Promise<void> {
    const answer = await freestyle.fetch(`/v1/vms/${this.vmId}/suspend`, { method: "POST" });
    if (!answer.ok) throw new Error(`cannot suspend VM ${this.vmId}: ${await answer.text()}`);
  }

  override async destroy(): Promise<void> {
    if (this.#vmId) await freestyle.vms.delete({ vmId: this.#vmId });
    this.#vmId = undefined;
  }

  override async writeFiles(files: SandboxFileInput[]): Promise<void> {
    await this.ensureRunning();
    for (const { path, content, mode } of files) {
      const query = mode === undefined ? "" : `?mode=${mode.toString(8).padStart(4, "0")}`;
      const answer = await freestyle.fetch(`/v1/vms/${this.vmId}/files/${encodeURIComponent(path)}${query}`, {
        method: "PUT",
        headers: { "Content-Type": "application/octet-stream" },
        body: typeof content === "string" ? content : new Uint8Array(content),
      });
      if (!answer.ok) throw new Error(`cannot write ${path}: ${await answer.text()}`);
    }
  }

  override readonly networking = {
    getPortUrl: async (port: number): Promise<string | null> => {
      await this.ensureRunning();
      const answer = await freestyle.fetch(`/v1/vms/${this.vmId}/urls/${port}`, { method: "PUT" });
      return answer.ok ? ((await answer.json()) as { url: string }).url : null;
    },
  };

  override getInstructions(): string {
    return `A Debian VM with root and internet access; commands run in ${this.workingDirectory ?? "/root"}.`;
  }
}

class VmProcesses extends SandboxProcessManager<SteadSandbox> {
  override async spawn(command: string, options: SpawnProcessOptions = {}): Promise<ProcessHandle> {
    const handle = new VmHandle(command, options);
    const given = Object.entries(options.env ?? {}).filter(([, value]) => value !== undefined);
    const decoders = [new TextDecoder(), new TextDecoder()];
    const process = await startProcess(this.sandbox.vmId, command, {
      cwd: options.cwd ?? this.sandbox.workingDirectory,
      env: Object.fromEntries(given) as Record<string, string>,
      timeoutMs: options.timeout,
      onStdout: (bytes) => handle.emitStdout(decoders[0].decode(bytes, { stream: true })),
      onStderr: (bytes) => handle.emitStderr(decoders[1].decode(bytes, { stream: true })),
      onLost: (bytes) => handle.emitStderr(`[${bytes} bytes of output are lost]\n`),
    });
    handle.follow(process);
    if (options.stdinMode === "ignore") process.closeStdin();
    this._tracked.set(handle.pid, handle);
    return handle;
  }

  override async list(): Promise<ProcessInfo[]> {
    return [...this._tracked.values()].map((handle) => ({
      pid: handle.pid,
      command: handle.command,
      running: handle.exitCode === undefined,
      exitCode: handle.exitCode,
    }));
  }
}

class VmHandle extends ProcessHandle {
  pid = "";
  exitCode: number | undefined;
  #process!: VmProcess;
  #ended!: Promise<Ended>;
  readonly #start = Date.now();

  constructor(command: string, options: SpawnProcessOptions) {
    super(options);
    this.command = command;
  }

  follow(process: VmProcess): void {
    this.pid = process.id;
    this.#process = process;
    this.#ended = process.exited.then((ended) => {
      this.exitCode = ended.exitCode;
      return ended;
    });
    this.#ended.catch(() => {});
  }

  override async wait(): Promise<CommandResult> {
    const { exitCode, timedOut } = await this.#ended;
    return {
      success: exitCode === 0,
      exitCode,
      stdout: this.stdout,
      stderr: this.stderr,
      executionTimeMs: Date.now() - this.#start,
      timedOut,
      command: this.command,
    };
  }

  override async kill(): Promise<boolean> {
    if (this.exitCode !== undefined) return false;
    this.#process.signal("SIGKILL");
    await this.#ended;
    return true;
  }

  override async sendStdin(data: string): Promise<void> {
    this.#process.write(data);
  }

  override async closeStdin(): Promise<void> {
    this.#process.closeStdin();
  }
}
