// A web server for a VM, without packages: a page, its headers, events, uploads and a WebSocket that echoes.
import { createHash } from "node:crypto";
import http from "node:http";

const MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"; // RFC 6455

const PAGE = `<!doctype html>
<meta charset="utf-8">
<title>Served in a VM</title>
<style>
  body { font: 18px sans-serif; margin: 3em; background: #f4f7fb; color: #123 }
  h1 { color: #2058a8 }
  td { padding: 0.2em 1em 0.2em 0 }
</style>
<h1>Served in a VM</h1>
<table>
  <tr><td>fetch<td id="fetch">
  <tr><td>WebSocket<td id="socket">
  <tr><td>events<td id="events">
  <tr><td>secure context<td id="secure">
</table>
<script>
  const show = (id, text) => { document.getElementById(id).textContent = text };
  show("secure", window.isSecureContext);
  fetch("/headers").then((answer) => answer.json()).then(({ host }) => show("fetch", host));
  const socket = new WebSocket("wss://" + location.host + "/socket");
  socket.onopen = () => socket.send("from the page");
  socket.onmessage = ({ data }) => show("socket", data);
  new EventSource("/events").onmessage = ({ data }) => show("events", data);
</script>
`;

const server = http.createServer(async (request, response) => {
  if (request.url === "/headers") return response.end(JSON.stringify(request.headers));
  if (request.url === "/events") {
    response.writeHead(200, { "Content-Type": "text/event-stream" });
    return response.write("data: first\n\n"); // and stays open
  }
  let length = 0;
  for await (const piece of request) length += piece.length;
  if (request.method === "POST") return response.end(String(length));
  response.writeHead(200, { "Content-Type": "text/html" }).end(PAGE);
});

/** Echoes messages of less than 126 bytes. */
server.on("upgrade", (request, socket) => {
  const accept = createHash("sha1").update(request.headers["sec-websocket-key"] + MAGIC).digest("base64");
  socket.write(
    `HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: ${accept}\r\n\r\n`,
  );
  let buffer = Buffer.alloc(0);
  socket.on("error", () => socket.destroy());
  socket.on("data", (data) => {
    buffer = Buffer.concat([buffer, data]);
    while (buffer.length > 6 && buffer.length >= 6 + (buffer[1] & 0x7f)) {
      const length = buffer[1] & 0x7f;
      const payload = buffer.subarray(6, 6 + length).map((byte, at) => byte ^ buffer[2 + (at % 4)]);
      if ((buffer[0] & 0x0f) === 8) return socket.end(Buffer.from([0x88, 0]));
      const answer = Buffer.concat([Buffer.from("echo: "), payload]);
      socket.write(Buffer.concat([Buffer.from([0x81, answer.length]), answer]));
      buffer = buffer.subarray(6 + length);
    }
  });
});

server.listen(3000, "0.0.0.0");
