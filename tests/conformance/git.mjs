// Git repositories with the npm package: every Git call it has, and the samples of its Git documentation.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import test from "node:test";
import { VmSpec } from "freestyle";
import { freestyle, output, refused, until, withVm } from "./client.mjs";

const uuid = /^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/;
const sha = /^[0-9a-f]{40}$/;
const text = (file) => Buffer.from(file.content, "base64").toString();

async function made(options = {}) {
  const { repoId, repo } = await freestyle.git.repos.create(options);
  return { repoId, repo };
}

test("create, list and delete a repository", async () => {
  const { repoId, repo } = await made({ name: "my-repo", defaultBranch: "trunk" });
  assert.match(repoId, uuid);
  assert.deepEqual(await repo.branches.getDefaultBranch(), { defaultBranch: "trunk" });
  const { repositories, total, offset } = await freestyle.git.repos.list({ limit: 20, cursor: "0" });
  assert.ok(total >= 1 && offset === 0);
  const row = repositories.find((row) => row.id === repoId);
  assert.equal(row.defaultBranch, "trunk");
  assert.deepEqual([row.branches, row.tags], [{}, {}]);
  const ref = freestyle.git.repos.ref({ repoId });
  assert.deepEqual(await ref.branches.getDefaultBranch(), { defaultBranch: "trunk" });
  assert.deepEqual(await freestyle.git.repos.delete({ repoId }), {});
  await refused("REPO_NOT_FOUND", () => freestyle.git.repos.delete({ repoId }));
  await refused("REPO_NOT_FOUND", () => repo.branches.list());
});

test("commit files and read them back", async () => {
  const { repo } = await made();
  const { commit } = await repo.commits.create({
    branch: "main",
    message: "Update README",
    files: [
      { path: "README.md", content: "# Updated README\n" },
      { path: "src/index.ts", content: Buffer.from("export {};\n").toString("base64"), encoding: "base64" },
    ],
    author: { name: "Ann", email: "ann@example.com" },
  });
  assert.match(commit.sha, sha);
  assert.equal(commit.message, "Update README");
  assert.equal(commit.author.name, "Ann");
  assert.ok(Math.abs(new Date(commit.author.date) - Date.now()) < 60_000);
  assert.deepEqual(commit.parents, []);

  const file = await repo.contents.get({ path: "src/index.ts", rev: "main" });
  assert.deepEqual([file.type, file.name, file.size, text(file)], ["file", "index.ts", 11, "export {};\n"]);
  const folder = await repo.contents.get({ path: "src" });
  assert.equal(folder.type, "dir");
  assert.deepEqual(folder.entries.map(({ type, path }) => [type, path]), [["file", "src/index.ts"]]);
  const root = await repo.contents.get();
  assert.deepEqual(root.entries.map(({ name }) => name).sort(), ["README.md", "src"]);
  const nested = root.entries.find(({ type }) => type === "dir");
  assert.deepEqual(nested.entries.map(({ path }) => path), ["src/index.ts"]);
  assert.equal((await repo.blobs.get({ sha: file.sha })).content, file.content);
  const { tree } = await repo.trees.get({ sha: commit.tree.sha });
  assert.deepEqual(tree.map(({ path, type }) => [path, type]), [["README.md", "blob"], ["src", "tree"]]);
  assert.deepEqual(await repo.commits.get({ sha: commit.sha }), commit);

  await refused("PATH_NOT_FOUND", () => repo.contents.get({ path: "missing" }));
  await refused("REFERENCE_NOT_FOUND", () => repo.contents.get({ path: "src", rev: "missing" }));
  await refused("INVALID_REVISION", () => repo.contents.get({ path: "src", rev: "main~1" }));
  await refused("BLOB_NOT_FOUND", () => repo.blobs.get({ sha: "0".repeat(40) }));
  await refused("INVALID_OBJECT_ID", () => repo.trees.get({ sha: "main" }));
  await refused("COMMIT_NOT_FOUND", () => repo.commits.get({ sha: "0".repeat(40) }));
});

