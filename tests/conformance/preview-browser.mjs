// A page of a VM in Chromium, over HTTPS at its preview name.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import path from "node:path";
import test from "node:test";
import { chromium } from "playwright-core";
import { freestyle, output, shared as vm } from "./client.mjs";

const options = { timeout: 300_000 };
const picture = (name) => path.join(process.env.PICTURES, `${name}.png`);
let browser, url;

/** A browser whose user has this home folder, and with it the CAs that the user trusts. */
const launch = (home) =>
  chromium.launch({
    executablePath: process.env.CHROMIUM,
    args: ["--no-sandbox"],
    env: { ...process.env, HOME: home },
  });

test.before(async () => {
  await vm.fs.writeTextFile("/srv/preview-server.mjs", await readFile("preview-server.mjs", "utf8"));
  const response = await freestyle.fetch(`/v1/vms/${vm.vmId}/urls/3000`, { method: "PUT" });
  ({ url } = await response.json());
  browser = await launch(process.env.TRUSTING_HOME);
});
test.after(async () => {
  await browser?.close();
  await output(vm, "systemctl stop preview; rm /srv/preview-server.mjs");
  await freestyle.domains.mappings.delete({ domain: new URL(url).hostname });
});

test("a browser that does not trust the CA refuses the page", options, async () => {
  const other = await launch(process.env.HOME);
  const page = await other.newPage();
  await assert.rejects(page.goto(url), /ERR_CERT_AUTHORITY_INVALID/);
  await other.close();
});

test("a page whose server starts later shows up by itself", options, async () => {
  const page = await browser.newPage({ viewport: { width: 900, height: 500 } });
  const early = await page.goto(url);
  assert.equal(early.status(), 502);
  await page.screenshot({ path: picture("preview-waiting") });
  await output(vm, "systemd-run --quiet --unit=preview node /srv/preview-server.mjs");
  await page.waitForFunction(() => document.title === "Served in a VM", undefined, { timeout: 120_000 });
  await page.close();
});

test("a page with fetch, a WebSocket and events, over a valid chain", options, async () => {
  const page = await browser.newPage({ viewport: { width: 900, height: 500 } });
  const problems = [];
  page.on("pageerror", (error) => problems.push(error));
  page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
  const response = await page.goto(url);
  const { subjectName, issuer, protocol } = await response.securityDetails();
  console.log(url, subjectName, issuer, protocol);
  assert.equal(protocol, "TLS 1.3");
  await page.waitForFunction(() => [...document.querySelectorAll("td[id]")].every((each) => each.textContent.trim()));
  const shown = await page.evaluate(() =>
    Object.fromEntries([...document.querySelectorAll("td[id]")].map((each) => [each.id, each.textContent])),
  );
  assert.deepEqual(shown, {
    fetch: new URL(url).host,
    socket: "echo: from the page",
    events: "first",
    secure: "true",
  });
  const spoken = await page.evaluate(() => performance.getEntriesByType("navigation")[0].nextHopProtocol);
  assert.ok(["h2", "h3"].includes(spoken), spoken);
  assert.deepEqual(problems, []);
  await page.screenshot({ path: picture("preview") });
  await page.close();
});

test("a page of a suspended VM wakes it", options, async () => {
  await vm.suspend();
  const page = await browser.newPage();
  await page.goto(url, { timeout: 120_000 }); // if the wake is slow, a page that reloads by itself
  await page.waitForFunction(() => document.title === "Served in a VM", undefined, { timeout: 120_000 });
  await page.close();
});
