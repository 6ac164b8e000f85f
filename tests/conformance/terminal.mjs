// What scripts about terminals share: output that can be waited for, a network that fails, bare upgrades.
import assert from "node:assert/strict";
import http from "node:http";
import net from "node:net";
import { until } from "./client.mjs";

/** Listeners for `vm.pty.open` and `vm.pty.attach`, which remember everything that happened. */
export function record(more = {}) {
  const decoder = new TextDecoder();
  const seen = {
    text: "",
    frames: [],
    exits: [],
    closes: [],
    retries: [],
    reconnects: 0,
    onData(bytes) {
      seen.frames.push(bytes);
      seen.text += decoder.decode(bytes, { stream: true });
    },
    onExit: (code) => seen.exits.push(code),
    onClose: (info) => seen.closes.push(info),
    onReconnecting: (attempt, max) => seen.retries.push([attempt, max]),
    onReconnect: () => (seen.reconnects += 1),
    ...more,
  };
  return seen;
}

/** Wait until the output has the text, and forget everything up to its end. */
export async function shown(seen, text, seconds = 60) {
  const found = () => (text instanceof RegExp ? text.exec(seen.text) : find(seen.text, text));
  try {
    await until(found, seconds);
  } catch {
    assert.fail(`no ${text} in ${JSON.stringify(seen.text.slice(-2000))}`);
  }
  const { index, 0: match } = found();
  seen.text = seen.text.slice(index + match.length);
  return match;
}

function find(whole, part) {
  const index = whole.indexOf(part);
  return index < 0 ? null : { index, 0: part };
}

/** Type a line into a shell, and wait for what it prints; the line itself must not contain that. */
export async function ask(session, seen, line, answer) {
  assert.ok(!(answer instanceof RegExp ? answer.test(line) : line.includes(answer)), `${line} has ${answer}`);
  session.write(`${line}\n`);
  return shown(seen, answer);
}

/** A proxy in front of the API whose connections can be cut, and which can refuse new ones. */
export async function proxy() {
  const target = new URL(process.env.FREESTYLE_API_URL);
  const open = new Set();
  const server = net.createServer((client) => {
    const upstream = net.connect(Number(target.port), target.hostname);
    for (const [from, to] of [
      [client, upstream],
      [upstream, client],
    ]) {
      open.add(from);
      from.on("error", () => to.destroy());
      from.on("close", () => (open.delete(from), to.destroy()));
      from.pipe(to);
    }
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return {
    url: `http://127.0.0.1:${server.address().port}`,
    cut() {
      for (const socket of open) socket.resetAndDestroy();
    },
    close: () => new Promise((resolve) => server.close(resolve)),
  };
}

/** The answer to a WebSocket upgrade that is refused: its status and its JSON. */
export function upgrade(path, headers = {}) {
  const { promise, resolve, reject } = Promise.withResolvers();
  const request = http.request(new URL(path, process.env.FREESTYLE_API_URL), {
    headers: {
      Authorization: `Bearer ${process.env.FREESTYLE_API_KEY}`,
      Connection: "Upgrade",
      Upgrade: "websocket",
      "Sec-WebSocket-Version": "13",
      "Sec-WebSocket-Key": Buffer.alloc(16).toString("base64"),
      ...headers,
    },
  });
  request.on("upgrade", (_, socket) => (socket.destroy(), resolve({ status: 101 })));
  request.on("response", async (response) => {
    const chunks = await response.toArray();
    resolve({
      status: response.statusCode,
      headers: response.headers,
      body: JSON.parse(Buffer.concat(chunks).toString()),
    });
  });
  request.on("error", reject);
  request.end();
  return promise;
}
