// Domains: the pages about verification, mappings and preview domains, with the package itself.
import assert from "node:assert/strict";
import test from "node:test";
import { Errors, Freestyle } from "freestyle";
import { freestyle, shared as vm, withVm } from "./client.mjs";

const other = new Freestyle({ apiKey: process.env.OTHER_KEY });
const { vmId } = vm;

/** Publish TXT records, in place of all others. */
const publish = (records) =>
  fetch(process.env.RECORDS, { method: "PUT", body: JSON.stringify(records) });

async function refused(call, kind) {
  const error = await call().then(
    () => assert.fail("it worked"),
    (error) => error,
  );
  assert.equal(error.constructor, kind, `${error}`);
  return error;
}

test("verify a domain by its name", async () => {
  const { verificationId, record, instructions } = await freestyle.domains.verifications.create({
    domain: "one.example.com",
  });
  assert.equal(record.type, "TXT");
  assert.equal(record.name, "_freestyle_custom_hostname.one.example.com");
  assert.ok(instructions.includes(record.value));
  const pending = await freestyle.domains.verifications.list();
  const [row] = pending.filter((each) => each.domain === "one.example.com");
  assert.equal(row.verificationCode, record.value);
  assert.ok(verificationId);
  const complete = () => freestyle.domains.verifications.complete({ domain: "one.example.com" });
  await refused(complete, Errors.VerificationFailedError);
  await publish({ [record.name]: ["something else", record.value] });
  assert.deepEqual(await complete(), { domain: "one.example.com" });
  const domains = await freestyle.domains.list({ limit: 50 });
  const [domain] = domains.filter((each) => each.domain === "one.example.com");
  assert.partialDeepStrictEqual(domain, {
    accountId: process.env.ACCOUNT,
    verifiedDns: true,
    implicitlyOwned: false,
  });
});

test("verify a domain by the id of the verification, with a record of its parent", async () => {
  const { verificationId, record } = await freestyle.domains.verifications.create({
    domain: "deep.two.example.com",
  });
  await publish({ "_freestyle_custom_hostname.two.example.com": [record.value] });
  const complete = (options) => freestyle.domains.verifications.complete(options);
  await refused(
    () => other.domains.verifications.complete({ verificationId }),
    Errors.VerificationNotFoundError,
  );
  assert.deepEqual(await complete({ verificationId }), { domain: "deep.two.example.com" });
  await refused(() => complete({ verificationId }), Errors.VerificationNotFoundError);
});

test("cancel a verification", async () => {
  const { record } = await freestyle.domains.verifications.create({ domain: "three.example.com" });
  const wanted = { domain: "three.example.com", verificationCode: record.value };
  assert.deepEqual(await freestyle.domains.verifications.cancel(wanted), wanted);
  await refused(() => freestyle.domains.verifications.cancel(wanted), Errors.VerificationNotFoundError);
  const pending = await freestyle.domains.verifications.list();
  assert.ok(pending.every((each) => each.domain !== "three.example.com"));
});

test("map, move, list and unmap", async () => {
  const domain = "app.one.example.com";
  const made = await freestyle.domains.mappings.create({ domain, vmId, vmPort: 3000 });
  assert.partialDeepStrictEqual(made, { domain, vmId, vmPort: 3000 });
  const again = await freestyle.domains.mappings.create({ domain, vmId, vmPort: 8453 });
  assert.equal(again.vmPort, 8453);
  const { mappings } = await freestyle.domains.mappings.list({ domain, limit: 50 });
  assert.deepEqual(mappings, [again]);
  assert.deepEqual((await other.domains.mappings.list({ domain })).mappings, []);
  assert.deepEqual(await freestyle.domains.mappings.delete({ domain }), {});
  assert.deepEqual((await freestyle.domains.mappings.list({ domain })).mappings, []);
});

test("wildcards", async () => {
  const made = await freestyle.domains.mappings.create({ domain: "*.one.example.com", vmId, vmPort: 80 });
  assert.equal(made.domain, "*.one.example.com");
  assert.deepEqual(await freestyle.domains.certificates.createWildcard({ domain: "one.example.com" }), {
    domain: "one.example.com",
  });
  await freestyle.domains.mappings.delete({ domain: "*.one.example.com" });
});

test("preview domains", async () => {
  const domain = `preview-${crypto.randomUUID().slice(0, 8)}.style.dev`;
  await freestyle.domains.mappings.create({ domain, vmId, vmPort: 8080 });
  await withVm({ domains: [{ domain: `more.${domain}`, vmPort: 3000 }] }, async (vm, created) => {
    assert.deepEqual(created.domains, [`more.${domain}`]);
    const { mappings } = await freestyle.domains.mappings.list({ domain: `more.${domain}` });
    assert.equal(mappings[0].vmId, created.vmId);
  });
  await freestyle.domains.mappings.delete({ domain });
});

test("what is refused has a class of the package", async () => {
  const map = (client, domain) => () => client.domains.mappings.create({ domain, vmId, vmPort: 80 });
  await freestyle.domains.mappings.create({ domain: "npm-mine.style.dev", vmId, vmPort: 80 });
  await refused(map(other, "npm-mine.style.dev"), Errors.DomainAlreadyExistsError);
  await refused(map(other, "x.one.example.com"), Errors.DomainAlreadyExistsError);
  await refused(map(other, "npm-theirs.style.dev"), Errors.VmAccessDeniedForMappingError);
  await refused(map(freestyle, "app.example.net"), Errors.DomainOwnershipNotVerifiedError);
  const invalid = await refused(map(freestyle, "a_b.style.dev"), Errors.InvalidDomainError);
  assert.equal(invalid.body.domain, "a_b.style.dev");
  await refused(() => other.domains.mappings.delete({ domain: "npm-mine.style.dev" }), Errors.NotFoundError);
  const wish = { domains: [{ domain: "app.example.net", vmPort: 3000 }] };
  await refused(() => freestyle.vms.create(wish), Errors.DomainOwnershipNotVerifiedError);
  await freestyle.domains.mappings.delete({ domain: "npm-mine.style.dev" });
});

test("verified domains are given up at the end", async () => {
  for (const domain of ["one.example.com", "deep.two.example.com"]) {
    const response = await freestyle.fetch(`/domains/v1/domains/${domain}`, { method: "DELETE" });
    assert.equal(response.status, 200);
  }
  assert.deepEqual(await freestyle.domains.list(), []);
});
