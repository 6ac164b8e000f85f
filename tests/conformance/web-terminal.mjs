// A VM's terminal in a browser: through a proxy of one's own, and straight from the API with a ticket.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import http from "node:http";
import path from "node:path";
import test from "node:test";
import { chromium } from "playwright-core";
import { WebSocketServer } from "ws";
import { freestyle, shared as vm, until } from "./client.mjs";

const options = { timeout: 180_000 };
const types = { ".css": "text/css", ".html": "text/html", ".mjs": "text/javascript" };
const picture = (name) => path.join(process.env.PICTURES, `${name}.png`);

let server, site, browser;

/** The page, and the packages that it imports. */
async function files(request, response) {
  const { pathname } = new URL(request.url, "http://localhost");
  const file = pathname === "/" ? "web-terminal.html" : path.join("node_modules", path.normalize(pathname));
  response.setHeader("Content-Type", types[path.extname(file)] ?? "application/octet-stream");
  response.end(await readFile(file).catch(() => ""));
}

/** A proxy that holds the API key: one terminal for each browser, and keys only if it is writable. */
async function proxy(writable) {
  const sockets = new WebSocketServer({ port: 0, host: "127.0.0.1" });
  await new Promise((resolve) => sockets.on("listening", resolve));
  sockets.on("connection", async (page) => {
    const early = [];
    let use = (...message) => early.push(message);
    page.on("message", (...message) => use(...message));
    const session = await vm.pty.open({
      onData: (bytes) => page.send(bytes),
      onExit: () => page.close(),
    });
    use = (data, binary) => {
      if (binary) return writable && session.write(new Uint8Array(data));
      const { type, cols, rows } = JSON.parse(data.toString());
      if (type === "resize") session.resize({ cols, rows });
    };
    for (const message of early) use(...message);
    page.on("close", () => session.detach());
  });
  return { url: `ws://127.0.0.1:${sockets.address().port}`, close: () => sockets.close() };
}

async function opened(socket, size = { width: 900, height: 600 }) {
  const page = await browser.newPage({ viewport: size });
  page.on("pageerror", (error) => assert.fail(error));
  await page.goto(`${site}/?socket=${encodeURIComponent(socket)}`);
  await page.waitForFunction(() => window.terminal !== undefined);
  return page;
}

/** Wait until a line of the screen or of its scrollback is this. */
async function line(page, text) {
  try {
    await page.waitForFunction((text) => window.lines().includes(text), text, { timeout: 60_000 });
  } catch {
    assert.fail(`no line ${text} in ${JSON.stringify(await page.evaluate(() => window.lines().slice(-50)))}`);
  }
}

const isBlank = (page) => page.evaluate(() => window.lines().join("") === "");

async function type(page, keys) {
  await page.locator(".xterm-helper-textarea").pressSequentially(keys);
  await page.keyboard.press("Enter");
}

test.before(async () => {
  server = http.createServer(files);
  await new Promise((resolve) => server.listen(Number(process.env.PORT), "127.0.0.1", resolve));
  site = `http://127.0.0.1:${server.address().port}`;
  browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox"] });
});
test.after(async () => {
  await browser?.close();
  server.close();
  for (const { sessionId } of (await vm.pty.list()).sessions) await vm.pty.close({ sessionId });
});

test("through a proxy: keys in, colours and wide characters out, sized to the window", options, async () => {
  const { url, close } = await proxy(true);
  const page = await opened(url);
  await type(page, "PS1='$ '; export TERM=xterm-256color; clear; echo typed-$((6 * 7))");
  await line(page, "typed-42");
  const [cols, rows] = await page.evaluate(() => [window.terminal.cols, window.terminal.rows]);
  assert.ok(cols > 80 && rows > 24, `${cols} x ${rows}`);
  await type(page, "echo size $(stty size)");
  await line(page, `size ${rows} ${cols}`);
  await type(page, "for c in 1 2 3 4 5 6; do printf '\\033[3%dmcolour\\033[0m ' $c; done; echo; ls --color /");
  await type(page, "printf '\\033[1;4mbold\\033[0m 漢字 é 🙂 \\u2500\\u2500\\u2510\\n'; python3 -c 'print(7 * 6)'");
  await line(page, "42");
  await line(page, "bold 漢字 é 🙂 ──┐");
  await page.setViewportSize({ width: 1100, height: 700 });
  await until(() => page.evaluate((before) => window.terminal.cols > before, cols));
  const wide = await page.evaluate(() => window.terminal.cols);
  await type(page, "echo now $(stty size | cut -d' ' -f2)");
  await line(page, `now ${wide}`);
  await page.screenshot({ path: picture("proxy") });
  await type(page, "exit");
  await page.waitForFunction(() => window.ended !== undefined);
  close();
});

