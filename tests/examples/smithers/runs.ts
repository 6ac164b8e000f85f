// Runs of workflows in repositories of their own.
import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Effect } from "effect";
import { freestyle } from "freestyle";
import { runWorkflow } from "smithers-orchestrator";

const folders: string[] = [];

export function repository(): string {
  const folder = mkdtempSync(join(tmpdir(), "trial-"));
  folders.push(folder);
  const git = (...words: string[]) => execFileSync("git", words, { cwd: folder });
  git("init", "--quiet", "--initial-branch=main");
  git("config", "user.email", "ann@example.com");
  git("config", "user.name", "Ann");
  writeFileSync(join(folder, "greeting.txt"), "first line\n");
  writeFileSync(join(folder, "old.txt"), "to be deleted\n");
  git("add", "--all");
  git("commit", "--quiet", "--message=first");
  return folder;
}

export const removeRepositories = () => folders.forEach((folder) => rmSync(folder, { recursive: true }));

export const vms = async () => (await freestyle.vms.list()).vms.map((vm: { id: string }) => vm.id);

/** Run a workflow to its end. Its tools have more time than by default: VMs without KVM are slow. */
export const start = (workflow: any, input: object, rootDir: string) =>
  Effect.runPromise(runWorkflow(workflow, { input, rootDir, toolTimeoutMs: 600_000 }) as any) as Promise<any>;
