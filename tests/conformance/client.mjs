// A client of the API under test, which remembers what went over the wire.
import assert from "node:assert/strict";
import { Errors, Freestyle } from "freestyle";

export const calls = [];

/** `fetch`, with each call and the status of its answer noted in `calls`. */
export async function noting(url, init = {}) {
  const call = { method: init.method ?? "GET", path: new URL(url).pathname, headers: init.headers };
  calls.push(call);
  const response = await fetch(url, init);
  call.status = response.status;
  call.answered = response.headers;
  return response;
}

export const freestyle = new Freestyle({ fetch: noting });

/** The machine that all scripts share; they leave it as they found it. */
export const shared = process.env.VM_ID && freestyle.vms.ref({ vmId: process.env.VM_ID });

export function as(credentials) {
  return new Freestyle({ ...credentials, fetch: noting });
}

/** Use a machine of one's own, which is gone afterwards. */
export async function withVm(options, use) {
  const created = await freestyle.vms.create(options);
  try {
    return await use(created.vm, created);
  } finally {
    await created.vm.delete();
  }
}

export function classOf(code) {
  const found = Object.values(Errors).find((each) => each.code === code);
  assert.ok(found, `the package knows no ${code}`);
  return found;
}

/**
 * The call is refused with the package's own class for this code, with the status that belongs to it, and
 * after one try. `facts` are what else the body must say.
 */
export async function refused(code, call, facts = {}) {
  const before = calls.length;
  const error = await call().then(
    (value) => assert.fail(`${code} was expected, but it worked: ${JSON.stringify(value)}`),
    (error) => error,
  );
  const expected = classOf(code);
  if (!(error instanceof expected)) throw error;
  assert.ok(error.message.startsWith(`${code}: `), error.message);
  assert.ok(error.body.message.length > 5, "a sentence for people");
  assert.partialDeepStrictEqual(error.body, { code, ...facts });
  assert.equal(calls.length - before, 1, "one call");
  assert.equal(calls.at(-1).status, expected.statusCode);
  assert.match(calls.at(-1).answered.get("x-freestyle-trace-id"), /^[0-9a-f]{32}$/);
  return error;
}

/** For calls whose failures the package does not give a class: the sentence has the status. */
export async function refusedPlainly(status, call) {
  await assert.rejects(
    call,
    (error) => error.message.includes(` ${status} `) || error.message.endsWith(` ${status}`),
  );
  assert.equal(calls.at(-1).status, status);
}

/** The first answer of `ask` that is true, within some seconds. */
export async function until(ask, seconds = 30) {
  const end = Date.now() + seconds * 1000;
  for (;;) {
    const answer = await ask();
    if (answer) return answer;
    assert.ok(Date.now() < end, `not within ${seconds} s: ${ask}`);
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}

export async function output(vm, command) {
  const result = await vm.exec(command);
  assert.equal(result.statusCode, 0, `${command}: ${result.stderr}`);
  return result.stdout.trim();
}
