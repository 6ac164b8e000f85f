// A page of a VM over HTTPS at its preview name, with Node's fetch and a WebSocket client.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import test from "node:test";
import { Agent } from "undici";
import WebSocket from "ws";
import { freestyle, output, shared as vm } from "./client.mjs";

// `*.localhost` is this host: browsers know that, Node does not.
const lookup = (name, { all }, done) =>
  all ? done(null, [{ address: "127.0.0.1", family: 4 }]) : done(null, "127.0.0.1", 4);
const dispatcher = new Agent({ connect: { lookup } });
const domain = `page-${crypto.randomUUID().slice(0, 8)}.stead.localhost`;
const site = `${domain}:${process.env.HTTPS_PORT}`;

test.before(async () => {
  await vm.fs.writeTextFile("/srv/preview-server.mjs", await readFile("preview-server.mjs", "utf8"));
  await output(vm, "systemd-run --quiet --unit=preview node /srv/preview-server.mjs");
  await output(vm, "until curl -sf -o /dev/null http://127.0.0.1:3000; do sleep 0.2; done");
  await freestyle.domains.mappings.create({ domain, vmId: vm.vmId, vmPort: 3000 });
});

test.after(async () => {
  await output(vm, "systemctl stop preview; rm /srv/preview-server.mjs");
  await freestyle.domains.mappings.delete({ domain });
});

test("fetch: the page, with the headers of a request over HTTPS", async () => {
  const page = await fetch(`https://${site}/`, { dispatcher });
  assert.equal(page.status, 200);
  assert.match(await page.text(), /<title>Served in a VM<\/title>/);
  const headers = await (await fetch(`https://${site}/headers`, { dispatcher })).json();
  assert.equal(headers.host, site);
  assert.equal(headers["x-forwarded-proto"], "https");
  assert.equal(headers["x-forwarded-host"], site);
});

test("fetch: a body of 2 MB, and events as they come", async () => {
  const body = new Uint8Array(2 << 20);
  const sent = await fetch(`https://${site}/`, { method: "POST", body, dispatcher });
  assert.equal(await sent.text(), String(body.length));
  const events = await fetch(`https://${site}/events`, { dispatcher });
  const { value } = await events.body.getReader().read();
  assert.equal(new TextDecoder().decode(value), "data: first\n\n");
});

test("a WebSocket", async () => {
  const socket = new WebSocket(`wss://${site}/socket`, { lookup });
  await new Promise((resolve, reject) => socket.on("open", resolve).on("error", reject));
  for (const text of ["one", "zwei", "três"]) {
    socket.send(text);
    const answer = await new Promise((resolve) => socket.once("message", resolve));
    assert.equal(answer.toString(), `echo: ${text}`);
  }
  socket.close();
});

test("the URL that Stead gives for a port leads to it", async () => {
  const response = await freestyle.fetch(`/v1/vms/${vm.vmId}/urls/3000`, { method: "PUT" });
  const { url } = await response.json();
  assert.equal(url, `https://${site}`);
  assert.equal((await fetch(url, { dispatcher })).status, 200);
});
