// What this server does not have: every call ends at once, with an answer that the package can read.
import assert from "node:assert/strict";
import test from "node:test";
import { Errors } from "freestyle";
import { calls as sent, freestyle, shared as vm } from "./client.mjs";

const options = { timeout: 120_000 };
const classes = new Set(Object.values(Errors));

/** Refused in a class of the package's own, with a sentence that says why, and after one try. */
async function absent(call) {
  const before = sent.length;
  const error = await call().then(
    () => assert.fail("it worked"),
    (error) => error,
  );
  assert.ok(classes.has(error.constructor), `${error}`);
  assert.equal(error.constructor.statusCode, 404);
  assert.ok(error.body.message.length > 10, error.message);
  assert.equal(sent.length - before, 1, "one call");
}

const calls = {
  "domains.mappings.create of a deployment": () =>
    freestyle.domains.mappings.create({ domain: "app.style.dev", deploymentId: "x" }),
  "dns.records.create": () =>
    freestyle.dns.records.create({
      domain: "example.com",
      record: { kind: "A", name: "app", value: "192.0.2.1" },
    }),
  "dns.records.delete": () =>
    freestyle.dns.records.delete({ domain: "example.com", record: { kind: "A", name: "app", value: "x" } }),
  "dns.records.list": () => freestyle.dns.records.list({ domain: "example.com" }),
  "serverless.deployments.create": () =>
    freestyle.serverless.deployments.create({ code: "export default 1" }),
  "serverless.deployments.list": () => freestyle.serverless.deployments.list(),
  "serverless.runs.create": () => freestyle.serverless.runs.create({ code: "export default 1" }),
  "serverless.runs.list": () => freestyle.serverless.runs.list(),
  "cron.list": () => freestyle.cron.list(),
};

for (const [name, call] of Object.entries(calls)) test(name, options, () => absent(call));

test("a VM in a VPC that does not exist is refused before it is made", options, async () => {
  const wish = { nics: [{ vpc: "vpc-1", mode: "routed", ipv4: true }] };
  const error = await freestyle.vms.create(wish).then(assert.fail, (error) => error);
  assert.ok(classes.has(error.constructor), `${error}`);
  assert.equal(error.constructor.statusCode, 404);
});

test("paths that nobody has", options, async () => {
  for (const path of [
    "/",
    "/v1",
    "/v1/nonsense",
    "/v2/vms",
    `/v1/vms/${vm.vmId}/nonsense`,
    "/%00",
    "/v1/vms/%F0%9F%99%82/x",
  ]) {
    const response = await freestyle.fetch(path);
    assert.equal(response.status, 404, path);
    assert.equal((await response.json()).code, "NOT_FOUND", path);
  }
});

test("methods that a path does not take", options, async () => {
  for (const method of ["PUT", "PATCH", "DELETE"]) {
    const response = await freestyle.fetch("/v1/vms", { method });
    const { code } = await response.json();
    assert.equal(response.status, 405);
    assert.ok(
      Object.values(Errors).some((each) => each.code === code),
      code,
    );
  }
});