test("a read-only proxy drops what is typed", options, async () => {
  const { url, close } = await proxy(false);
  const page = await opened(url);
  await page.waitForFunction(() => window.lines().some((each) => each.includes("# ")));
  await type(page, "touch /tmp/typed");
  const { sessionId } = (await vm.pty.list()).sessions.find(({ running }) => running);
  const session = await vm.pty.attach({ sessionId });
  session.write("echo owner-$((6 * 7))\n");
  await line(page, "owner-42");
  assert.equal(await vm.fs.exists("/tmp/typed"), false);
  await vm.pty.close({ sessionId });
  await page.waitForFunction(() => window.ended !== undefined);
  close();
});

/** The address of a terminal with a ticket, which works once. */
async function ticketed(sessionId) {
  const response = await freestyle.fetch(`/v1/vms/${vm.vmId}/tickets`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ kind: "pty", sessionId }),
  });
  assert.equal(response.status, 200, await response.clone().text());
  const { ticket } = await response.json();
  const api = process.env.FREESTYLE_API_URL.replace("http", "ws");
  return `${api}/v1/vms/${vm.vmId}/pty/sessions/${sessionId}?ticket=${ticket}`;
}

test("straight from the API: a page that reloads has its screen again", options, async () => {
  const opener = await vm.pty.open({ sessionId: "page" });
  const { sessionId } = opener;
  opener.detach(); // its window would be the smallest
  const first = await opened(await ticketed(sessionId));
  await type(first, "PS1='$ '; export TERM=xterm-256color; seq 2000; printf '\\033[7m%s\\033[0m\\n' rever''sed");
  await line(first, "reversed");
  await first.close();

  const address = await ticketed(sessionId);
  const page = await opened(address);
  await line(page, "reversed");
  const lines = await page.evaluate(() => window.lines());
  for (const number of ["1", "1000", "2000"]) assert.ok(lines.includes(number), number);
  await page.screenshot({ path: picture("replay") });

  const thief = await opened(address);
  await thief.waitForFunction(() => window.ended !== undefined);
  assert.ok(await isBlank(thief), "a ticket works once");

  await type(page, "nano /etc/hostname");
  await page.waitForFunction(() => window.terminal.buffer.active.type === "alternate");
  await page.waitForFunction((id) => window.lines().some((each) => each.startsWith(id)), vm.vmId);
  const editing = await opened(await ticketed(sessionId));
  await editing.waitForFunction((id) => window.lines().some((each) => each.startsWith(id)), vm.vmId);
  assert.equal(await editing.evaluate(() => window.terminal.buffer.active.type), "alternate");
  await editing.screenshot({ path: picture("editor") });
  await editing.locator(".xterm-helper-textarea").press("Control+X");
  await page.waitForFunction(() => window.terminal.buffer.active.type === "normal");
  await line(page, "reversed");
});

test("a page of another origin is refused, ticket or not", options, async () => {
  const address = await ticketed("page");
  const foreign = http.createServer(files);
  await new Promise((resolve) => foreign.listen(0, "127.0.0.1", resolve));
  const page = await browser.newPage();
  await page.goto(`http://127.0.0.1:${foreign.address().port}/?socket=${encodeURIComponent(address)}`);
  await page.waitForFunction(() => window.ended !== undefined);
  assert.ok(await isBlank(page));
  foreign.close();
});
