// Snapshots and forks of a machine with its memory.
import assert from "node:assert/strict";
import test from "node:test";
import { freestyle, output, refused, refusedPlainly, shared, withVm } from "./client.mjs";

const { snapshots } = freestyle.vms;
const vmId = shared.vmId;
let snapshotId;

test.before(() =>
  output(shared, "echo alive > /run/memory; systemd-run --quiet --unit=counter sleep infinity"),
);
test.after(() => shared.exec("systemctl stop counter; rm /run/memory"));

test("a snapshot is taken of a machine that goes on", async () => {
  const taken = await shared.snapshot({ name: "first" });
  assert.match(taken.snapshotId, /^sc-[a-z0-9]{20}$/);
  assert.equal(taken.sourceVmId, vmId);
  assert.equal(await output(shared, "systemctl is-active counter"), "active");
  snapshotId = taken.snapshotId;
});

test("what is known of it", async () => {
  const info = await snapshots.get({ snapshotId });
  assert.partialDeepStrictEqual(info, {
    ...{ snapshotId, name: "first", state: "ready", sourceVmId: vmId, accountId: process.env.ACCOUNT },
    ...{
      failed: false,
      cancelled: false,
      lost: false,
      deleted: false,
      snapshotPersistence: { type: "persistent" },
    },
    ...{ vcpuCount: 2, memSizeMib: 512, rootfsSizeMb: 20480 },
  });
  assert.ok(Math.abs(Date.parse(info.createdAt) - Date.now()) < 120_000, info.createdAt);
  assert.deepEqual(await snapshots.ref({ snapshotId }).get(), info);
  const list = await snapshots.list();
  assert.deepEqual(
    list.snapshots.find((each) => each.snapshotId === snapshotId),
    info,
  );
  const count = (state) => list.snapshots.filter((each) => each.state === state).length;
  assert.equal(list.totalCount, list.snapshots.length);
  for (const state of ["ready", "failed", "building", "cancelled", "lost"])
    assert.equal(list[`${state}Count`], count(state), state);
});

test("a machine made from it goes on where the first one was", async () => {
  await withVm({ snapshotId, name: "copy" }, async (vm, created) => {
    assert.equal(created.snapshotId, snapshotId);
    assert.notEqual(created.vmId, vmId);
    assert.equal(await output(vm, "cat /run/memory; systemctl is-active counter"), "alive\nactive");
    assert.equal(
      (await freestyle.vms.list()).vms.find(({ id }) => id === created.vmId).snapshotId,
      snapshotId,
    );
    assert.notEqual(await output(vm, "cat /etc/machine-id"), await output(shared, "cat /etc/machine-id"));
  });
});

test("it gets another name", async () => {
  await snapshots.ref({ snapshotId }).update({ name: "second" });
  assert.equal((await snapshots.get({ snapshotId })).name, "second");
});

test("one that may make room for others", async () => {
  const other = await shared.snapshot({ persistence: { type: "sticky", priority: 2 } });
  const info = await snapshots.get({ snapshotId: other.snapshotId });
  assert.partialDeepStrictEqual(info.snapshotPersistence, { type: "sticky", priority: 2 });
  const deleted = await snapshots.ref({ snapshotId: other.snapshotId }).delete();
  assert.deepEqual(deleted, { snapshotId: other.snapshotId, snapshot_id: other.snapshotId });
  await refused("SNAPSHOT_VM_BAD_REQUEST", () => shared.snapshot({ persistence: { type: "ephemeral" } }));
});

test("it was not built", async () => {
  await assert.rejects(() => snapshots.ref({ snapshotId }).getBuild(), /has no associated build/);
});

test("it is deleted", async () => {
  assert.partialDeepStrictEqual(await snapshots.delete({ snapshotId }), { snapshotId });
  assert.ok(!(await snapshots.list()).snapshots.some((each) => each.snapshotId === snapshotId));
  const all = await snapshots.list({
    includeDeleted: true,
    includeFailed: true,
    includeBuilding: true,
    includeCancelled: true,
    includeLost: true,
  });
  assert.ok(all.snapshots.some((each) => each.snapshotId === snapshotId && each.deleted));
  assert.ok(all.deletedCount >= 1);
});

test("what is deleted cannot be used", async () => {
  await refused("SNAPSHOT_ALREADY_DELETED", () => snapshots.delete({ snapshotId }), { snapshotId });
  await refused("SOURCE_SNAPSHOT_DELETED", () => freestyle.vms.create({ snapshotId }), { snapshotId });
  await refusedPlainly(404, () => snapshots.ref({ snapshotId }).update({ name: "x" }));
});

test("what was never there", async () => {
  const missing = "sc-00000000000000000000";
  await refused("SNAPSHOT_NOT_FOUND", () => snapshots.delete({ snapshotId: missing }), {
    snapshotId: missing,
  });
  await refused("SNAPSHOT_NOT_FOUND", () => freestyle.vms.create({ snapshotId: missing }), {
    snapshotId: missing,
  });
  await refused("SNAPSHOT_NOT_FOUND", () => freestyle.vms.create({ vcpuCount: 2, snapshotId: missing }));
  await refusedPlainly(404, () => snapshots.get({ snapshotId: missing }));
  await refused("INVALID_SNAPSHOT_ID", () => freestyle.vms.create({ snapshotId: "nonsense" }));
});

test("forks run beside the machine, with all that it was doing", async () => {
  const { forks } = await shared.fork({ count: 2, persistence: { type: "ephemeral" } });
  const vmIds = forks.map((fork) => fork.vmId);
  try {
    assert.equal(new Set([...vmIds, vmId]).size, 3);
    await Promise.all(
      forks.map(async ({ vm }) => {
        assert.equal(await output(vm, "cat /run/memory; systemctl is-active counter"), "alive\nactive");
        await output(vm, `echo ${vm.vmId} > /run/memory`);
      }),
    );
    for (const { vm } of forks) assert.equal(await output(vm, "cat /run/memory"), vm.vmId);
    assert.equal(await output(shared, "cat /run/memory"), "alive");
    const { vms } = await freestyle.vms.list();
    for (const id of vmIds) assert.equal(vms.find((each) => each.id === id).persistence.type, "ephemeral");
  } finally {
    for (const { vm } of forks) await vm.delete();
  }
});

test("one fork is what fork() makes", async () => {
  const { forks } = await shared.fork();
  assert.equal(forks.length, 1);
  assert.equal(await output(forks[0].vm, "echo 'work in parallel'"), "work in parallel");
  await freestyle.vms.delete({ vmId: forks[0].vmId });
});

test("no forks at all, or too many", async () => {
  for (const count of [0, -1, 10_000]) await refused("INVALID_REQUEST", () => shared.fork({ count }));
});
