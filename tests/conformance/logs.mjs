// What happened, to be read afterwards or while it happens.
import assert from "node:assert/strict";
import test from "node:test";
import { freestyle, output, refused, shared as vm, until } from "./client.mjs";

const { observability } = freestyle;
const vmId = vm.vmId;
const soon = () => new Date(Date.now() + 60_000).toISOString();

const say = (...lines) =>
  output(vm, `systemd-run --quiet --wait --unit=talker printf '${lines.join("\\n")}\\n'`);

test.before(() => say("log marker one", "LOG MARKER TWO"));

test("what a machine's services printed, and what happened to it", async () => {
  const { logs } = await until(async () => {
    const found = await vm.getLogs();
    return found.logs.some(({ message }) => message === "LOG MARKER TWO") && found;
  });
  const mark = logs.find(({ message }) => message === "log marker one");
  assert.partialDeepStrictEqual(mark, { resourceType: "vm", resourceId: vmId });
  assert.match(mark.vmService, /^talker(\.service)?$/);
  assert.ok(
    logs.some(({ message }) => message.startsWith(`VM ${vmId} created`)),
    "its start",
  );
  const times = logs.map(({ timestamp }) => Date.parse(timestamp));
  assert.ok(times.every((time) => !Number.isNaN(time)));
  assert.deepEqual(
    times,
    times.toSorted((one, other) => one - other),
  );
});

test("of one service", async () => {
  const { logs } = await observability.logs({ vmId, vmService: "talker" });
  assert.ok(logs.length >= 2);
  for (const { vmService } of logs) assert.match(vmService, /^talker(\.service)?$/);
  await refused("INVALID_QUERY", () => observability.getLogs({ vmService: "talker" }));
});

test("with a text, in whatever case", async () => {
  const { logs } = await observability.getLogs({ vmId, search: "log marker" });
  assert.deepEqual(
    logs.map(({ message }) => message).filter((each) => /^log marker/i.test(each)),
    ["log marker one", "LOG MARKER TWO"],
  );
});

test("of a time", async () => {
  assert.deepEqual((await observability.getLogs({ vmId, startTime: soon() })).logs, []);
  assert.deepEqual((await observability.getLogs({ vmId, endTime: "2020-01-01T00:00:00Z" })).logs, []);
  await refused("INVALID_QUERY", () => observability.getLogs({ vmId, startTime: "yesterday" }));
});

test("in pages", async () => {
  const all = (await observability.getLogs({ resourceType: "vm" })).logs;
  const seen = [];
  let pageToken;
  do {
    const page = await observability.getLogs({
      resourceType: "vm",
      pageSize: 3,
      pageToken,
      endTime: all.at(-1).timestamp,
    });
    assert.ok(page.logs.length <= 3);
    seen.push(...page.logs);
    pageToken = page.nextPageToken;
  } while (pageToken);
  assert.deepEqual(seen, all);
  await refused("INVALID_QUERY", () => observability.getLogs({ pageToken: "nonsense" }));
});

test("as it happens, each line once", { timeout: 120_000 }, async () => {
  const stop = new AbortController();
  const seen = [];
  const reading = (async () => {
    for await (const entry of observability.streamLogs({
      vmId,
      vmService: "talker",
      intervalMs: 200,
      includeExisting: true,
      signal: stop.signal,
    })) {
      seen.push(entry.message);
      if (entry.message === "log marker three") stop.abort();
    }
  })();
  await until(() => seen.includes("LOG MARKER TWO"));
  await say("log marker three");
  await reading;
  assert.equal(seen.filter((each) => each === "log marker one").length, 1);
});

test("of deployments there are none", async () => {
  assert.deepEqual((await observability.getLogs({ deploymentId: "x" })).logs, []);
});

test("of a machine that is not there", async () => {
  const { logs } = await observability.getLogs({ vmId: "0".repeat(20) });
  assert.deepEqual(logs, []);
});
