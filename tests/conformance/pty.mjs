// Terminals, as the page about PTY sessions has them.
import assert from "node:assert/strict";
import test from "node:test";
import { as, freestyle, output, refused, shared as vm, until } from "./client.mjs";
import { ask, proxy, record, shown, upgrade } from "./terminal.mjs";

const options = { timeout: 120_000 };
const path = `/v1/vms/${vm.vmId}/pty`;

const listed = async (sessionId, from = vm) =>
  (await from.pty.list()).sessions.find((each) => each.sessionId === sessionId);

test.after(async () => {
  for (const { sessionId } of (await vm.pty.list()).sessions) await vm.pty.close({ sessionId });
});

test("a login shell on a real terminal, of the size that was asked for", options, async () => {
  const seen = record();
  const session = await vm.pty.open({ cols: 120, rows: 30, ...seen });
  assert.match(session.sessionId, /^pty-\d+$/);
  await ask(session, seen, "stty size; tty", /30 120\r\n\/dev\/pts\/\d+\r\n/);
  await ask(session, seen, "shopt -q login_shell && echo login-$((1 + 1)) in $PWD", "login-2 in /root");
  await ask(session, seen, "echo $TERM-$((1 + 1)) user-$(id -un)", "xterm-256color-2 user-root");
  assert.partialDeepStrictEqual(await listed(session.sessionId), {
    running: true,
    cols: 120,
    rows: 30,
    attachedCount: 1,
    user: null,
  });
  await vm.pty.close({ sessionId: session.sessionId });
});

test("80 x 24, and a program instead of the shell", options, async () => {
  const seen = record();
  const before = Date.now();
  const session = await vm.pty.open({ exec: "python3", ...seen });
  await shown(seen, ">>> ");
  await ask(session, seen, "import os; print(os.get_terminal_size().columns * 10 + 42)", "842");
  const row = await listed(session.sessionId);
  assert.equal(row.exec, "python3");
  assert.deepEqual([row.cols, row.rows], [80, 24]);
  assert.ok(Math.abs(row.createdAtMs - before) < 60_000, `${row.createdAtMs}`);
  session.write("exit()\n");
  await until(() => seen.closes.length);
  assert.deepEqual(seen.exits, [0]);
});

test("text and bytes are typed; Ctrl-C by byte and by signal", options, async () => {
  const seen = record();
  const session = await vm.pty.open({ exec: "/bin/bash --norc", ...seen });
  await ask(session, seen, "printf %s é漢🙂 | wc -c", /^9\r/m);
  session.write(new TextEncoder().encode("echo by-$((2 + 3))\n"));
  await shown(seen, "by-5");
  for (const interrupt of [() => session.write(new Uint8Array([3])), () => session.signal("SIGINT")]) {
    // Printed by the child: bash has given it the terminal by then.
    session.write("sh -c 'echo asleep-$((1 + 1)); exec sleep 1000'\n");
    await shown(seen, "asleep-2");
    interrupt();
    await ask(session, seen, "echo status-$?.", "status-130.");
  }
  session.signal("SIGKILL");
  await until(() => seen.closes.length);
  assert.deepEqual(seen.exits, [137]);
  assert.throws(() => session.write("x"), /has exited/);
});

test("a new size reaches the program", options, async () => {
  const seen = record();
  const session = await vm.pty.open({ exec: "/bin/sh", ...seen });
  session.resize({ cols: 200, rows: 60 });
  await until(async () => (await listed(session.sessionId)).cols === 200);
  await ask(session, seen, "stty size", "60 200");
  await vm.pty.close({ sessionId: session.sessionId });
});

test("the exit code, then the close; it stays readable for a while", options, async () => {
  const seen = record();
  const session = await vm.pty.open({ ...seen });
  session.write("echo last-$((3 + 4)); exit 7\n");
  await until(() => seen.closes.length);
  assert.deepEqual(seen.exits, [7]);
  assert.deepEqual([seen.closes[0].code, seen.closes[0].wasClean, seen.retries], [1000, true, []]);
  const row = await listed(session.sessionId);
  assert.partialDeepStrictEqual(row, { running: false, exitCode: 7, attachedCount: 0 });
  assert.ok(row.exitedAtMs >= row.createdAtMs && row.exitedAtMs - Date.now() < 60_000);
  const late = record();
  await vm.pty.attach({ sessionId: session.sessionId, ...late });
  await until(() => late.closes.length);
  assert.match(late.text, /last-7/);
  assert.deepEqual([late.exits, late.retries], [[7], []]);
  await vm.pty.close({ sessionId: session.sessionId });
});

