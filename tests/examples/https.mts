// HTTPS requests to preview names, which the tests serve on a port of this host.
import { request } from "node:https";

export function get(url: string): Promise<{ status: number; body: string }> {
  const { hostname, pathname } = new URL(url);
  const to = {
    host: "127.0.0.1",
    port: Number(process.env.HTTPS_PORT),
    servername: hostname,
    path: pathname,
    headers: { host: hostname },
    agent: false as const,
  };
  return new Promise((resolve, reject) => {
    const sent = request(to, (answer) => {
      let body = "";
      answer.setEncoding("utf8").on("data", (text) => (body += text));
      answer.on("end", () => resolve({ status: answer.statusCode ?? 0, body })).on("error", reject);
    });
    sent.on("error", reject).end();
  });
}
