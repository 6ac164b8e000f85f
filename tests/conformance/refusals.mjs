// Answers that a client must not take for a reason to try again: it would create machines for ever.
import assert from "node:assert/strict";
import test from "node:test";
import { Freestyle, VmSpec } from "freestyle";
import { as, freestyle, noting, refused } from "./client.mjs";

const options = { timeout: 120_000 };
const strangers = {
  "a key that nobody has": as({ apiKey: "stead_nonsense" }),
  "a key that is no key": as({ apiKey: "x y \\ é" }),
  "a token that nobody has": as({ accessToken: "stid_nonsense" }),
};

for (const [name, stranger] of Object.entries(strangers)) {
  test(name, options, async () => {
    await refused("UNAUTHORIZED_ERROR", () => stranger.vms.create(), { route: "/v1/vms" });
    await refused("UNAUTHORIZED_ERROR", () => stranger.vms.create({ spec: new VmSpec() }));
    await refused("UNAUTHORIZED_ERROR", () => stranger.vms.snapshots.ensure({ template: {} }), {
      route: "/v1/vms/snapshots",
    });
    await refused("UNAUTHORIZED_ERROR", () => stranger.vms.list());
  });
}

test("no key at all", options, async () => {
  const anonymous = new Freestyle({
    apiKey: "x",
    fetch: (url, init) => noting(url, { ...init, headers: { ...init.headers, Authorization: "" } }),
  });
  await refused("UNAUTHORIZED_ERROR", () => anonymous.vms.create());
});

test("a request that does not fit", options, async () => {
  await refused("CREATE_VM_BAD_REQUEST", () => freestyle.vms.create({ name: ["a list"] }));
  await refused("CREATE_VM_BAD_REQUEST", () => freestyle.vms.create({ name: "x".repeat(100_000) }));
  await refused("CREATE_SNAPSHOT_BAD_REQUEST", () =>
    freestyle.vms.snapshots.ensure({ template: { users: 5 } }),
  );
});

test("bodies that are not JSON, or not an object", options, async () => {
  for (const path of ["/v1/vms", "/v1/vms/snapshots"]) {
    for (const body of ["{", "[]", '"text"', "\u0000", '{"name": "\\ud800"}']) {
      const response = await freestyle.fetch(path, {
        method: "POST",
        body,
        headers: { "content-type": "application/json" },
      });
      const { code } = await response.json();
      assert.match(
        `${path} ${JSON.stringify(body)} ${response.status} ${code}`,
        / 400 CREATE_(VM|SNAPSHOT)_BAD_REQUEST$/,
      );
    }
  }
});
