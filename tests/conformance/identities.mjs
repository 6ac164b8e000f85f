// Identities, their tokens, and what they may use.
import assert from "node:assert/strict";
import test from "node:test";
import { as, freestyle, refused, refusedPlainly, shared as vm } from "./client.mjs";

const uuid = /^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/;
const nobody = "00000000-0000-4000-8000-000000000000";
const vmId = vm.vmId;
let identity;

test("who a key belongs to", async () => {
  const { accountId, identityId } = await freestyle.whoami();
  assert.equal(accountId, process.env.ACCOUNT);
  assert.ok(identityId == null);
});

test("an identity is made", async () => {
  const created = await freestyle.identities.create();
  assert.match(created.identityId, uuid);
  identity = created.identity;
  assert.equal(identity.identityId, created.identityId);
});

test("identities in pages", async () => {
  const { identities, total, offset } = await freestyle.identities.list();
  assert.equal(offset, 0);
  assert.equal(total, identities.length);
  assert.ok(identities.some(({ id, managed }) => id === identity.identityId && managed === false));
  const other = await freestyle.identities.create();
  const page = await freestyle.identities.list({ limit: 1, cursor: "1" });
  assert.equal(page.identities.length, 1);
  assert.partialDeepStrictEqual(page, { offset: 1, total: total + 1 });
  assert.deepEqual(await freestyle.identities.delete({ identityId: other.identityId }), {});
  await refused("IDENTITY_NOT_FOUND", () => freestyle.identities.delete({ identityId: other.identityId }));
});

test("tokens", async () => {
  const { tokenId, token } = await identity.tokens.create();
  assert.match(token, /^[A-Za-z0-9_-]{20,}$/);
  assert.deepEqual(await identity.tokens.list(), { tokens: [{ id: tokenId }] });
  const client = as({ accessToken: token });
  assert.deepEqual(await client.whoami(), {
    accountId: process.env.ACCOUNT,
    identityId: identity.identityId,
  });
  assert.deepEqual(await identity.tokens.revoke({ tokenId }), {});
  assert.deepEqual(await identity.tokens.list(), { tokens: [] });
  await refusedPlainly(401, () => client.whoami());
  await assert.rejects(
    () => identity.tokens.revoke({ tokenId }),
    (error) => error.constructor.statusCode === 404,
  );
});

test("permission to use a machine", async () => {
  const { vms } = identity.permissions;
  await refused("VM_PERMISSION_NOT_FOUND", () => vms.get({ vmId }));
  await refused("VM_PERMISSION_NOT_FOUND", () => vms.update({ vmId, allowedUsers: ["ann"] }));
  await refused("VM_PERMISSION_NOT_FOUND", () => vms.revoke({ vmId }));
  assert.partialDeepStrictEqual(await vms.list(), { permissions: [], offset: 0, total: 0 });

  const granted = await vms.grant({ vmId });
  assert.partialDeepStrictEqual(granted, { vmId, identityId: identity.identityId });
  assert.ok(granted.allowedUsers == null);
  assert.ok(granted.id && granted.grantedBy);
  assert.ok(Math.abs(Date.parse(granted.grantedAt) - Date.now()) < 60_000);
  await refused("PERMISSION_ALREADY_EXISTS", () => vms.grant({ vmId }));
  assert.deepEqual(await vms.get({ vmId }), granted);
  assert.deepEqual(await vms.list({ limit: 5 }), { permissions: [granted], offset: 0, total: 1 });

  const updated = await vms.update({ vmId, allowedUsers: ["ann", "ben"] });
  assert.deepEqual(updated, { ...granted, allowedUsers: ["ann", "ben"] });
  assert.deepEqual(await vms.get({ vmId }), updated);
  assert.ok((await vms.update({ vmId, allowedUsers: null })).allowedUsers == null);
  assert.deepEqual(await vms.revoke({ vmId }), {});
  await refused("VM_PERMISSION_NOT_FOUND", () => vms.get({ vmId }));
});

test("permission to use a machine that is not there", async () => {
  await refused("VM_NOT_FOUND", () => identity.permissions.vms.grant({ vmId: "0".repeat(20) }));
});

test("repositories", async () => {
  const { git } = identity.permissions;
  const repo = { repoId: nobody };
  assert.deepEqual(await git.list(), { repositories: [] });
  await refused("GIT_REPOSITORY_NOT_FOUND", () => git.get(repo));
  await refused("GIT_REPOSITORY_NOT_FOUND", () => git.grant({ ...repo, permission: "read" }));
  await refused("GIT_REPOSITORY_NOT_FOUND", () => git.update({ ...repo, permission: "write" }));
  await refused("GIT_REPOSITORY_NOT_FOUND", () => git.revoke(repo));
});

test("an identity that is the server's own stays", async () => {
  const identityId = process.env.MANAGED;
  await refused("CANNOT_DELETE_MANAGED_IDENTITY", () => freestyle.identities.delete({ identityId }));
});

test("an identity that is not there", async () => {
  const none = freestyle.identities.ref({ identityId: nobody });
  for (const call of [
    () => none.tokens.create(),
    () => none.tokens.list(),
    () => none.tokens.revoke({ tokenId: "x" }),
    () => none.permissions.vms.list(),
    () => none.permissions.vms.grant({ vmId }),
    () => none.permissions.git.list(),
  ]) {
    await refused("IDENTITY_NOT_FOUND", call);
  }
});

test("with an identity go its tokens", async () => {
  const { token } = await identity.tokens.create();
  await freestyle.identities.delete({ identityId: identity.identityId });
  await refusedPlainly(401, () => as({ accessToken: token }).whoami());
});
