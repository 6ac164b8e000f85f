// One create that is answered with the code in CODE, after one call and at once.
import test from "node:test";
import { VmSpec } from "freestyle";
import { freestyle, refused } from "./client.mjs";

test(process.env.CODE, { timeout: 120_000 }, () => refused(process.env.CODE, () => freestyle.vms.create()));

test(`${process.env.CODE} for a snapshot`, { timeout: 120_000 }, () =>
  refused(process.env.CODE, () =>
    freestyle.vms.snapshots.ensure({ spec: new VmSpec().workdir("/never").snapshot() }),
  ),
);
