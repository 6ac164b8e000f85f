// Verifies a webhook like a receiver: with the npm package `jose` and the published JWKS.
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import test from "node:test";
import { createRemoteJWKSet, jwtVerify } from "jose";

const { JWKS_URL, SIGNATURE, BODY, COMMIT } = process.env;
const keys = createRemoteJWKSet(new URL(JWKS_URL));
const digest = (text) => createHash("sha256").update(text).digest("hex");

test("the signature covers the body", async () => {
  const { payload, protectedHeader } = await jwtVerify(SIGNATURE, keys, { algorithms: ["EdDSA"] });
  assert.ok(protectedHeader.kid);
  assert.equal(payload.body_sha256, digest(BODY));
  assert.notEqual(payload.body_sha256, digest(`${BODY} `));
  assert.equal(JSON.parse(BODY).commit, COMMIT);
});

test("a modified signature is refused", async () => {
  const [header, , seal] = SIGNATURE.split(".");
  const claims = { exp: 9999999999, body_sha256: digest("other") };
  const forged = [header, Buffer.from(JSON.stringify(claims)).toString("base64url"), seal].join(".");
  await assert.rejects(jwtVerify(forged, keys, { algorithms: ["EdDSA"] }), { code: "ERR_JWS_SIGNATURE_VERIFICATION_FAILED" });
});
