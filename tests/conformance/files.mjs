// Files in a machine.
import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import test from "node:test";
import { freestyle, output, refused, refusedPlainly, shared as vm, until } from "./client.mjs";

const folder = "/root/files test";
const names = [
  "plain.txt",
  "with space.txt",
  "ünï-日本🙂.txt",
  "per%20cent%2Fslash.txt",
  "q?u#e&ry=+;:@.txt",
  "'single'",
  '"double"',
];

test.after(() => vm.exec(`rm -rf '${folder}'`));

test("a folder", async () => {
  await vm.fs.mkdir(folder);
  assert.equal(await vm.fs.exists(folder), true);
  await assert.rejects(() => vm.fs.mkdir(folder), /File exists/);
  await vm.fs.mkdir(`${folder}/a/b/c`, true);
  await vm.fs.mkdir(`${folder}/a/b/c`, true);
});

for (const name of names) {
  test(`text in ${name}`, async () => {
    const path = `${folder}/${name}`;
    await vm.fs.writeTextFile(path, `in ${name}: naïve 日本語 🙂\n`);
    assert.equal(await vm.fs.readTextFile(path), `in ${name}: naïve 日本語 🙂\n`);
    assert.equal((await vm.exec(`ls '${folder}'`)).statusCode, 0);
    const listed = await vm.fs.readDir(folder);
    assert.ok(
      listed.some((entry) => entry.name === name && entry.kind === "file"),
      JSON.stringify(listed),
    );
  });
}

test("a file is what programs in the machine see", async () => {
  await vm.fs.writeTextFile("/tmp/hello.txt", "Hello from Freestyle");
  assert.equal(await vm.fs.readTextFile("/tmp/hello.txt"), "Hello from Freestyle");
  assert.equal((await vm.exec("cat /tmp/hello.txt")).stdout, "Hello from Freestyle");
  await vm.exec("printf changed > /tmp/hello.txt");
  assert.equal(await vm.fs.readTextFile("/tmp/hello.txt"), "changed");
  await vm.fs.remove("/tmp/hello.txt");
});

test("every byte", async () => {
  const bytes = Buffer.from([...Array(256).keys()]);
  await vm.fs.writeFile(`${folder}/bytes`, bytes);
  assert.ok((await vm.fs.readFile(`${folder}/bytes`)).equals(bytes));
  assert.equal(await vm.fs.readTextFile(`${folder}/bytes`, "latin1"), bytes.toString("latin1"));
});

test("text that is not UTF-8", async () => {
  await vm.fs.writeTextFile(`${folder}/latin`, "naïve", "latin1");
  assert.equal(await output(vm, `od -An -tx1 '${folder}/latin'`), "6e 61 ef 76 65");
  assert.equal(await vm.fs.readTextFile(`${folder}/latin`, "latin1"), "naïve");
});

test("nothing, and more than a little", async () => {
  await vm.fs.writeFile(`${folder}/empty`, Buffer.alloc(0));
  assert.equal((await vm.fs.readFile(`${folder}/empty`)).length, 0);
  const large = randomBytes(5 << 20);
  await vm.fs.writeFile(`${folder}/large`, large);
  assert.ok((await vm.fs.readFile(`${folder}/large`)).equals(large));
});

test("a file in folders that are not there yet", async () => {
  await vm.fs.writeTextFile(`${folder}/new/deep/file`, "x");
  assert.equal(await vm.fs.readTextFile(`${folder}/new/deep/file`), "x");
});

test("what is in a folder", async () => {
  await vm.exec(`cd '${folder}/a' && touch file && ln -s file link && ln -s b folder-link`);
  const entries = (await vm.fs.readDir(`${folder}/a`)).toSorted((one, other) =>
    one.name < other.name ? -1 : 1,
  );
  assert.deepEqual(
    entries.map(({ name }) => name),
    ["b", "file", "folder-link", "link"],
  );
  assert.deepEqual(
    entries.slice(0, 2).map(({ kind }) => kind),
    ["directory", "file"],
  );
  assert.deepEqual(await vm.fs.readDir(`${folder}/a/b/c`), []);
  const root = (await vm.fs.readDir("/")).map(({ name }) => name);
  for (const name of ["etc", "root", "usr"]) assert.ok(root.includes(name), name);
});

test("a folder is not read as a file, nor a file as a folder", async () => {
  await assert.rejects(() => vm.fs.readFile(folder), /Unexpected response format/);
  await assert.rejects(() => vm.fs.readDir(`${folder}/bytes`), /not a directory/);
});

test("facts", async () => {
  const path = `${folder}/facts`;
  await vm.fs.writeTextFile(path, "12345");
  await vm.exec(`chmod 640 '${path}' && chown root:adm '${path}'`);
  const facts = await vm.fs.stat(path);
  assert.partialDeepStrictEqual(facts, {
    ...{ size: 5, isFile: true, isDirectory: false, isSymlink: false },
    ...{ permissions: "640", owner: "root", group: "adm" },
  });
  assert.ok(Math.abs(new Date(facts.modified.replace(/\.\d+ /, " ")) - Date.now()) < 120_000, facts.modified);
  assert.partialDeepStrictEqual(await vm.fs.stat(folder), { isFile: false, isDirectory: true });
  assert.partialDeepStrictEqual(await vm.fs.stat(`${folder}/a/link`), { isFile: false, isSymlink: true });
  await assert.rejects(() => vm.fs.stat(`${folder}/none`), /Failed to stat path/);
});

test("to remove", async () => {
  await vm.fs.remove(`${folder}/facts`);
  assert.equal(await vm.fs.exists(`${folder}/facts`), false);
  await vm.fs.remove(`${folder}/facts`);
  await assert.rejects(() => vm.fs.remove(`${folder}/a`), /Is a directory/);
  await vm.fs.remove(`${folder}/a`, true);
  assert.equal(await vm.fs.exists(`${folder}/a`), false);
});

test("what is not there", async () => {
  assert.equal(await vm.fs.exists("/nowhere"), false);
  for (const call of [vm.fs.readFile, vm.fs.readTextFile, vm.fs.readDir]) {
    await refused("FILE_NOT_FOUND", () => call.call(vm.fs, "/nowhere/a file"), { path: "/nowhere/a file" });
  }
});

test("what cannot be written", async () => {
  await vm.fs.writeTextFile("/tmp/file", "x");
  await refused("FILES_BAD_REQUEST", () => vm.fs.writeTextFile("/tmp/file/below", "x"));
  await refused("FILES_BAD_REQUEST", () => vm.fs.writeTextFile("/tmp", "x"));
  await vm.fs.remove("/tmp/file");
});

test("changes are told as they happen", { timeout: 120_000 }, async () => {
  await vm.fs.mkdir(`${folder}/watched`, true);
  const events = [];
  const watching = vm.fs.watchFiles();
  const reading = (async () => {
    for await (const event of watching) {
      events.push(event);
      if (event.filename.endsWith("second")) break;
    }
  })();
  // The first answer has no time of its own: a file is changed until a change is seen.
  await until(async () => {
    await vm.fs.writeTextFile(`${folder}/watched/first`, `${Date.now()}`);
    return events.some(({ filename }) => filename.endsWith("watched/first"));
  });
  await vm.exec(`echo x > '${folder}/watched/second'`);
  await reading;
  for (const event of events) {
    assert.equal(typeof event.eventType, "string");
    assert.ok(event.filename.startsWith("/"), event.filename);
  }
});

test("nobody watches a machine that is not there", async () => {
  const none = freestyle.vms.ref({ vmId: "0".repeat(20) });
  await refusedPlainly(404, () => none.fs.watchFiles().next());
});
