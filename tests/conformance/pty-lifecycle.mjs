// Terminals of a VM that is suspended, forked and stopped.
import assert from "node:assert/strict";
import test from "node:test";
import { freestyle, until } from "./client.mjs";
import { ask, record, shown } from "./terminal.mjs";

const options = { timeout: 180_000 };
let vm;

const state = async () => (await vm.getInfo()).state;
const row = async (sessionId, from = vm) =>
  (await from.pty.list()).sessions.find((each) => each.sessionId === sessionId);

test.before(async () => ({ vm } = await freestyle.vms.create({ name: "terminals", idleTimeoutSeconds: null })));
test.after(() => vm.delete());

test("suspended: evicted by a clean close, still there, woken by the next attach", options, async () => {
  const seen = record();
  const session = await vm.pty.open({ exec: "/bin/sh", sessionId: "kept", reconnect: false, ...seen });
  await ask(session, seen, "word=in-memory; echo ready-$((1 + 1))", "ready-2");
  await vm.suspend();
  await until(() => seen.closes.length);
  assert.deepEqual([seen.closes[0].wasClean, seen.exits], [true, []]);
  assert.throws(() => session.write("x"), /closed/);
  assert.equal(await state(), "suspended");
  const again = record();
  const rebound = await vm.pty.attach({ sessionId: "kept", ...again });
  await shown(again, "ready-2");
  assert.equal(await state(), "running");
  await ask(rebound, again, "echo $word-$((2 + 2))", "in-memory-4");
  rebound.detach();
});

test("a client that reconnects by itself wakes the VM", options, async () => {
  const seen = record();
  const session = await vm.pty.attach({ sessionId: "kept", ...seen });
  await shown(seen, "in-memory-4");
  await vm.suspend();
  await until(() => seen.retries.length);
  session.write("echo woken-$((3 + 3))\n");
  await shown(seen, "woken-6");
  assert.equal(await state(), "running");
  assert.deepEqual([seen.closes, seen.exits, seen.reconnects], [[], [], 1]);
  session.detach();
});

test("a fork has the terminals of its parent, and both go their own ways", options, async () => {
  const [parent, ended] = [record(), record()];
  const session = await vm.pty.attach({ sessionId: "kept", ...parent });
  const over = await vm.pty.open({ exec: "/bin/sh", sessionId: "over", ...ended });
  over.write("exit 3\n");
  await until(() => ended.closes.length);
  assert.equal((await row("over")).exitCode, 3);
  await ask(session, parent, "echo parent-$((4 + 4))", "parent-8");

  const { forks } = await vm.fork({ count: 2 });
  try {
    const children = [];
    for (const { vm: child } of forks) {
      const seen = record();
      const inherited = await child.pty.attach({ sessionId: "kept", ...seen });
      await shown(seen, "parent-8");
      await ask(inherited, seen, `echo $word in $(hostname)-$((5 + 5))`, `in-memory in ${child.vmId}-10`);
      assert.equal(await row("over", child), undefined, "one that has ended is not inherited");
      children.push(seen);
    }
    await ask(session, parent, "echo still-$((6 + 6))", "still-12");
    for (const { text } of [parent, ...children]) {
      assert.equal(text.includes("-10"), false, "nothing crosses over");
    }
    assert.equal(children.some(({ text }) => text.includes("still-12")), false);
  } finally {
    for (const { vm: child } of forks) await child.delete();
  }
  session.detach();
});

test("a stop ends them, and says so to those who are attached", options, async () => {
  const seen = record();
  await vm.pty.attach({ sessionId: "kept", reconnect: false, ...seen });
  await shown(seen, "still-12");
  await vm.stop();
  await until(() => seen.closes.length);
  assert.equal(seen.closes[0].wasClean, true);
  await vm.start();
  assert.deepEqual((await vm.pty.list()).sessions, []);
  await assert.rejects(() => vm.pty.attach({ sessionId: "kept", reconnect: false }), /handshake/);
});
