// A machine, asked for in all the ways that there are.
import assert from "node:assert/strict";
import test from "node:test";
import { VmBaseImage, VmSpec, VmWith, VmWithInstance } from "freestyle";
import { calls, freestyle, output, refused, withVm } from "./client.mjs";

test("with nothing", async () => {
  const before = calls.length;
  await withVm(undefined, async (vm, created) => {
    assert.equal(calls.length - before, 1, "one call");
    assert.match(created.vmId, /^[a-z0-9]{20}$/);
    assert.equal(created.id, created.vmId);
    assert.deepEqual(created.domains, []);
    assert.ok(created.snapshotId == null);
    assert.equal(await output(vm, "echo 'hello from freestyle'"), "hello from freestyle");
  });
});

test("with a name, never to be stopped for being idle, and sticky", async () => {
  const options = {
    ...{ name: "Ann's workspace", idleTimeoutSeconds: null, activityThresholdBytes: 1000, snapshotId: null },
    ...{
      persistence: { type: "sticky", priority: 3 },
      domains: [],
      nics: [],
      gitRepos: [],
      waitForReadySignal: false,
    },
  };
  await withVm(options, async (vm) => {
    const info = await vm.getInfo();
    assert.partialDeepStrictEqual(info, { name: "Ann's workspace", idleTimeoutSeconds: null });
    assert.partialDeepStrictEqual(info.persistence, { type: "sticky", priority: 3 });
  });
});

test("with users, groups and files", async () => {
  const options = {
    idleTimeoutSeconds: 120,
    groups: [{ name: "team", gid: 4000 }],
    users: [
      {
        name: "ann",
        uid: 3000,
        gecos: "Ann Other",
        groups: ["team", "sudo"],
        shell: "/bin/sh",
        home: "/srv/ann",
      },
      { name: "robot", system: true },
    ],
    additionalFiles: {
      "/srv/text": { content: "naïve\n" },
      "/srv/run.sh": { content: "#!/bin/sh\necho ran", encoding: "utf-8", executable: true },
      "/srv/bytes": { content: Buffer.from([0, 255, 1]).toString("base64"), encoding: "base64" },
    },
  };
  await withVm(options, async (vm) => {
    assert.equal((await vm.getInfo()).idleTimeoutSeconds, 120);
    assert.equal(await output(vm, "getent passwd ann"), "ann:x:3000:3000:Ann Other:/srv/ann:/bin/sh");
    assert.equal(await output(vm, "id -nG ann"), "ann sudo team");
    assert.equal(await output(vm, "getent group team"), "team:x:4000:ann");
    assert.match(
      await output(vm, "getent passwd robot"),
      /^robot:x:\d{1,3}:\d{1,3}::\/:\/usr\/sbin\/nologin$/,
    );
    assert.equal(await output(vm, "cat /srv/text; /srv/run.sh"), "naïve\nran");
    assert.deepEqual([...(await vm.fs.readFile("/srv/bytes"))], [0, 255, 1]);
    assert.equal(await output(vm.user({ username: "ann" }), "id -un"), "ann");
  });
});

class Clock extends VmWith {
  configure(existing) {
    return this.compose(existing, {
      workdir: "/srv/work",
      ports: [],
      systemd: {
        services: [
          { name: "clock", mode: "service", bash: "while true; do date > /run/time; mv /run/time /run/clock; sleep 1; done" },
        ],
      },
    });
  }
  createInstance() {
    return new ClockInstance();
  }
}

class ClockInstance extends VmWithInstance {
  async time() {
    return output(this.vm, "until test -s /run/clock; do sleep 0.1; done; cat /run/clock");
  }
}

test("with a builder that adds a service and a folder to work in", async () => {
  await withVm({ with: { clock: new Clock() } }, async (vm) => {
    assert.ok(!Number.isNaN(Date.parse(await vm.clock.time())));
    assert.equal(await output(vm, "pwd; systemctl is-active clock"), "/srv/work\nactive");
    const again = await freestyle.vms.get({ vmId: vm.vmId, spec: new VmSpec().with("clock", new Clock()) });
    assert.ok(await again.vm.clock.time());
  });
});

const repository = `
pwd > /srv/where
echo $HOME >> /srv/where
git init --quiet --initial-branch main /srv/origin
cd /srv/origin
echo hi > file
git add file
git -c user.name=Ann -c user.email=ann@example.com commit --quiet --message first
`;

