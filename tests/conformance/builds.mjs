// Snapshots that are built from a spec, and what is recorded of it.
import assert from "node:assert/strict";
import test from "node:test";
import { VmSpec, VmTemplate } from "freestyle";
import { freestyle, output, refused, refusedPlainly, shared, withVm } from "./client.mjs";

const { snapshots } = freestyle.vms;
const spec = (more = (spec) => spec) =>
  more(new VmSpec().additionalFiles({ "/srv/built": { content: "yes" } })).snapshot();
let snapshotId;

test("a snapshot is built, and the same spec finds it again", async () => {
  ({ snapshotId } = await snapshots.ensure({ name: "built", spec: spec() }));
  assert.match(snapshotId, /^sc-[a-z0-9]{20}$/);
  assert.equal((await snapshots.create({ spec: spec() })).snapshotId, snapshotId);
  assert.equal((await snapshots.ensure({ snapshot: spec() })).snapshotId, snapshotId);
  assert.partialDeepStrictEqual(await snapshots.get({ snapshotId }), {
    name: "built",
    state: "ready",
    failed: false,
  });
});

test("another discriminator, or no cache: another snapshot", async () => {
  const other = await snapshots.ensure({ spec: spec((one) => one.discriminator("other")) });
  assert.notEqual(other.snapshotId, snapshotId);
  const anew = await snapshots.ensure({ spec: spec((one) => one.skipCache()) });
  assert.ok(![snapshotId, other.snapshotId].includes(anew.snapshotId));
  for (const each of [other, anew]) await snapshots.delete(each);
});

test("machines are made from it", async () => {
  await withVm({ snapshotId }, async (vm) => {
    assert.equal(await vm.fs.readTextFile("/srv/built"), "yes");
    assert.equal((await vm.getBuild()).buildId, (await snapshots.get({ snapshotId })).buildId);
  });
});

test("how it was built", async () => {
  const build = await snapshots.ref({ snapshotId }).getBuild();
  assert.match(build.buildId, /^bld-[a-z0-9]{20}$/);
  const record = await build.get();
  assert.partialDeepStrictEqual(record, {
    buildId: build.buildId,
    accountId: process.env.ACCOUNT,
    state: "succeeded",
  });
  assert.ok(Array.isArray(record.plannedPhases) && record.plannedPhases.length > 0);
  for (const key of ["startedAt", "finishedAt", "updatedAt"])
    assert.ok(!Number.isNaN(Date.parse(record[key])), key);
  assert.ok(Date.parse(record.startedAt) <= Date.parse(record.finishedAt));
  assert.deepEqual(await build.wait(), record);
  const phases = await build.phases();
  assert.deepEqual(
    phases.map(({ name }) => name),
    record.plannedPhases,
  );
  for (const phase of phases) {
    assert.match(phase.phaseId, /^bph-[a-z0-9]{20}$/);
    assert.equal(phase.buildId, build.buildId);
    assert.ok(!Number.isNaN(Date.parse(phase.startedAt)));
  }
});

test("templates of templates, as they were written before specs", async () => {
  const inner = new VmTemplate({ additionalFiles: { "/srv/inner": { content: "1" } } });
  const outer = new VmTemplate({ template: inner, additionalFiles: { "/srv/outer": { content: "2" } } });
  const made = await snapshots.ensure({ template: outer });
  await withVm({ snapshotId: made.snapshotId }, async (vm) => {
    assert.equal(await output(vm, "cat /srv/inner /srv/outer"), "12");
  });
});

test("a snapshot that cannot be built: what failed, why, and what was left to look at", async () => {
  const broken = new VmSpec()
    .systemdService({ name: "broken", mode: "oneshot", bash: "echo the reason is here; exit 3" })
    .snapshot();
  const error = await refused("SNAPSHOT_SETUP_FAILED", () => snapshots.ensure({ spec: broken }));
  assert.equal(typeof error.body.failedReason, "string");
  const info = await snapshots.get({ snapshotId: error.body.snapshotId });
  assert.equal(info.failed, true);
  assert.equal(info.state, "failed");
  const build = await snapshots.ref({ snapshotId: error.body.snapshotId }).getBuild();
  assert.partialDeepStrictEqual(await build.get(), { state: "failed" });
  assert.ok((await build.get()).failureReason);
  assert.equal((await build.failedPhase()).snapshotId, error.body.snapshotId);
  assert.ok((await snapshots.list()).snapshots.some((each) => each.snapshotId === info.snapshotId));
  assert.ok(
    !(await snapshots.list({ includeFailed: false })).snapshots.some(
      (each) => each.snapshotId === info.snapshotId,
    ),
  );
});

test("a machine that cannot be set up: the same, with the services' own words", async () => {
  const broken = new VmSpec().systemdService({
    name: "broken",
    mode: "oneshot",
    bash: "echo the reason is here; exit 3",
  });
  const error = await refused("VM_SETUP_FAILED", () => freestyle.vms.create({ spec: broken }));
  assert.ok(error.message.includes("Diagnostics:"), error.message);
  assert.ok(error.message.includes("the reason is here"), error.message);
  assert.ok(
    error.body.diagnostics.serviceStates.some(({ services }) =>
      services.some((each) => each.includes("broken")),
    ),
  );
  // The package tells its users to look at the machine as it was.
  await withVm({ spec: new VmSpec().snapshotId(error.body.snapshotId) }, async (vm) => {
    assert.match((await vm.exec("systemctl is-failed broken")).stdout, /failed/);
  });
});

test("commands of a base image that fail", async () => {
  const image = {
    spec: new VmSpec().baseImage("FROM debian:trixie-slim\nRUN echo oh no >&2; exit 9").snapshot(),
  };
  await refused("BUILD_FAILED", () => freestyle.vms.create(image), { exitCode: 9, stderr: "oh no\n" });
});

test("builds that are not there", async () => {
  const get = (path) => freestyle._apiClient.get(path);
  await refusedPlainly(404, () => shared.getBuild());
  await refused("BUILD_NOT_FOUND_FOR_VM", () => get(`/v1/vms/${shared.vmId}/build`), { vmId: shared.vmId });
  for (const path of ["", "/phases"]) {
    await refused("BUILD_NOT_FOUND", () => get(`/v1/vms/builds/bld-00000000000000000000${path}`));
  }
});

test("what cannot be asked for", async () => {
  await refused("CREATE_SNAPSHOT_BAD_REQUEST", () => snapshots.ensure({ template: {}, name: 5 }));
  await refused("CREATE_SNAPSHOT_BAD_REQUEST", () =>
    snapshots.ensure({ template: {}, persistence: { type: "ephemeral" } }),
  );
  await refused("GROUP_NAME_EMPTY", () => snapshots.ensure({ template: { groups: [{ name: "" }] } }));
  await assert.rejects(() => snapshots.ensure({}), /requires a template or spec/);
});
