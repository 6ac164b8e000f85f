// A command that takes longer than the client waits for headers: SLEEP and HEADERS_TIMEOUT, in ms.
import assert from "node:assert/strict";
import test from "node:test";
import { freestyle } from "freestyle";
import { Agent, setGlobalDispatcher } from "undici";

const vm = freestyle.vms.ref({ vmId: process.env.VM_ID });
const { SLEEP, HEADERS_TIMEOUT, GIVES_UP } = process.env;
if (HEADERS_TIMEOUT) setGlobalDispatcher(new Agent({ headersTimeout: Number(HEADERS_TIMEOUT) }));

const patient = () => vm.exec({ command: `sleep ${SLEEP / 1000}; echo done`, timeoutMs: 600_000 });

if (GIVES_UP) {
  test("a client that hears nothing gives up", () =>
    assert.rejects(patient, (error) => error.cause?.code === "UND_ERR_HEADERS_TIMEOUT"));
} else {
  test("a client that hears of progress waits", async () => {
    const result = await patient();
    assert.equal(result.stdout, "done\n");
    assert.equal(result.statusCode, 0);
  });
}
