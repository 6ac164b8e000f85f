// A sandbox provider of Smithers: every run of a <Sandbox> has a VM of its own. The command in the VM reads
// /workspace/smithers-request.json and writes /workspace/smithers-result.json.
import { execFile } from "node:child_process";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { promisify } from "node:util";
import type { Freestyle } from "freestyle";
import type { SandboxProvider, SandboxProviderRequest } from "smithers-orchestrator/sandbox";

export type SteadProviderOptions = {
  freestyle: Pick<Freestyle, "vms">;
  command: string;
  setupFiles?: Record<string, { content: string }>;
  idleTimeoutSeconds?: number;
  snapshotId?: string;
  /** Limits the command, in place of the limit of the workflow's tools. */
  timeoutMs?: number;
  /** Clone the repository of the workflow into this folder of the VM, and return what the command changed in it. */
  repository?: string;
};

type Vm = Awaited<ReturnType<Freestyle["vms"]["create"]>>["vm"];

const REQUEST = "/workspace/smithers-request.json";
const RESULT = "/workspace/smithers-result.json";
const HEARTBEAT_MS = 15_000;
const OPERATIONS = { A: "add", D: "delete" } as const;

const run = promisify(execFile);
const quoted = (word: string) => `'${word.replaceAll("'", `'\\''`)}'`;
const keyOf = ({ runId, sandboxId }: SandboxProviderRequest) => `${runId}/${sandboxId}`;

export function createFreestyleSandboxProvider(options: SteadProviderOptions): SandboxProvider {
  const vms = new Map<string, string>();
  return {
    id: "stead",
    async run(request) {
      const { idleTimeoutSeconds, snapshotId } = options;
      const { vm, vmId } = await options.freestyle.vms.create({ idleTimeoutSeconds, snapshotId });
      vms.set(keyOf(request), vmId);
      const beat = setInterval(() => request.heartbeat({ vmId }), HEARTBEAT_MS);
      try {
        const base = options.repository && (await upload(vm, request.rootDir, options.repository));
        const { runId, sandboxId, input, config } = request;
        for (const [path, { content }] of Object.entries(options.setupFiles ?? {})) {
          await vm.fs.writeTextFile(path, content);
        }
        await vm.fs.writeTextFile(REQUEST, JSON.stringify({ runId, sandboxId, input, config }));
        await execute(vm, options.command, options.timeoutMs ?? request.toolTimeoutMs);
        const result = JSON.parse(await vm.fs.readTextFile(RESULT));
        const changes = base && { diffBundle: await diffBundle(vm, options.repository!, base) };
        return { workspaceId: vmId, runId: vmId, ...result, ...changes };
      } finally {
        clearInterval(beat);
      }
    },
    async cleanup(request) {
      const vmId = vms.get(keyOf(request));
      vms.delete(keyOf(request));
      if (vmId) await options.freestyle.vms.delete({ vmId });
    },
  };
}

async function execute(vm: Vm, command: string, timeoutMs = 300_000): Promise<string> {
  const { statusCode, stdout, stderr } = await vm.exec({ command, timeoutMs });
  if (statusCode !== 0) throw new Error(`${command} in the VM exited with ${statusCode}: ${stderr || stdout}`);
  return stdout ?? "";
}

/** Copy the commit that is checked out here into the VM; returns its id. */
async function upload(vm: Vm, rootDir: string, folder: string): Promise<string> {
  const local = await mkdtemp(join(tmpdir(), "smithers-"));
  try {
    const bundle = join(local, "repo.bundle");
    await run("git", ["bundle", "create", "--quiet", bundle, "HEAD"], { cwd: rootDir });
    await vm.fs.writeFile("/workspace/repo.bundle", await readFile(bundle));
  } finally {
    await rm(local, { recursive: true });
  }
  await execute(vm, `git clone --quiet /workspace/repo.bundle ${quoted(folder)}`);
  return (await execute(vm, `git -C ${quoted(folder)} rev-parse HEAD`)).trim();
}

/** What has changed in the VM since the commit, as one patch for each file. */
async function diffBundle(vm: Vm, folder: string, baseRef: string) {
  const git = `git -C ${quoted(folder)}`;
  const diff = `${git} diff --cached --no-renames ${baseRef}`;
  const names = await execute(vm, `${git} add --all && ${diff} --name-status -z`);
  const fields = names.split("\0");
  const patches = [];
  for (let at = 0; at + 1 < fields.length; at += 2) {
    const [status, path] = [fields[at], fields[at + 1]];
    const operation = OPERATIONS[status as keyof typeof OPERATIONS] ?? ("modify" as const);
    patches.push({ path, operation, diff: await execute(vm, `${diff} --binary -- ${quoted(path)}`) });
  }
  return { seq: 1, baseRef, patches };
}
