// Calls that take longer than a client wants to wait on one connection.
import assert from "node:assert/strict";
import test from "node:test";
import { VmSpec } from "freestyle";
import { calls, classOf, freestyle, output, refused } from "./client.mjs";

const slow = (script) => new VmSpec().discriminator(`${process.pid}`).runCommands(script);
const lines = [];
const logger = (line) => lines.push(line);
const posts = (path) => calls.filter((call) => call.method === "POST" && call.path === path);

test("a quick create answers as if nothing had been said", async () => {
  const { vm } = await freestyle.vms.create({ logger });
  assert.equal(posts("/v1/vms").at(-1).headers["x-freestyle-background-after-secs"], "5");
  assert.equal(calls.at(-1).status, 200);
  await vm.delete();
});

test("a slow one goes on in the background, and its log is told", async () => {
  lines.length = 0;
  const before = posts("/v1/vms").length;
  const created = await freestyle.vms.create({
    spec: slow("echo marker one; sleep 5; echo marker two; echo kept > /srv/kept"),
    name: "slow",
    logger,
  });
  assert.equal(posts("/v1/vms").length, before + 1);
  const post = posts("/v1/vms").at(-1);
  assert.equal(post.status, 202);
  const request = post.answered.get("x-freestyle-background-request-id");
  assert.match(request, /^ri-[a-z0-9]{20}$/);
  const polls = calls.filter(({ path }) => path === `/auth/v1/background-requests/${request}`);
  assert.deepEqual(new Set(polls.map(({ status }) => status)), new Set([200, 202]));
  assert.deepEqual(created.domains, []);
  assert.equal(await output(created.vm, "cat /srv/kept"), "kept");
  assert.equal((await created.vm.getInfo()).name, "slow");
  assert.ok(
    lines.some((line) => line.includes("marker one")),
    lines.join("\n"),
  );
  for (const line of lines) assert.match(line, /^\[\d{4}-\d\d-\d\dT[^\]]+Z\] \S/);
  assert.equal(new Set(lines).size, lines.length, "nothing is told twice");
  const { logs } = await freestyle.observability.getLogs({ requestId: request });
  assert.ok(logs.some(({ message }) => message.includes("marker two")));
  await created.vm.delete();
});

test("a slow snapshot that cannot be built", async () => {
  lines.length = 0;
  const broken = slow("echo marker three; sleep 5; exit 3").snapshot();
  const error = await freestyle.vms.snapshots
    .ensure({ spec: broken, logger })
    .then(assert.fail, (error) => error);
  assert.ok(error instanceof classOf("SNAPSHOT_SETUP_FAILED"), error);
  assert.equal(typeof error.body.failedReason, "string");
  assert.equal(posts("/v1/vms/snapshots").at(-1).status, 202);
  assert.ok(
    lines.some((line) => line.includes("marker three")),
    lines.join("\n"),
  );
});

test("a number that nobody was given is an answer with a code", async () => {
  await refused("NOT_FOUND", () =>
    freestyle._apiClient.get("/auth/v1/background-requests/ri-00000000000000000000"),
  );
});