test("invalid commits are refused and change nothing", async () => {
  const { repo } = await made();
  const write = (path, content = "x", more = {}) =>
    repo.commits.create({ message: "m", files: [{ path, content }], ...more });
  const first = (await write("a")).commit;
  await refused("INVALID_FILE_PATH", () => write("../a"));
  await refused("INVALID_FILE_PATH", () => write(".git/config"));
  await refused("INVALID_FILE_CHANGE", () => write("a/b"));
  await refused("INVALID_FILE_CHANGE", () =>
    repo.commits.create({ message: "m", files: [{ path: "gone", deleted: true }] }),
  );
  await refused("INVALID_BASE64_CONTENT", () =>
    repo.commits.create({ message: "m", files: [{ path: "b", content: "*", encoding: "base64" }] }),
  );
  const second = (await write("a", "y", { expectedSha: first.sha })).commit;
  const error = await refused("CONFLICTING_PARENT", () => write("a", "z", { expectedSha: first.sha }));
  assert.deepEqual([error.body.expected, error.body.actual], [first.sha, second.sha]);
  assert.equal((await repo.branches.get({ branchName: "main" })).sha, second.sha);
});

test("branches", async () => {
  const { repo } = await made();
  const { commit } = await repo.commits.create({ message: "m", files: [{ path: "a", content: "a" }] });
  const other = await repo.commits.create({
    message: "elsewhere",
    branch: "feature/new-flow",
    files: [{ path: "b", content: "b" }],
  });
  const branch = await repo.branches.get({ branchName: "feature/new-flow" });
  assert.deepEqual(branch, { name: "refs/heads/feature/new-flow", sha: other.commit.sha });
  const { branches } = await repo.branches.list();
  assert.deepEqual(branches, [
    { name: "feature/new-flow", commit: other.commit.sha },
    { name: "main", commit: commit.sha },
  ]);
  assert.deepEqual(await repo.branches.setDefaultBranch({ defaultBranch: "feature/new-flow" }), {});
  assert.equal(text(await repo.contents.get({ path: "b" })), "b");
  await refused("BRANCH_NOT_FOUND", () => repo.branches.get({ branchName: "missing" }));
  await refused("BRANCH_NOT_FOUND", () => repo.branches.setDefaultBranch({ defaultBranch: "missing" }));
  // The package does not send the name.
  await refused("BRANCH_NAME_EMPTY", () => repo.branches.create({ name: "feature/x" }));
});

test("list commits in pages, in both orders, and compare", async () => {
  const { repo } = await made();
  const shas = [];
  for (let number = 0; number < 5; number++) {
    const files = [{ path: "a", content: `${number}` }];
    shas.push((await repo.commits.create({ message: `c${number}`, files })).commit.sha);
  }
  const whole = await repo.commits.list();
  assert.deepEqual(whole.commits.map((commit) => commit.sha), shas.toReversed());
  assert.deepEqual([whole.count, whole.limit, whole.order, whole.total], [5, 50, "desc", 5]);
  const page = await repo.commits.list({ limit: 2 });
  assert.equal(page.next_commit, shas[2]);
  const next = await repo.commits.list({ limit: 2, until: page.next_commit });
  assert.deepEqual(next.commits.map((commit) => commit.sha), [shas[2], shas[1]]);
  assert.deepEqual(next.selector, { Until: shas[2] });
  const oldest = await repo.commits.list({ order: "asc", limit: 2 });
  const later = await repo.commits.list({ order: "asc", limit: 3, since: oldest.next_commit });
  assert.deepEqual([...oldest.commits, ...later.commits].map((commit) => commit.sha), shas);
  const range = await repo.commits.list({ since: shas[0], until: shas[2] });
  assert.deepEqual(range.commits.map((commit) => commit.sha), [shas[2], shas[1]]);
  const skipped = await repo.commits.list({ offset: 4 });
  assert.deepEqual(skipped.commits.map((commit) => commit.sha), [shas[0]]);
  await refused("OFFSET_WITH_SELECTOR", () => repo.commits.list({ offset: 1, since: shas[0] }));
  await refused("INVALID_RANGE", () => repo.commits.list({ since: shas[2], until: shas[0] }));

  const compared = await repo.compare({ base: shas[0], head: "main" });
  assert.deepEqual([compared.status, compared.ahead_by, compared.behind_by], ["ahead", 4, 0]);
  assert.deepEqual(compared.files.map(({ filename, status }) => [filename, status]), [["a", "modified"]]);
});