test("detached, the program runs on; attached, the screen is there and then what follows", options, async () => {
  const seen = record();
  const session = await vm.pty.open({ exec: "/bin/sh", sessionId: "work", cols: 90, ...seen });
  await ask(session, seen, "printf '\\033[1;32m%s\\033[0m\\n' gre''en; seq 9000; echo end-$((1 + 1))", "end-2");
  session.write("sleep 1; touch /tmp/ran-on; echo later-$((2 + 2))\n");
  session.detach();
  assert.throws(() => session.write("x"), /detached/);
  assert.throws(() => session.resize({ cols: 1, rows: 1 }), /attach\(\{ sessionId: work \}\)/);
  await until(async () => (await listed("work")).attachedCount === 0);
  await until(() => vm.fs.exists("/tmp/ran-on"));

  const again = record();
  const rebound = await vm.pty.attach({ sessionId: "work", cols: 90, ...again });
  await until(() => again.frames.length);
  const replay = new TextDecoder().decode(again.frames[0]);
  for (const part of ["\r\n2\r\n", "\r\n4999\r\n", "\r\n9000\r\n", "end-2"]) {
    assert.ok(replay.includes(part), `${JSON.stringify(part)} in ${replay.length} characters`);
  }
  assert.match(replay, /\x1b\[[\d;]*32[\d;]*mgreen/);
  await shown(again, "later-4");
  await ask(rebound, again, "echo live-$((5 + 5))", "live-10");
  assert.deepEqual(again.exits, []);
  await vm.pty.close({ sessionId: "work" });
  await vm.fs.remove("/tmp/ran-on");
});

test("many watch one terminal: the same bytes, the smallest window", options, async () => {
  const [typist, viewer] = [record(), record()];
  const session = await vm.pty.open({ exec: "/bin/sh", cols: 100, rows: 40, ...typist });
  const { sessionId } = session;
  const second = await vm.pty.attach({ sessionId, cols: 132, rows: 20, ...viewer });
  await until(async () => (await listed(sessionId)).attachedCount === 2);
  await ask(session, typist, "stty size", "20 100");
  await shown(viewer, "20 100");
  await ask(session, typist, "echo both-$((1 + 1)) see", "both-2 see");
  await shown(viewer, "both-2 see");
  second.detach();
  await until(async () => (await listed(sessionId)).rows === 40);
  await vm.pty.close({ sessionId });
  await until(() => typist.closes.length);
  assert.deepEqual(viewer.retries, []);
});

test("closed: killed, gone from the list, and unknown from then on", options, async () => {
  const seen = record();
  const { sessionId } = await vm.pty.open({ exec: "/bin/sh", ...seen });
  const session = await vm.pty.attach({ sessionId, ...record() });
  await ask(session, seen, "echo pid=$$.", /pid=\d+\./);
  const closed = await vm.pty.close({ sessionId });
  assert.equal(closed.sessionId, sessionId);
  assert.ok("exitCode" in closed);
  assert.equal(await listed(sessionId), undefined);
  await until(() => seen.closes.length);
  assert.deepEqual(seen.retries, [], "a terminal that was closed is not attached to again");
  await refused("SESSION_NOT_FOUND", () => vm.pty.close({ sessionId }), { vmId: vm.vmId, sessionId });
  await assert.rejects(() => vm.pty.attach({ sessionId }), /handshake/);
});

test("refused before the upgrade, in JSON", options, async () => {
  const { sessionId } = await vm.pty.open({ exec: "/bin/sh", sessionId: "mine" });
  const nobody = "0".repeat(20);
  for (const [status, code, where, headers] of [
    [409, "SESSION_ALREADY_EXISTS", `${path}?cols=80&rows=24&sessionId=mine`],
    [400, "INVALID_SESSION_ID", `${path}?cols=80&rows=24&sessionId=a%2Fb`],
    [400, "INVALID_SESSION_ID", `${path}?cols=80&rows=24&sessionId=${"x".repeat(65)}`],
    [404, "SESSION_NOT_FOUND", `${path}/sessions/none?cols=80&rows=24`],
    [404, "VM_NOT_FOUND", `/v1/vms/${nobody}/pty?cols=80&rows=24`],
    [404, "VM_NOT_FOUND", `/v1/vms/${nobody}/pty/sessions/mine?cols=80&rows=24`],
    [401, "UNAUTHORIZED_ERROR", `${path}?cols=80&rows=24`, { Authorization: "Bearer stead_wrong" }],
    [401, "UNAUTHORIZED_ERROR", `${path}/sessions/mine?cols=80&rows=24`, { Authorization: "" }],
  ]) {
    const answer = await upgrade(where, headers);
    assert.equal(answer.status, status, `${where} ${JSON.stringify(answer.body)}`);
    assert.equal(answer.body.code, code, where);
    assert.match(answer.headers["x-freestyle-trace-id"], /^[0-9a-f]{32}$/);
  }
  await assert.rejects(() => vm.pty.open({ sessionId }), /handshake/);
  await vm.pty.close({ sessionId });
});

test("each Linux user has terminals of their own; the owner sees all", options, async () => {
  await output(vm, "useradd --create-home --shell /bin/bash alice; useradd --create-home bob");
  try {
    const [alice, bob] = ["alice", "bob"].map((username) => vm.user({ username }));
    const seen = record();
    const session = await alice.pty.open({ ...seen });
    const { sessionId } = session;
    await ask(session, seen, "echo $(id -un)-$((1 + 1)) in $PWD", "alice-2 in /home/alice");
    assert.equal((await listed(sessionId, alice)).user, "alice");
    assert.equal((await listed(sessionId)).user, "alice");
    assert.equal(await listed(sessionId, bob), undefined);
    const { sessionId: roots } = await vm.pty.open({ exec: "/bin/sh" });
    assert.equal(await listed(roots, alice), undefined);
    for (const [other, id] of [
      [bob, sessionId],
      [alice, roots],
    ]) {
      const facts = { vmId: vm.vmId, sessionId: id };
      await refused("SESSION_USER_MISMATCH", () => other.pty.close({ sessionId: id }), facts);
      await assert.rejects(() => other.pty.attach({ sessionId: id, reconnect: false }), /handshake/);
    }
    const answer = await upgrade(`${path}/sessions/${sessionId}?cols=80&rows=24`, {
      "X-Freestyle-Vm-Linux-User-Id": "bob",
    });
    assert.deepEqual([answer.status, answer.body.code], [403, "SESSION_USER_MISMATCH"]);
    const owner = record();
    await vm.pty.attach({ sessionId, ...owner });
    await shown(owner, "alice-2");
    await alice.pty.close({ sessionId });
    await vm.pty.close({ sessionId: roots });
  } finally {
    await vm.exec("pkill -KILL -u alice,bob; userdel --remove alice; userdel --remove bob");
  }
});

test("a client session (identity token) has terminals in its VM", options, async () => {
  const { identity } = await freestyle.identities.create();
  try {
    await identity.permissions.vms.grant({ vmId: vm.vmId });
    const { token } = await identity.tokens.create();
    const granted = as({ accessToken: token }).vms.ref({ vmId: vm.vmId });
    const seen = record();
    const session = await granted.pty.open({ exec: "/bin/sh", ...seen });
    await ask(session, seen, "echo token-$((1 + 1))", "token-2");
    assert.equal((await listed(session.sessionId, granted)).running, true);
    await granted.pty.close({ sessionId: session.sessionId });
  } finally {
    await freestyle.identities.delete({ identityId: identity.identityId });
  }
});

test("a socket that breaks is opened again; what was typed meanwhile arrives once", options, async () => {
  const network = await proxy();
  const near = as({ apiKey: process.env.FREESTYLE_API_KEY, baseUrl: network.url }).vms.ref({ vmId: vm.vmId });
  const seen = record();
  const session = await near.pty.open({ exec: "/bin/sh", reconnect: { baseDelayMs: 200 }, ...seen });
  await ask(session, seen, "echo before-$((1 + 1))", "before-2");
  session.resize({ cols: 111, rows: 33 });
  network.cut();
  await until(() => seen.retries.length);
  session.write("echo queued-$((2 + 2)); stty size\n");
  await shown(seen, "queued-4");
  await shown(seen, "33 111");
  assert.equal(seen.reconnects, 1);
  assert.deepEqual([seen.retries[0], seen.closes, seen.exits], [[1, 5], [], []]);

  const other = record();
  const dead = await near.pty.attach({ sessionId: session.sessionId, reconnect: false, ...other });
  await shown(other, "queued-4");
  network.cut();
  await until(() => other.closes.length);
  assert.throws(() => dead.write("x"), /reconnect exhausted or disabled/);
  await until(() => seen.reconnects === 2);
  await ask(session, seen, "echo again-$((3 + 3))", "again-6");

  const given = record();
  const reconnect = { maxAttempts: 2, baseDelayMs: 50 };
  await near.pty.attach({ sessionId: session.sessionId, reconnect, ...given });
  await shown(given, "again-6");
  session.detach();
  const closing = network.close();
  network.cut();
  await closing;
  await until(() => given.closes.length);
  assert.deepEqual([given.closes.length, given.reconnects], [1, 0]);
  assert.equal((await listed(session.sessionId)).running, true);
  await vm.pty.close({ sessionId: session.sessionId });
});
