// A machine's life.
import assert from "node:assert/strict";
import test from "node:test";
import { calls, freestyle, output, refused, refusedPlainly, until } from "./client.mjs";

let vm, vmId;

const state = async () => (await vm.getInfo()).state;

test("it is created", async () => {
  ({ vm, vmId } = await freestyle.vms.create({ name: "life", idleTimeoutSeconds: 600 }));
});

test("to hold it takes no call", async () => {
  const before = calls.length;
  assert.equal((await freestyle.vms.get({ vmId })).vm.vmId, vmId);
  assert.equal(freestyle.vms.ref({ vmId }).vmId, vmId);
  assert.equal(calls.length, before);
});

test("it is listed", async () => {
  const list = await freestyle.vms.list();
  const row = list.vms.find(({ id }) => id === vmId);
  assert.partialDeepStrictEqual(row, { id: vmId, name: "life", state: "running", deleted: false });
  assert.deepEqual(row.persistence.type, "persistent");
  assert.deepEqual(row.sizing, { vcpuCount: 2, memSizeMib: 512, rootfsSizeMb: 20480 });
  assert.ok(Math.abs(Date.parse(row.createdAt) - Date.now()) < 120_000, row.createdAt);
  assert.equal(list.totalCount, list.vms.length);
  assert.equal(list.runningCount, list.vms.filter((each) => each.state === "running").length);
  for (const name of ["starting", "suspended", "stopped", "building", "suspending", "lost"]) {
    assert.equal(list[`${name}Count`], 0, name);
  }
});

test("what is known of it", async () => {
  const info = await vm.getInfo();
  assert.partialDeepStrictEqual(info, { id: vmId, name: "life", state: "running", recreate: false });
  assert.equal(typeof info.vmInstanceId, "string");
});

test("to start what runs changes nothing, but for its idle time", async () => {
  const started = await vm.start({ idleTimeoutSeconds: 900 });
  assert.equal(started.id, vmId);
  assert.deepEqual(started.domains, []);
  assert.equal((await vm.getInfo()).idleTimeoutSeconds, 900);
  await vm.start();
  assert.equal((await vm.getInfo()).idleTimeoutSeconds, 900);
  await vm.start({ idleTimeoutSeconds: null, waitForReadySignal: true, readySignalTimeoutSeconds: 60 });
  assert.equal((await vm.getInfo()).idleTimeoutSeconds, null);
});

test("optimize", async () => {
  const answer = await vm.optimize();
  assert.equal(answer.id, vmId);
  assert.equal(typeof answer.message, "string");
});

test("suspended, with its memory; a command wakes it", async () => {
  await output(vm, "echo kept > /run/memory; echo kept > /root/disk; sync");
  const suspended = await vm.suspend();
  assert.equal(suspended.id, vmId);
  for (const key of ["vmInstanceId", "snapshotLayerId"]) assert.equal(typeof suspended[key], "string", key);
  assert.equal(await state(), "suspended");
  assert.equal((await freestyle.vms.list()).suspendedCount, 1);
  assert.equal(await output(vm, "cat /run/memory"), "kept");
  assert.equal(await state(), "running");
  await vm.suspend();
  assert.equal((await vm.start()).id, vmId);
  assert.equal(await state(), "running");
});

test("killed, while somebody waits for its end", async () => {
  const waiting = vm.waitForExit();
  await until(() => calls.at(-1).path.endsWith("/await"));
  assert.deepEqual(await vm.kill(), { id: vmId });
  const ended = await waiting;
  assert.equal(ended.id, vmId);
  assert.equal(typeof ended.exitStatus, "string");
  assert.equal(await state(), "stopped");
  assert.equal((await vm.waitForExit()).id, vmId);
});

test("what is down cannot be stopped or suspended", async () => {
  await refused("VM_NOT_RUNNING", () => vm.stop(), { vmId });
  await refused("VM_NOT_RUNNING", () => vm.suspend(), { vmId });
});