test("download tar and zip archives", async () => {
  const { repo } = await made();
  await repo.commits.create({ message: "m", files: [{ path: "folder/file", content: "packed\n" }] });
  const folder = mkdtempSync(join(tmpdir(), "archives-"));
  for (const [name, bytes, unpack] of [
    ["repo.tar", await repo.contents.downloadTarball({ rev: "main" }), ["tar", "-xf"]],
    ["repo.zip", await repo.contents.downloadZip({ rev: "main" }), ["python3", "-m", "zipfile", "-e"]],
  ]) {
    const at = mkdtempSync(join(folder, "out-"));
    writeFileSync(join(folder, name), Buffer.from(bytes));
    const [program, ...options] = unpack;
    execFileSync(program, [...options, join(folder, name), ...(program === "tar" ? ["-C"] : []), at]);
    assert.equal(readFileSync(join(at, "folder/file"), "utf8"), "packed\n");
  }
  await refused("REFERENCE_NOT_FOUND", () => repo.contents.downloadTarball({ rev: "missing" }));
});

test("grant, update, list and revoke an identity's access", async () => {
  const { repoId } = await made({ name: "granted" });
  const { identity } = await freestyle.identities.create();
  const { git } = identity.permissions;
  assert.deepEqual(await git.grant({ repoId, permission: "read" }), {});
  await refused("PERMISSION_ALREADY_EXISTS", () => git.grant({ repoId, permission: "write" }));
  assert.equal((await git.get({ repoId })).accessLevel, "read");
  assert.deepEqual(await git.update({ repoId, permission: "write" }), {});
  const { repositories } = await git.list();
  assert.deepEqual(
    repositories.map(({ id, name, permissions, visibility }) => [id, name, permissions, visibility]),
    [[repoId, "granted", "write", "private"]],
  );
  assert.deepEqual(await git.revoke({ repoId }), {});
  await refused("PERMISSION_NOT_FOUND", () => git.get({ repoId }));
  await freestyle.identities.delete({ identityId: identity.identityId });
});

test("enable, use and disable GitHub sync", async () => {
  const { repo } = await made();
  assert.equal(await repo.githubSync.get(), null);
  await refused("GIT_INVALID_REQUEST", () => repo.githubSync.enable({ githubRepoName: "octo/nothing" }));
  await refused("INVALID_REQUEST", () => repo.githubSync.enable({ githubRepoName: "nothing" }));
  await repo.githubSync.enable({ githubRepoName: "octo/web" });
  const { commit } = await repo.commits.create({ message: "first", files: [{ path: "a", content: "a" }] });
  const there = () => execFileSync("git", ["ls-remote", process.env.GITHUB], { encoding: "utf8" });
  await until(() => there().includes(`${commit.sha}\trefs/heads/main`));
  const syncConfig = await repo.githubSync.get();
  assert.equal(syncConfig?.githubRepoName, "octo/web");
  const other = await made();
  const again = () => other.repo.githubSync.enable({ githubRepoName: "octo/web" });
  await refused("GIT_HUB_SYNC_CONFLICT", again);
  await repo.githubSync.disable();
  assert.equal(await repo.githubSync.get(), null);
});

test("search contents, file names, commit messages and diffs", async () => {
  const { repo } = await made();
  const commit = (message, files) => repo.commits.create({ message, files });
  await commit("first commit", [
    { path: "src/index.ts", content: "export function first() {}\n// TODO: more\n" },
    { path: "src/index.test.ts", content: "// TODO: test\n" },
    { path: "README.md", content: "nothing to do\n" },
  ]);
  await commit("fix the readme", [{ path: "README.md", content: "deprecatedMethod is gone\n" }]);

  const found = await repo.search({
    query: "TODO",
    rev: "main",
    pathPattern: "src/**/*.ts",
    excludePattern: "**/*.test.ts",
  });
  assert.deepEqual([found.totalFiles, found.totalMatches, found.hasMore], [1, 1, false]);
  const [file] = found.files;
  assert.deepEqual([file.path, file.extension], ["src/index.ts", "ts"]);
  const [match] = file.matches;
  assert.deepEqual([match.lineNumber, match.line], [2, "// TODO: more"]);
  assert.equal(match.line.slice(match.startColumn, match.endColumn), "TODO");
  assert.deepEqual(match.contextBefore, ["export function first() {}"]);

  const pattern = "^(export\\s+)?(async\\s+)?function\\s+\\w+";
  const functions = await repo.search({ query: pattern, isRegex: true, pathPattern: "**/*.ts" });
  assert.deepEqual(functions.files.map(({ path }) => path), ["src/index.ts"]);
  const named = await repo.searchFiles({ query: "index", maxResults: 20 });
  assert.deepEqual(named.files.map(({ path }) => path), ["src/index.test.ts", "src/index.ts"]);
  const told = await repo.searchCommits({ query: "fix", maxResults: 10 });
  assert.deepEqual(told.commits.map(({ message }) => message), ["fix the readme"]);
  const changed = await repo.searchDiffs({ query: "deprecatedMethod", maxResults: 20 });
  assert.deepEqual(
    changed.commits.map(({ files }) => files.map(({ path }) => path)),
    [["README.md"]],
  );
  assert.equal(changed.commits[0].files[0].matches[0].isAddition, true);

  const paths = [];
  for (let offset = 0; ; offset += 1) {
    const page = await repo.search({ query: "TODO", maxResults: 1, offset });
    paths.push(...page.files.map(({ path }) => path));
    if (!page.hasMore) break;
  }
  assert.deepEqual(paths.sort(), ["src/index.test.ts", "src/index.ts"]);
  await refused("EMPTY_QUERY", () => repo.search({ query: "" }));
  await refused("INVALID_REGEX", () => repo.search({ query: "(", isRegex: true }));
  await refused("COMMIT_EMPTY_QUERY", () => repo.searchCommits({ query: "" }));
  await refused("DIFF_INVALID_REGEX", () => repo.searchDiffs({ query: "[", isRegex: true }));
  await refused("FILENAME_EMPTY_QUERY", () => repo.searchFiles({ query: "" }));
  await refused("INVALID_PATH_PATTERN", () => repo.search({ query: "x", pathPattern: "../**" }));
});

