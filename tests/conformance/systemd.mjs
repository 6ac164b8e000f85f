// Services in a machine.
import assert from "node:assert/strict";
import test from "node:test";
import { output, refused, shared as vm, until } from "./client.mjs";

const name = "conformance-clock";
const service = vm.systemd.service(name);

test("to create one starts it", async () => {
  const created = await vm.systemd.create({
    ...{ name, mode: "service", exec: ["/bin/sh -c 'while true; do echo tick $WORD; sleep 1; done'"] },
    ...{ env: { WORD: "tock 100%" }, workdir: "/tmp", restartPolicy: { policy: "always", restartSec: 1 } },
  });
  assert.partialDeepStrictEqual(created, { success: true, serviceName: name });
  assert.equal(typeof created.message, "string");
  await until(async () => (await service.status()).activeState === "active");
});

test("its state", async () => {
  const status = await vm.systemd.getStatus({ serviceId: name });
  assert.partialDeepStrictEqual(status, {
    name,
    activeState: "active",
    subState: "running",
    loadState: "loaded",
  });
  assert.equal(typeof status.description, "string");
  assert.equal((await service.status()).activeState, "active");
});

test("it is among all services", async () => {
  const names = (await vm.systemd.list()).services.map((each) => each.name.replace(/\.service$/, ""));
  assert.ok(names.includes(name), names.join(" "));
  assert.ok(names.includes("ssh") || names.includes("dbus"), names.join(" "));
});

test("what it printed", async () => {
  const { logs } = await until(async () => {
    const found = await vm.systemd.getLogs({ serviceId: name });
    return found.logs.filter(({ message }) => message === "tick tock 100%").length > 2 && found;
  });
  assert.ok(
    logs.every((entry) => !Number.isNaN(Date.parse(entry.timestamp))),
    JSON.stringify(logs[0]),
  );
  assert.equal((await service.logs({ lines: 2 })).logs.length, 2);
  const since = new Date(Date.now() + 3_600_000).toISOString();
  assert.deepEqual((await service.logs({ since })).logs, []);
});

test("stop, start, restart", async () => {
  const ask = async (what) => (await service[what]()).results;
  assert.partialDeepStrictEqual(await ask("stop"), [{ serviceId: name, success: true }]);
  assert.equal((await service.status()).activeState, "inactive");
  assert.partialDeepStrictEqual(await ask("start"), [{ serviceId: name, success: true }]);
  const pid = await output(vm, `systemctl show -P MainPID ${name}`);
  assert.partialDeepStrictEqual(await ask("restart"), [{ serviceId: name, success: true }]);
  assert.notEqual(await output(vm, `systemctl show -P MainPID ${name}`), pid);
});

test("several at once, of which one is not there", async () => {
  const { results } = await vm.systemd.restart({ services: [{ id: name }, { id: "no-such-service" }] });
  assert.deepEqual(
    results.map(({ serviceId, success }) => [serviceId, success]),
    [
      [name, true],
      ["no-such-service", false],
    ],
  );
  assert.ok(results[1].message.length > 5);
});

test("a service of the same name is refused", async () => {
  await refused(
    "SERVICE_ALREADY_EXISTS",
    () => vm.systemd.create({ name, mode: "service", exec: ["/bin/true"] }),
    {
      serviceName: name,
    },
  );
});

for (const [code, wrong] of [
  ["EXEC_EMPTY", { exec: [] }],
  ["SERVICE_NAME_EMPTY", { name: "" }],
  ["SERVICE_NAME_INVALID_CHARS", { name: "a/b" }],
  ["SERVICE_NAME_INVALID_PREFIX", { name: "-a" }],
  ["SERVICE_NAME_TOO_LONG", { name: "a".repeat(300) }],
  ["ENV_KEY_EMPTY", { env: { "": "x" } }],
  ["ENV_KEY_CONTAINS_EQUALS", { env: { "a=b": "x" } }],
  ["USER_EMPTY", { user: "" }],
  ["GROUP_EMPTY", { group: "" }],
  ["WORKDIR_EMPTY", { workdir: "" }],
  ["AFTER_ARRAY_CONTAINS_EMPTY", { after: [""] }],
  ["REQUIRES_ARRAY_CONTAINS_EMPTY", { requires: [""] }],
  ["ON_FAILURE_ARRAY_CONTAINS_EMPTY", { onFailure: [""] }],
  ["WANTED_BY_EMPTY", { wantedBy: [""] }],
]) {
  test(`${code} before anything is done`, async () => {
    await refused(code, () =>
      vm.systemd.create({ name: "never", mode: "oneshot", exec: ["/bin/true"], ...wrong }),
    );
  });
}

test("a service that runs once", async () => {
  const exec = ["/bin/sh -c 'echo 1 > /tmp/once'", "/bin/sh -c 'echo 2 >> /tmp/once'"];
  await vm.systemd.create({ name: "conformance-once", mode: "oneshot", deleteAfterSuccess: true, exec });
  await until(async () => (await vm.exec("cat /tmp/once")).stdout === "1\n2\n");
  await until(async () => !(await vm.fs.exists("/etc/systemd/system/conformance-once.service")));
});

test("one that is deleted is gone", async () => {
  assert.partialDeepStrictEqual(await service.delete(), { success: true });
  assert.equal((await vm.exec(`systemctl is-active ${name}`)).statusCode, 4);
  for (const call of [
    () => service.status(),
    () => service.delete(),
    () => vm.systemd.service("none").logs(),
  ]) {
    await refused("SERVICE_NOT_FOUND", call);
  }
});
