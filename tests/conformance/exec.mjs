// Commands in a machine.
import assert from "node:assert/strict";
import test from "node:test";
import { output, refused, shared as vm } from "./client.mjs";

test("a line of shell", async () => {
  const result = await vm.exec("echo 'hello from freestyle'");
  assert.partialDeepStrictEqual(result, { stdout: "hello from freestyle\n", stderr: "", statusCode: 0 });
});

test("as an object, with both streams", async () => {
  const result = await vm.exec({ command: "echo out; echo err >&2" });
  assert.partialDeepStrictEqual(result, { stdout: "out\n", stderr: "err\n", statusCode: 0 });
});

test("several lines", async () => {
  assert.equal(await output(vm, "set -e\nfor word in a b\ndo\n  echo $word\ndone\n"), "a\nb");
});

test("a command that fails is an answer, not an error", async () => {
  assert.partialDeepStrictEqual(await vm.exec("echo no >&2; exit 7"), { stderr: "no\n", statusCode: 7 });
  assert.equal((await vm.exec("no-such-program")).statusCode, 127);
});

test("a command that is ended by a signal has a number all the same", async () => {
  assert.equal((await vm.exec("kill -TERM $$")).statusCode, 128 + 15);
});

test("root, in the root folder, with the environment of the account", async () => {
  assert.equal(await output(vm, "id -un; pwd; echo $HOME $USER $LANG"), "root\n/\n/root root C.UTF-8");
});

test("any text comes back as it is", async () => {
  const text = "naïve 日本語 🙂 \\ \" ' $HOME `id`";
  assert.equal((await vm.exec(`cat <<'END'\n${text}\nEND`)).stdout, `${text}\n`);
});

test("what is not text does not break the answer", async () => {
  const result = await vm.exec("printf 'a\\377b'");
  assert.equal(result.stdout, "a\ufffdb");
});

test("a megabyte of output", async () => {
  const result = await vm.exec("head -c 1048576 /dev/zero | tr '\\0' x");
  assert.equal(result.stdout.length, 1048576);
});

test("a command that takes too long is ended, and what it printed is there", async () => {
  const started = Date.now();
  const error = await refused(
    "EXEC_TIMED_OUT",
    () => vm.exec({ command: "echo begun; echo trouble >&2; sleep 60; echo done", timeoutMs: 4000 }),
    { timeoutMs: 4000, stdout: "begun\n", stderr: "trouble\n" },
  );
  assert.equal(error.constructor.name, "ExecTimedOutError");
  assert.ok(Date.now() - started < 15_000);
  assert.equal((await vm.exec("pgrep -x sleep")).statusCode, 1);
});

test("enough time is no matter", async () => {
  assert.equal((await vm.exec({ command: "echo quick", timeoutMs: 600_000 })).stdout, "quick\n");
});

test("a time that is none is refused", async () => {
  await refused("INVALID_REQUEST", () => vm.exec({ command: "true", timeoutMs: -1 }));
});

test("several at once", async () => {
  const numbers = [...Array(6).keys()];
  const results = await Promise.all(numbers.map((number) => vm.exec(`sleep 0.2; echo ${number}`)));
  assert.deepEqual(
    results.map((result) => result.stdout),
    numbers.map((number) => `${number}\n`),
  );
});

test("one after another, twenty times, on the same connection", async () => {
  for (let number = 0; number < 20; number += 1) {
    assert.equal((await vm.exec(`echo ${number}`)).stdout, `${number}\n`);
  }
});
