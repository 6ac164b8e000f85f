// The example, or with GUIDE set the class of the published guide, under run() with a scripted model.
import assert from "node:assert/strict";
import test from "node:test";
import { Usage, type Model, type ModelRequest, type ModelResponse } from "@openai/agents";
import { urlForExposedPort } from "@openai/agents/sandbox";
import { freestyle } from "freestyle";
import { ask } from "./agent.ts";
import { get } from "./https.mts";

const { default: newClient } = await import(process.env.GUIDE ? "./guide-client.mts" : "./example-client.mts");

type Turn = (seen: string) => ModelResponse["output"][number];

const call = (id: string, cmd: string): ModelResponse["output"][number] => ({
  type: "function_call",
  callId: id,
  name: "exec_command",
  arguments: JSON.stringify({ cmd }),
  status: "completed",
});
const say = (text: string): ModelResponse["output"][number] => ({
  type: "message",
  role: "assistant",
  status: "completed",
  content: [{ type: "output_text", text }],
});

/** A model whose answers are given; each sees what the tool last returned. */
class Scripted implements Model {
  readonly #turns: Turn[];
  constructor(...turns: Turn[]) {
    this.#turns = turns;
  }
  async getResponse({ input }: ModelRequest): Promise<ModelResponse> {
    const last = Array.isArray(input) ? input.findLast((item) => item.type === "function_call_result") : undefined;
    const turn = this.#turns.shift();
    assert.ok(turn, "the model was asked too often");
    return { usage: new Usage(), output: [turn(JSON.stringify(last ?? ""))], responseId: "scripted" };
  }
  // eslint-disable-next-line require-yield
  async *getStreamedResponse(): AsyncGenerator<never> {
    throw new Error("not scripted");
  }
}

const vms = async () => (await freestyle.vms.list()).vms.map((vm: { id: string }) => vm.id);
const options = { timeout: 600_000 };

test("an agent inspects its VM, writes a program and runs it; the VM is gone afterwards", options, async () => {
  const before = await vms();
  const model = new Scripted(
    () => call("1", "uname -s; pwd"),
    (seen) => {
      assert.match(seen, /Linux\\+n\/workspace/);
      return call("2", "printf 'print(sum(range(10)))' > sum.py && python3 sum.py; cat nowhere");
    },
    (seen) => {
      assert.match(seen, /45\\+n/);
      assert.match(seen, /nowhere: No such file/);
      assert.match(seen, /code 1\b/);
      return say("the sum is 45");
    },
  );
  assert.equal(await ask("Sum the numbers below ten.", model, newClient()), "the sum is 45");
  assert.deepEqual(await vms(), before);
});

test("a run that fails deletes its VM too", options, async () => {
  const before = await vms();
  const model = new Scripted(
    () => call("1", "echo begun"),
    (seen) => {
      assert.match(seen, /begun/);
      throw new Error("the model is gone");
    },
  );
  await assert.rejects(ask("Begin.", model, newClient()), /the model is gone/);
  assert.deepEqual(await vms(), before);
});

test("a server that a command starts has an HTTPS URL", options, async () => {
  const session = await newClient().create();
  try {
    const unit = "systemd-run --unit=app --working-directory=/workspace python3 -m http.server 8000";
    await session.execCommand({ cmd: `echo 'served by a VM' > index.html; ${unit}` });
    await session.execCommand({ cmd: "until curl -sf -o /dev/null http://127.0.0.1:8000; do sleep 0.2; done" });
    const endpoint = await session.resolveExposedPort(8000);
    assert.deepEqual(await session.resolveExposedPort(8000), endpoint);
    const { status, body } = await get(urlForExposedPort(endpoint, "http"));
    assert.equal(status, 200);
    assert.equal(body, "served by a VM\n");
  } finally {
    await session.close();
  }
});