test("resized while it is down; a command boots it; its disk is kept, its memory is not", async () => {
  assert.deepEqual(await vm.resize({ cpu: 1, storage: 21 }), {});
  assert.equal(await state(), "stopped");
  assert.equal(await output(vm, "cat /root/disk; nproc"), "kept\n1");
  assert.equal(await vm.fs.exists("/run/memory"), false);
  assert.ok(Number(await output(vm, "df --output=size -BG / | tail -1 | tr -dc 0-9")) >= 20);
  const row = (await freestyle.vms.list()).vms.find(({ id }) => id === vmId);
  assert.deepEqual(row.sizing, { vcpuCount: 1, memSizeMib: 512, rootfsSizeMb: 21504 });
});

for (const [code, wish, facts] of [
  ["RESIZE_VM_EMPTY_REQUEST", {}],
  ["RESIZE_VM_VCPU_NOT_POWER_OF_TWO", { cpu: 3 }, { got: 3 }],
  ["RESIZE_VM_VCPU_OUT_OF_RANGE", { cpu: 4096 }, { got: 4096 }],
  ["RESIZE_VM_VCPU_OUT_OF_RANGE", { cpu: 0 }, { got: 0 }],
  ["RESIZE_VM_MEM_NOT_POWER_OF_TWO", { memory: 3 }, { got: 3 }],
  ["RESIZE_VM_MEM_OUT_OF_RANGE", { memory: 1 << 20 }, { got: 1 << 20 }],
  ["RESIZE_VM_ROOTFS_SHRINK_NOT_SUPPORTED", { storage: 20 }, { currentMb: 21504, requestedMb: 20480 }],
  ["ROOTFS_SIZE_TOO_LARGE", { storage: 1 << 20 }, { gotGb: 1 << 20 }],
]) {
  test(`resize ${JSON.stringify(wish)} is ${code}`, () => refused(code, () => vm.resize(wish), facts));
}

test("deleted", async () => {
  assert.deepEqual(await freestyle.vms.delete({ vmId }), { id: vmId, recreate: false });
  assert.ok(!(await freestyle.vms.list()).vms.some(({ id }) => id === vmId));
});

test("nothing can be done with one that is not there", async () => {
  for (const gone of [
    vm,
    freestyle.vms.ref({ vmId: "0".repeat(20) }),
    freestyle.vms.ref({ vmId: "no such vm" }),
  ]) {
    for (const call of [
      () => gone.getInfo(),
      () => gone.delete(),
      () => gone.start(),
      () => gone.stop(),
      () => gone.suspend(),
      () => gone.kill(),
      () => gone.waitForExit(),
      () => gone.snapshot(),
      () => gone.fork(),
      () => gone.resize({ cpu: 1 }),
      () => gone.optimize(),
      () => gone.exec("true"),
      () => gone.fs.readFile("/etc/hostname"),
      () => gone.systemd.list(),
      () => gone.terminals.list(),
    ]) {
      await refused("VM_NOT_FOUND", call, { vmId: gone.vmId });
    }
    await refusedPlainly(404, () => gone.getBuild());
  }
});

test("one that may be made anew keeps its id", async () => {
  const created = await freestyle.vms.create({ recreate: true });
  assert.equal((await created.vm.getInfo()).recreate, true);
  await output(created.vm, "touch /root/before");
  assert.deepEqual(await created.vm.delete(), { id: created.vmId, recreate: true });
  await refused("VM_DELETED", () => created.vm.stop(), { vmId: created.vmId });
  assert.equal((await created.vm.start()).id, created.vmId);
  assert.equal(await created.vm.fs.exists("/root/before"), false);
  await created.vm.delete();
});

test("one that ends with its run is gone then", async () => {
  const { vm } = await freestyle.vms.create({ persistence: { type: "ephemeral", deleteEvent: "OnStop" } });
  assert.partialDeepStrictEqual(
    (await freestyle.vms.list()).vms.find(({ id }) => id === vm.vmId).persistence,
    {
      ...{ type: "ephemeral", deleteEvent: "OnStop" },
    },
  );
  await vm.kill();
  await refused("VM_NOT_FOUND", () => until(async () => !(await vm.getInfo())));
});