/** Built once; all machines of it stand on the same snapshot. */
const inner = () =>
  new VmSpec()
    .baseImage(new VmBaseImage("FROM debian:trixie-slim").runCommands("echo base > /srv-base"))
    .discriminator("one")
    .groups([{ name: "team" }])
    .users([{ name: "ann", groups: ["team"] }])
    .additionalFiles({ "/srv/layer": { content: "inner" } })
    .runCommands(repository)
    .snapshot();

test("from a spec of layers", async () => {
  const spec = inner()
    .workdir("/srv/copy")
    .repo("file:///srv/origin", "/srv/copy")
    .additionalFiles({ "/srv/own": { content: "outer" } })
    .systemdService({
      name: "greeter",
      mode: "oneshot",
      bash: "echo $GREETING > /srv/greeting",
      env: { GREETING: "hi there" },
      wantedBy: ["multi-user"],
    })
    .waitFor("test -s /srv/greeting", { intervalSeconds: 1 })
    .waitForReadySignal(true)
    .idleTimeoutSeconds(777);
  const snapshotId = await withVm({ spec, name: "from a spec" }, async (vm, created) => {
    assert.equal(await output(vm, "cat /srv-base /srv/where /srv/layer"), "base\n/root\n/root\ninner");
    assert.equal(
      await output(vm, "cat /srv/own /srv/greeting; pwd; cat file"),
      "outerhi there\n/srv/copy\nhi",
    );
    assert.equal(await output(vm, "id -nG ann"), "ann team");
    assert.partialDeepStrictEqual(await vm.getInfo(), { idleTimeoutSeconds: 777, name: "from a spec" });
    const build = await vm.getBuild();
    assert.partialDeepStrictEqual(await build.get(), { buildId: build.buildId, state: "succeeded" });
    assert.ok((await build.phases()).length > 0);
    return created.snapshotId;
  });
  assert.match(snapshotId, /^sc-[a-z0-9]{20}$/);
  await withVm({ spec: inner() }, async (vm, created) => {
    assert.equal(created.snapshotId, snapshotId, "what was built is used again");
    assert.equal(await output(vm, "cat /srv/layer; ls /srv"), "innerlayer\norigin\nwhere");
  });
});

test("from a spec alone, of the same size", async () => {
  await withVm(
    new VmSpec().vcpuCount(2).additionalFiles({ "/srv/alone": { content: "yes" } }),
    async (vm) => {
      assert.equal(await vm.fs.readTextFile("/srv/alone"), "yes");
    },
  );
});

test("but not when it is not ready in time", async () => {
  const spec = new VmSpec().waitFor("false").waitForReadySignal(true).readySignalTimeoutSeconds(1);
  const error = await refused("VM_SETUP_FAILED", () => freestyle.vms.create({ spec }));
  assert.match(error.body.failedReason, /not ready within 1 s: freestyle-wait-for-1/);
});

test("of a size", async () => {
  await withVm({ vcpuCount: 1, memSizeGb: 0.5, rootfsSizeGb: 20 }, async (vm) => {
    assert.equal(await output(vm, "nproc"), "1");
    const row = (await freestyle.vms.list()).vms.find(({ id }) => id === vm.vmId);
    assert.deepEqual(row.sizing, { vcpuCount: 1, memSizeMib: 512, rootfsSizeMb: 20480 });
  });
});

const spec = (content) => ({ spec: Object.assign(new VmSpec(), { raw: content }) });
const service = (wrong) =>
  spec({ systemd: { services: [{ name: "a", mode: "oneshot", exec: ["/bin/true"], ...wrong }] } });
const files = (path, file) => ({ additionalFiles: { [path]: file } });