test("create, list and delete triggers", async () => {
  const { repo, repoId } = await made({ name: "automation" });
  const endpoint = "https://hooks.example.org/";
  const trigger = { event: "push", branches: ["main"], globs: ["*.js"] };
  const { triggerId } = await repo.triggers.create({ trigger, action: { action: "webhook", endpoint } });
  const { triggers } = await repo.triggers.list();
  assert.equal(triggers.length, 1);
  assert.partialDeepStrictEqual(triggers[0], {
    id: triggerId,
    repositoryId: repoId,
    managed: false,
    trigger,
    action: { action: "webhook", endpoint },
  });
  assert.deepEqual(await repo.triggers.delete({ triggerId }), {});
  await refused("NOT_FOUND", () => repo.triggers.delete({ triggerId }));
  const here = { action: "webhook", endpoint: "http://127.1.2.3/hook" };
  await refused("GIT_INVALID_REQUEST", () => repo.triggers.create({ trigger, action: here }));
});

test("create repositories from files and from another repository", async () => {
  const { repo } = await made({
    import: {
      type: "files",
      files: { "README.md": "# Imported\n", "src/a.ts": "export {};\n" },
      commitMessage: "import",
      authorName: "Ann",
      authorEmail: "ann@example.com",
    },
  });
  assert.equal(text(await repo.contents.get({ path: "README.md" })), "# Imported\n");
  const { commits } = await repo.commits.list();
  assert.deepEqual(commits.map(({ message, author }) => [message, author.name]), [["import", "Ann"]]);

  const origin = process.env.ORIGIN;
  const source = await made({ source: { url: origin, rev: "main" } });
  assert.deepEqual((await source.repo.commits.list()).commits.map(({ message }) => message), ["two", "one"]);
  const part = await made({
    import: { type: "git", url: origin, dir: "folder", commitMessage: "part of it" },
  });
  assert.equal(text(await part.repo.contents.get({ path: "file" })), "2\n");
  assert.equal((await part.repo.commits.list()).total, 1);

  const create = (options) => freestyle.git.repos.create(options);
  await refused("SOURCE_NOT_FOUND", () => create({ source: { url: `${origin}x` } }));
  await refused("IMPORT_SUBDIR_NOT_FOUND", () =>
    create({ import: { type: "git", url: origin, dir: "none", commitMessage: "m" } }),
  );
  await refused("SOURCE_IMPORT_CONFLICT", () =>
    create({ source: { url: origin }, import: { type: "files", files: {}, commitMessage: "m" } }),
  );
  await refused("GIT_INVALID_REQUEST", () => create({ source: { url: "http://127.1.2.3/repo.git" } }));
});

/** The git command, without the settings of this host. */
function git(folder, ...options) {
  const env = { PATH: process.env.PATH, GIT_CONFIG_NOSYSTEM: "1", HOME: folder, GIT_TERMINAL_PROMPT: "0" };
  const who = ["-c", "user.name=Ann", "-c", "user.email=ann@example.com"];
  return execFileSync("git", [...who, ...options], { cwd: folder, env, encoding: "utf8", stdio: "pipe" });
}

