// Handles that act as a Linux user.
import assert from "node:assert/strict";
import test from "node:test";
import { calls, output, refused, shared as vm } from "./client.mjs";

const ann = vm.user({ username: "ann" });
const header = "X-Freestyle-Vm-Linux-User-Id";

test.before(() => output(vm, "useradd --create-home --shell /bin/bash ann"));
test.after(() => vm.exec("userdel --remove ann"));

test("commands", async () => {
  assert.equal(await output(ann, "id -un"), "ann");
  assert.equal(calls.at(-1).headers[header], "ann");
  assert.equal(await output(vm, "id -un"), "root");
});

test("files are the user's own", async () => {
  await ann.fs.writeTextFile("/home/ann/note", "mine");
  assert.equal(calls.at(-1).headers[header], "ann");
  assert.partialDeepStrictEqual(await ann.fs.stat("/home/ann/note"), { owner: "ann", group: "ann" });
  assert.equal(await ann.fs.readTextFile("/home/ann/note"), "mine");
  assert.ok((await ann.fs.readDir("/home/ann")).some(({ name }) => name === "note"));
  await ann.fs.mkdir("/home/ann/folder");
  assert.equal((await vm.fs.stat("/home/ann/folder")).owner, "ann");
  await ann.fs.remove("/home/ann/folder", true);
});

test("what a user may not read or write is refused", async () => {
  await vm.exec("install -m 600 /dev/null /root/secret");
  await refused("VM_ACCESS_DENIED", () => ann.fs.readFile("/root/secret"));
  await refused("VM_ACCESS_DENIED", () => ann.fs.writeTextFile("/etc/ann", "x"));
  assert.notEqual((await ann.exec("cat /root/secret")).statusCode, 0);
  await assert.rejects(() => ann.fs.mkdir("/root/folder"), /Permission denied/);
  await vm.fs.remove("/root/secret");
});

test("a user that the machine does not have", async () => {
  await refused("USER_NOT_FOUND", () => vm.user({ username: "nobody-here" }).exec("true"));
  await refused("USER_NOT_FOUND", () => vm.user({ username: "nobody-here" }).fs.readFile("/etc/hostname"));
});

test("terminals and services take the user along", async () => {
  await ann.exec({ command: "id -un", terminal: "anns" });
  assert.match((await ann.terminals.getOutput({ terminalId: "anns" })).output, /^ann\r?\n/);
  assert.ok((await ann.terminals.list()).terminals.some(({ name }) => name === "anns"));
  assert.ok((await ann.systemd.list()).services.length > 0);
  assert.equal(calls.at(-1).headers[header], "ann");
});

test("a user cannot make services that run as root", async () => {
  const wish = { name: "evil", mode: "oneshot", exec: ["/usr/bin/touch /root/evil"] };
  await assert.rejects(
    () => ann.systemd.create(wish),
    (error) => error.constructor.statusCode === 403,
  );
  assert.equal(await vm.fs.exists("/root/evil"), false);
});

test("user('x'), as some write it, is the owner", async () => {
  assert.equal(await output(vm.user("ann"), "id -un"), "root");
  assert.equal(header in calls.at(-1).headers, false);
});