for (const [code, options, facts] of [
  ["CREATE_VM_VCPU_NOT_POWER_OF_TWO", { vcpuCount: 3 }, { got: 3 }],
  ["CREATE_VM_VCPU_OUT_OF_RANGE", { vcpuCount: 1024 }, { got: 1024 }],
  ["CREATE_VM_VCPU_OUT_OF_RANGE", { vcpuCount: 0 }, { got: 0 }],
  ["CREATE_VM_MEM_NOT_POWER_OF_TWO", { memSizeGb: 3 }],
  ["CREATE_VM_MEM_OUT_OF_RANGE", { memSizeGb: 1024 }],
  ["MEM_SIZE_TOO_LARGE", { memSizeGb: 1e9 }, { gotGb: 1e9 }],
  ["CREATE_VM_ROOTFS_OUT_OF_RANGE", { rootfsSizeGb: 1 }],
  ["ROOTFS_SIZE_TOO_LARGE", { rootfsSizeGb: 1e9 }, { gotGb: 1e9 }],
  ["CREATE_VM_BAD_REQUEST", { vcpuCount: "many" }],
  ["CREATE_VM_BAD_REQUEST", { name: 5 }],
  ["CREATE_VM_BAD_REQUEST", { activityThresholdBytes: 2 ** 70 }],
  ["CREATE_VM_BAD_REQUEST", { users: "ann" }],
  ["CREATE_VM_BAD_REQUEST", { persistence: { type: "eternal" } }],
  ["CREATE_VM_BAD_REQUEST", { persistence: { type: "sticky", priority: 11 } }],
  ["VALIDATION_ERROR", { idleTimeoutSeconds: -1 }],
  ["VALIDATION_ERROR", { users: [{ name: "Ann Other" }] }],
  ["DUPLICATE_USER_NAME", { users: [{ name: "ann" }, { name: "ann" }] }],
  ["USER_GROUP_EMPTY", { users: [{ name: "ann", groups: [""] }] }],
  ["USER_SYSTEM_FLAG_MISMATCH", { users: [{ name: "ann", system: true, uid: 5000 }] }],
  ["USER_UID_OUT_OF_RANGE", { users: [{ name: "ann", uid: -1 }] }],
  ["USER_HOME_INVALID", { users: [{ name: "ann", home: "home" }] }],
  ["USER_SHELL_INVALID", { users: [{ name: "ann", shell: "sh" }] }],
  ["DUPLICATE_GROUP_NAME", { groups: [{ name: "a" }, { name: "a" }] }],
  ["GROUP_NAME_EMPTY", { groups: [{ name: "" }] }],
  ["GROUP_NAME_INVALID_CHARS", { groups: [{ name: "a b" }] }],
  ["GROUP_NAME_RESERVED", { groups: [{ name: "root" }] }],
  ["GROUP_NAME_TOO_LONG", { groups: [{ name: "a".repeat(100) }] }],
  ["FILES_BAD_REQUEST", files("relative", { content: "" })],
  ["FILES_BAD_REQUEST", files("/a", { content: "***", encoding: "base64" })],
  [
    "SERVICE_ALREADY_EXISTS",
    spec({ systemd: { services: [1, 2].map(() => ({ name: "a", mode: "oneshot", exec: ["/bin/true"] })) } }),
  ],
  ["EXEC_EMPTY", service({ exec: [" "] })],
  ["SERVICE_NAME_EMPTY", service({ name: "" })],
  ["WORKDIR_EMPTY", service({ workdir: "" })],
  ["WORKDIR_EMPTY", spec({ workdir: "" })],
  [
    "NON_LEAF_LAYER_FIELD_ERROR",
    { spec: new VmSpec().workdir("/a").snapshot().vcpuCount(2) },
    { depth: 0, field: "vcpuCount" },
  ],
  [
    "CONFLICTING_SPEC_SOURCES_ERROR",
    { spec: new VmSpec().baseImage("FROM debian:trixie-slim").snapshotId("sc-00000000000000000000") },
  ],
  ["UNSUPPORTED_OS", { spec: new VmSpec().baseImage("FROM alpine:3.20") }, { os: "alpine:3.20" }],
  ["INVALID_GIT_REPO_SPEC_ERROR", { spec: new VmSpec().repo("no url", "/srv/a") }],
  ["INVALID_SNAPSHOT_ID", { snapshotId: "nonsense" }],
  [
    "SNAPSHOT_NOT_FOUND",
    { snapshotId: "sc-00000000000000000000" },
    { snapshotId: "sc-00000000000000000000" },
  ],
  ["SNAPSHOT_NOT_FOUND", { spec: new VmSpec(), snapshotId: "sc-00000000000000000000" }],
]) {
  test(`${code} at once`, () => refused(code, () => freestyle.vms.create(options), facts));
}

test("nothing is left of what was refused", async () => {
  const { vms } = await freestyle.vms.list();
  assert.deepEqual(
    vms.map(({ id }) => id).filter((id) => id !== process.env.VM_ID),
    [],
  );
});
