// The terminal emulator of the guest agent against xterm.js: recorded programs and random output.
import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import test, { after } from "node:test";
import { gunzipSync } from "node:zlib";
import { randomCase, resizedCase } from "./screen-cases.mjs";
import { compare, Emulator } from "./screen-oracle.mjs";

const emulator = new Emulator(process.env.EMULATOR);
after(() => emulator.close());

const recordings = readdirSync(process.env.RECORDINGS);
assert.ok(recordings.length >= 8, recordings.join());

for (const file of recordings)
  test(`recorded: ${file}`, async () => {
    const output = gunzipSync(readFileSync(`${process.env.RECORDINGS}/${file}`));
    const size = file.startsWith("htop") ? { cols: 100, rows: 30 } : { cols: 80, rows: 24 };
    const unfinished = output.lastIndexOf(0x1b) + 2; // a replay in the middle of an escape sequence
    for (const cut of [output.length, output.length >> 1, 777, unfinished]) {
      const [before, rest] = [output.subarray(0, cut), output.subarray(cut)];
      assert.equal(await compare(emulator, { ...size, scrollback: 10_000, before, after: rest }), "", `cut at ${cut}`);
    }
  });

test("random output", async () => {
  let dirty;
  for (let seed = 1; seed <= 150; seed++) {
    const random = randomCase(seed);
    assert.equal(await compare(emulator, { ...random, dirty }), "", random.name);
    dirty = random.before;
  }
});

test("random text in windows that change their size", async () => {
  for (let seed = 1; seed <= 40; seed++) {
    const random = resizedCase(seed);
    assert.equal(await compare(emulator, random), "", random.name);
  }
});

test("a disagreement is noticed", async () => {
  const size = { cols: 20, rows: 3, scrollback: 5 };
  const other = { run: (c) => emulator.run({ ...c, steps: [{ write: Buffer.from("\x1b[31mother") }] }) };
  assert.match(await compare(other, { ...size, before: Buffer.from("\x1b[32mother") }), /line 0 column 0/);
});
