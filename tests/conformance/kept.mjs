// An account that may keep no snapshots.
import test from "node:test";
import { freestyle, refused, shared } from "./client.mjs";

test("of a machine", () => refused("SNAPSHOT_LIMIT_EXCEEDED", () => shared.snapshot(), { limit: 0 }));

test("of a template", () =>
  refused(
    "SNAPSHOT_LIMIT_EXCEEDED",
    () => freestyle.vms.snapshots.ensure({ template: { workdir: "/never" } }),
    { limit: 0 },
  ));
