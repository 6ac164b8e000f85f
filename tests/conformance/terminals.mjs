// Commands whose output is kept under a name.
import assert from "node:assert/strict";
import test from "node:test";
import { refused, shared as vm } from "./client.mjs";

const terminal = "build-1";

test("a command in a terminal is an exec like any other", async () => {
  const result = await vm.exec({ command: "echo first; printf '\\033[31mred\\033[0m\\n'; exit 3", terminal });
  assert.equal(result.statusCode, 3);
  assert.match(result.stdout, /^first\r?\n/);
});

test("a second one comes after the first", async () => {
  assert.equal((await vm.exec({ command: "echo second", terminal })).statusCode, 0);
});

test("the terminal is listed", async () => {
  const { terminals } = await vm.terminals.list();
  const found = terminals.find(({ name }) => name === terminal);
  assert.equal(typeof found?.status, "string", JSON.stringify(terminals));
  assert.ok(Math.abs(Date.parse(found.created) - Date.now()) < 300_000, found.created);
});

test("its lines", async () => {
  const { logs } = await vm.terminals.getLogs({ terminalId: terminal });
  const lines = logs.map(({ line }) => line);
  assert.ok(
    lines.includes("first") && lines.indexOf("second") > lines.indexOf("first"),
    JSON.stringify(lines),
  );
  assert.ok(
    lines.some((line) => line.includes("red")),
    JSON.stringify(lines),
  );
  for (const { timestamp } of logs)
    if (timestamp != null) assert.ok(!Number.isNaN(Date.parse(timestamp)), timestamp);
});

test("its screen has the colours", async () => {
  const { output } = await vm.terminals.getOutput({ terminalId: terminal });
  assert.match(output, /first\r?\n/);
  assert.ok(output.includes("\u001b[31mred\u001b[0m"), JSON.stringify(output));
});

test("a name that cannot be a terminal's", () =>
  refused("INVALID_REQUEST", () => vm.exec({ command: "true", terminal: "a/b" })));

test("a terminal that nobody opened", async () => {
  for (const call of [vm.terminals.getLogs, vm.terminals.getOutput]) {
    await refused("NOT_FOUND", () => call.call(vm.terminals, { terminalId: "none" }));
  }
});
