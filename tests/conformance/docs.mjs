// The pages about VMs, as their readers type them: with the package's own client and nothing else.
import assert from "node:assert/strict";
import test from "node:test";
import { Freestyle, freestyle } from "freestyle";

test("create a VM", async () => {
  const { vm } = await freestyle.vms.create();
  const result = await vm.exec("echo 'hello from freestyle'");
  assert.equal(result.stdout, "hello from freestyle\n");
  await vm.delete();
});

test("files, common operations and the lifecycle of one VM", async (t) => {
  const { vm, vmId } = await freestyle.vms.create();

  await t.test("work with files", async () => {
    await vm.fs.writeTextFile("/tmp/hello.txt", "Hello from Freestyle");
    const content = await vm.fs.readTextFile("/tmp/hello.txt");
    assert.equal(content, "Hello from Freestyle");
  });

  await t.test("common operations: run, start, stop", async () => {
    await vm.exec("pwd");
    await vm.exec("echo kept > /root/disk");
    await vm.start();
    await vm.stop();
  });

  await t.test("size a VM", async () => {
    await vm.resize({
      cpu: 8,
      memory: 16,
      storage: 80,
    });
  });

  await t.test("stopped: start again, with the disk as it was and as large as was asked for", async () => {
    await vm.start();
    assert.equal(await vm.fs.readTextFile("/root/disk"), "kept\n");
    assert.equal((await vm.exec("nproc")).stdout, "8\n");
    assert.ok(Number((await vm.exec("awk '/MemTotal/ {print $2}' /proc/meminfo")).stdout) > 15e6);
    assert.ok(Number((await vm.exec("df --output=size -BG / | tail -1 | tr -dc 0-9")).stdout) > 70);
  });

  await t.test("forked", async () => {
    const { forks } = await vm.fork({
      count: 1,
      persistence: { type: "ephemeral" },
    });
    const [{ vm: forked }] = forks;
    await forked.exec("echo 'work in parallel'");
    await forked.delete();
  });

  await t.test("idle timeout", async () => {
    await vm.start({ idleTimeoutSeconds: 600 });
  });

  await t.test("delete", async () => {
    await freestyle.vms.delete({ vmId });
    assert.deepEqual(
      (await freestyle.vms.list()).vms.filter(({ id }) => id === vmId),
      [],
    );
  });
});

async function server() {
  const { vm, vmId } = await freestyle.vms.create();
  const { identity } = await freestyle.identities.create();
  await identity.permissions.vms.grant({
    vmId,
  });
  const { token } = await identity.tokens.create();
  return { token, vmId, vm, identity };
}

test("client sessions", async () => {
  const { token, vmId, vm: own, identity } = await server();
  {
    const freestyle = new Freestyle({
      accessToken: token,
    });
    const { vm } = await freestyle.vms.get({ vmId });
    assert.equal((await vm.exec("pwd")).stdout, "/\n");
    await own.suspend();
    assert.equal((await vm.exec("pwd")).stdout, "/\n", "an operation starts what rests");
  }
  await freestyle.identities.delete({ identityId: identity.identityId });
  await own.delete();
});

test("a Linux user for a developer", async () => {
  const { vm, vmId } = await freestyle.vms.create();
  const made = await vm.exec({
    command: `
      set -e
      id -u developer >/dev/null 2>&1 || useradd --create-home --shell /bin/bash developer
      usermod --append --groups sudo developer
      mkdir -p /home/developer/workspace
      chown -R developer:developer /home/developer
    `,
  });
  assert.equal(made.statusCode, 0, made.stderr);
  const { identity } = await freestyle.identities.create();
  await identity.permissions.vms.grant({
    vmId,
    allowedUsers: ["developer"],
  });
  const { token } = await identity.tokens.create();
  assert.match(`ssh ${vmId}+developer:${token}@host`, /^ssh [a-z0-9]+\+developer:[A-Za-z0-9_-]+@host$/);
  const session = new Freestyle({ accessToken: token });
  assert.equal(
    (await session.vms.ref({ vmId }).exec("whoami; touch ~developer/workspace/mine")).stdout,
    "developer\n",
  );
  await vm.delete();
});
