// A client that has an identity's token and no API key.
import assert from "node:assert/strict";
import test from "node:test";
import { Freestyle } from "freestyle";
import { as, freestyle, output, refused, refusedPlainly, shared, withVm } from "./client.mjs";

const vmId = shared.vmId;
let identity, token, client, vm;

test.before(async () => {
  ({ identity } = await freestyle.identities.create());
  await identity.permissions.vms.grant({ vmId });
  ({ token } = await identity.tokens.create());
  client = as({ accessToken: token });
  ({ vm } = await client.vms.get({ vmId }));
});
test.after(() => freestyle.identities.delete({ identityId: identity.identityId }));

test("the token is no API key in the environment's place", async () => {
  assert.equal((await client.whoami()).identityId, identity.identityId);
  const page = new Freestyle({ accessToken: token, baseUrl: process.env.FREESTYLE_API_URL });
  assert.equal((await page.vms.ref({ vmId }).exec("pwd")).stdout, "/\n");
});

test("everything inside the machine works", async () => {
  assert.equal(await output(vm, "pwd"), "/");
  await vm.fs.writeTextFile("/tmp/session", "x");
  assert.equal(await vm.fs.readTextFile("/tmp/session"), "x");
  await vm.fs.remove("/tmp/session");
  assert.ok((await vm.systemd.list()).services.length > 0);
  assert.ok(Array.isArray((await vm.terminals.list()).terminals));
  assert.equal((await vm.getInfo()).state, "running");
  assert.ok((await vm.getLogs()).logs.length > 0);
});

test("only machines that were granted are there", async () => {
  await withVm({ name: "not granted" }, async ({ vmId: other }) => {
    assert.deepEqual(
      (await client.vms.list()).vms.map(({ id }) => id),
      [vmId],
    );
    const foreign = client.vms.ref({ vmId: other });
    const missing = client.vms.ref({ vmId: "0".repeat(20) });
    const bodies = [];
    for (const each of [foreign, missing]) {
      for (const call of [
        () => each.exec("true"),
        () => each.getInfo(),
        () => each.start(),
        () => each.fs.readFile("/x"),
      ]) {
        const error = await refused("VM_NOT_FOUND", call, { vmId: each.vmId });
        bodies.push(JSON.stringify(error.body).replaceAll(each.vmId, "ID"));
      }
      await refusedPlainly(404, () => each.fs.watchFiles().next());
      await refused("VM_NOT_FOUND", () => each.getLogs());
    }
    assert.equal(new Set(bodies).size, 1, "nobody can tell which of them exist");
  });
});

test("a token makes nothing, changes nothing and deletes nothing", async () => {
  for (const call of [
    () => client.vms.create(),
    () => client.vms.create({ snapshotId: "sc-00000000000000000000" }),
    () => client.vms.snapshots.ensure({ template: {} }),
    () => client.vms.delete({ vmId }),
    () => vm.stop(),
    () => vm.suspend(),
    () => vm.kill(),
    () => vm.snapshot(),
    () => vm.fork(),
    () => vm.resize({ cpu: 1 }),
    () => vm.optimize(),
    () => client.identities.create(),
    () => client.identities.list(),
    () => client.identities.ref({ identityId: identity.identityId }).tokens.create(),
    () => client.identities.ref({ identityId: identity.identityId }).permissions.vms.update({ vmId }),
  ]) {
    await refused("FORBIDDEN", call);
  }
  await refusedPlainly(403, () => client.vms.snapshots.list());
});

test("a token wakes a machine", async () => {
  await shared.suspend();
  assert.equal(await output(vm, "echo awake"), "awake");
  await shared.suspend();
  assert.equal((await vm.start()).id, vmId);
});

test("as the Linux users that were named, and no others", async () => {
  await output(shared, "useradd --create-home ann; useradd --create-home ben");
  const { vms } = identity.permissions;
  try {
    await vms.update({ vmId, allowedUsers: ["ann"] });
    assert.equal(await output(vm, "id -un"), "ann", "the only one needs no naming");
    assert.equal(await output(vm.user({ username: "ann" }), "id -un"), "ann");
    for (const username of ["ben", "root"]) {
      await refused("FORBIDDEN", () => vm.user({ username }).exec("true"));
      await refused("FORBIDDEN", () => vm.user({ username }).fs.readFile("/etc/hostname"));
    }
    await refused("VM_ACCESS_DENIED", () => vm.fs.writeTextFile("/etc/ann", "x"));

    await vms.update({ vmId, allowedUsers: ["ann", "ben"] });
    assert.equal(await output(vm.user({ username: "ben" }), "id -un"), "ben");
    await refused("FORBIDDEN", () => vm.exec("true"));
    await refused("FORBIDDEN", () => vm.systemd.list());

    await vms.update({ vmId, allowedUsers: [] });
    await refused("FORBIDDEN", () => vm.exec("true"));

    await vms.update({ vmId, allowedUsers: null });
    assert.equal(await output(vm, "id -un"), "root");
  } finally {
    await vms.update({ vmId });
    await shared.exec("userdel --remove ann; userdel --remove ben");
  }
});

test("what is taken away is gone at once", async () => {
  await identity.permissions.vms.revoke({ vmId });
  await refused("VM_NOT_FOUND", () => vm.exec("true"));
  assert.deepEqual((await client.vms.list()).vms, []);
  await identity.permissions.vms.grant({ vmId });
  assert.equal(await output(vm, "echo back"), "back");
  for (const { id } of (await identity.tokens.list()).tokens) await identity.tokens.revoke({ tokenId: id });
  await refused("UNAUTHORIZED_ERROR", () => vm.exec("true"), { route: `/v1/vms/${vmId}/exec-await` });
});