test("create repositories from tar and zip archives at a URL", async () => {
  const { repo } = await made();
  const files = [
    { path: "README.md", content: "# Packed\n" },
    { path: "app/index.ts", content: "export {};\n" },
  ];
  await repo.commits.create({ message: "m", files });
  const archives = {
    "/app.tar": Buffer.from(await repo.contents.downloadTarball({ rev: "main" })),
    "/app.zip": Buffer.from(await repo.contents.downloadZip({ rev: "main" })),
  };
  const server = createServer(({ url }, response) => {
    response.writeHead(url in archives ? 200 : 404).end(archives[url]);
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const at = (path) => `http://127.0.0.1:${server.address().port}${path}`;
  try {
    for (const type of ["tar", "zip"]) {
      const options = { type, url: at(`/app.${type}`), commitMessage: `import ${type}`, authorName: "Ann" };
      const whole = await made({ import: options });
      assert.equal(text(await whole.repo.contents.get({ path: "README.md" })), "# Packed\n");
      assert.equal(text(await whole.repo.contents.get({ path: "app/index.ts" })), "export {};\n");
      const { commits } = await whole.repo.commits.list();
      assert.deepEqual(
        commits.map(({ message, author }) => [message, author.name]),
        [[`import ${type}`, "Ann"]],
      );
      const folder = await made({ import: { ...options, dir: "app" } });
      const { entries } = await folder.repo.contents.get();
      assert.deepEqual(entries.map(({ path }) => path), ["index.ts"]);
      await refused("IMPORT_SUBDIR_NOT_FOUND", () =>
        freestyle.git.repos.create({ import: { ...options, dir: "none" } }),
      );
    }
    const missing = { type: "zip", url: at("/missing.zip"), commitMessage: "m" };
    await refused("SOURCE_NOT_FOUND", () => freestyle.git.repos.create({ import: missing }));
  } finally {
    server.close();
  }
});

test("list tags and get them by name and by sha", async () => {
  const { repo, repoId } = await made();
  const { commit } = await repo.commits.create({ message: "m", files: [{ path: "a", content: "a" }] });
  assert.deepEqual((await repo.tags.list()).tags, []);
  const folder = mkdtempSync(join(tmpdir(), "tags-"));
  const { origin } = new URL(process.env.FREESTYLE_API_URL);
  const header = `http.extraHeader=Authorization: Bearer ${process.env.FREESTYLE_API_KEY}`;
  git(folder, "-c", header, "clone", "-q", `${origin}/${repoId}`, "clone");
  const clone = join(folder, "clone");
  git(clone, "tag", "light");
  git(clone, "tag", "-a", "-m", "first release", "v1.0.0");
  git(clone, "-c", header, "push", "-q", "origin", "--tags");

  const { tags } = await repo.tags.list();
  assert.deepEqual(tags.map(({ name }) => name).sort(), ["light", "v1.0.0"]);
  const light = await repo.tags.get({ tagName: "light" });
  const annotated = await repo.tags.get({ tagName: "v1.0.0" });
  assert.deepEqual([light.name, light.sha, light.target.sha], ["light", commit.sha, commit.sha]);
  const tagSha = git(clone, "rev-parse", "v1.0.0").trim();
  assert.deepEqual(
    [annotated.name, annotated.sha, annotated.target.sha, annotated.tagger.name, annotated.message.trim()],
    ["v1.0.0", tagSha, commit.sha, "Ann", "first release"],
  );
  assert.deepEqual(await repo.tags.getByHash({ sha: tagSha }), annotated);
  assert.deepEqual(tags.find(({ name }) => name === "v1.0.0"), annotated);
  await refused("TAG_NOT_FOUND", () => repo.tags.get({ tagName: "missing" }));
  await refused("TAG_NOT_FOUND", () => repo.tags.getByHash({ sha: commit.sha }));
});

test("native git with a token and with the API key", async () => {
  const server = new URL(process.env.FREESTYLE_API_URL);
  const { repo, repoId } = await made({ name: "native" });
  const { identity } = await freestyle.identities.create();
  await identity.permissions.git.grant({ permission: "write", repoId });
  const { token } = await identity.tokens.create();
  const folder = mkdtempSync(join(tmpdir(), "native-"));

  git(folder, "clone", "-q", `http://x-access-token:${token}@${server.host}/${repoId}`, "clone");
  const clone = join(folder, "clone");
  writeFileSync(join(clone, "README.md"), "# Pushed\n");
  git(clone, "add", "README.md");
  git(clone, "commit", "-q", "-m", "pushed");
  git(clone, "push", "-q", "origin", "HEAD:main");
  assert.equal(text(await repo.contents.get({ path: "README.md" })), "# Pushed\n");

  await repo.commits.create({ message: "by API", files: [{ path: "more", content: "more\n" }] });
  git(clone, "pull", "-q", "origin", "main");
  assert.equal(readFileSync(join(clone, "more"), "utf8"), "more\n");

  const header = `http.extraHeader=Authorization: Bearer ${process.env.FREESTYLE_API_KEY}`;
  const published = `url.${server.origin}/.insteadOf=https://git.freestyle.sh/`;
  git(folder, "-c", header, "-c", published, "clone", "-q", `https://git.freestyle.sh/${repoId}`, "by-key");
  assert.equal(readFileSync(join(folder, "by-key", "README.md"), "utf8"), "# Pushed\n");

  await identity.permissions.git.update({ permission: "read", repoId });
  assert.throws(() => git(clone, "push", "-q", "origin", "HEAD:other"), /403/);
  await identity.permissions.git.revoke({ repoId });
  assert.throws(() => git(clone, "fetch", "-q", "origin"), /not found/);
  await freestyle.identities.delete({ identityId: identity.identityId });
});

test("public repositories can be cloned without credentials, not pushed to", async () => {
  const { repo, repoId } = await made({ public: true });
  await repo.commits.create({ message: "m", files: [{ path: "open", content: "to all\n" }] });
  const folder = mkdtempSync(join(tmpdir(), "public-"));
  git(folder, "clone", "-q", `${process.env.FREESTYLE_API_URL}/${repoId}.git`, "clone");
  const clone = join(folder, "clone");
  assert.equal(readFileSync(join(clone, "open"), "utf8"), "to all\n");
  assert.throws(() => git(clone, "push", "-q", "origin", "HEAD:mine"));
  assert.equal((await repo.branches.list()).branches.length, 1);
});

test("Clone A Repository, as the documentation has it", async () => {
  const { repoId, repo } = await made({
    name: "workspace",
  });
  await repo.commits.create({ message: "m", files: [{ path: "file", content: "one\n" }] });
  const { identity } = await freestyle.identities.create();
  await identity.permissions.git.grant({ repoId, permission: "read" });
  const { token } = await identity.tokens.create();
  await withVm({}, async (vm) => {
    await vm.exec("mkdir -p /workspace");
    const cloned = await vm.exec(
      `git clone https://x-access-token:${token}@git.freestyle.sh/${repoId} /workspace`,
    );
    assert.equal(cloned.statusCode, 0, cloned.stderr);
    assert.equal(await output(vm, "cat /workspace/file"), "one");
    const pushed = await vm.exec("git -C /workspace push origin HEAD:mine");
    assert.notEqual(pushed.statusCode, 0);
  });
});

test("the spec puts repositories into a VM by their ids", async () => {
  const { repo, repoId } = await made({ name: "workspace" });
  const write = (content) => repo.commits.create({ message: "m", files: [{ path: "file", content }] });
  const first = (await write("one\n")).commit;
  await write("two\n");
  const options = {
    spec: new VmSpec().repo(repoId, "/srv/built").snapshot(),
    gitRepos: [{ repo: `https://git.freestyle.sh/${repoId}`, path: "/workspace", rev: first.sha }],
  };
  await withVm(options, async (vm) => {
    assert.equal(await output(vm, "cat /srv/built/file /workspace/file"), "two\none");
    assert.match(await output(vm, "ls -la /workspace"), /\.git\n.*file$/s);
    assert.equal(await output(vm, "git -C /srv/built status --short --branch"), "## main...origin/main");
    assert.match(await output(vm, "git -C /srv/built remote get-url origin"), new RegExp(`/${repoId}$`));
  });
  for (const wrong of [{ repo: repoId, rev: "none" }, { repo: "00000000-0000-4000-8000-000000000000" }]) {
    await refused("INVALID_GIT_REPO_SPEC_ERROR", () =>
      freestyle.vms.create({ git: { config: {}, repos: [{ path: "/srv/a", ...wrong }] } }),
    );
  }
});
