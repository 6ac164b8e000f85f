// The Claude Agent SDK drives a CLI inside a VM, over a terminal that is made to carry plain bytes.
import assert from "node:assert/strict";
import { EventEmitter } from "node:events";
import { readFile } from "node:fs/promises";
import { PassThrough, Writable } from "node:stream";
import test from "node:test";
import { query } from "@anthropic-ai/claude-agent-sdk";
import { output, shared as vm, until } from "./client.mjs";
import { record, shown } from "./terminal.mjs";

const options = { timeout: 180_000 };
const program = "/root/.local/bin/claude";
/** Ctrl-^: typed as a part of the command line, and printed by it right before the CLI's first byte. */
const START = 0x1e;

const quoted = (word) => `'${word.replaceAll("'", `'\\''`)}'`;

/** `spawnClaudeCodeProcess` for a VM: the login shell of a terminal runs the CLI between two pipes. */
function spawning(vm, sessions) {
  return ({ command, args, cwd, env, signal }) => {
    const events = new EventEmitter();
    const stdout = new PassThrough();
    const early = [];
    let session, started, code = null, killed = false, head = Buffer.alloc(0);

    const handed = Object.entries(env).filter(([name]) => /^(ANTHROPIC_API_KEY|CLAUDE\w*)$/.test(name));
    const line = [
      "stty raw -echo -onlcr",
      `export HOME=/root PATH=/root/.local/bin:/usr/local/bin:/usr/bin:/bin`,
      ...handed.map(([name, value]) => `export ${name}=${quoted(value)}`),
      `cd ${quoted(cwd ?? "/root")}`,
      `printf ${quoted(String.fromCharCode(START))}`,
      `cat | ${[command, ...args].map(quoted).join(" ")} | cat`,
    ].join("; ");

    function onData(bytes) {
      if (started) return void stdout.write(bytes);
      head = Buffer.concat([head, bytes]);
      const at = head.indexOf(START);
      if (at < 0) return;
      started = true;
      stdout.write(head.subarray(at + 1));
    }
    function onExit(status) {
      code = status;
      stdout.end();
      events.emit("exit", killed ? 0 : status, null);
    }
    function kill() {
      killed = true;
      session?.signal("SIGKILL");
      return true;
    }

    vm.pty
      .open({ onData, onExit, onError: (error) => events.emit("error", error) })
      .then((opened) => {
        session = opened;
        sessions.push(opened.sessionId);
        session.write(`${line}\n`);
        for (const chunk of early) session.write(chunk);
      })
      .catch((error) => events.emit("error", error));
    signal.addEventListener("abort", kill);

    const stdin = new Writable({
      write(chunk, _, done) {
        if (session) session.write(chunk);
        else early.push(Buffer.from(chunk));
        done();
      },
    });
    return {
      stdin,
      stdout,
      kill,
      get killed() {
        return killed;
      },
      get exitCode() {
        return code;
      },
      on: (...listener) => events.on(...listener),
      once: (...listener) => events.once(...listener),
      off: (...listener) => events.off(...listener),
    };
  };
}

test.before(async () => {
  await vm.fs.writeTextFile(program, await readFile(new URL("claude_cli.py", import.meta.url), "utf8"));
  await output(vm, `chmod +x ${program}`);
});
test.after(() => vm.exec(`rm ${program}`));

test("Ctrl-^ typed into the login shell is a byte like any other", options, async () => {
  const seen = record();
  const session = await vm.pty.open({ ...seen });
  session.write("printf '\x1e' | od -An -tx1; echo end-$((1 + 1))\n");
  assert.match(await shown(seen, /(.*\r\n)+?end-2/), / 1e\r\n/);
  await vm.pty.close({ sessionId: session.sessionId });
});

test("on a terminal the CLI would be interactive; between pipes it answers the SDK", options, async () => {
  const prompt = `what is here? ${"é漢🙂".repeat(20_000)} that is all`;
  const [sessions, tools, types] = [[], [], []];
  const answers = query({
    prompt,
    options: {
      spawnClaudeCodeProcess: spawning(vm, sessions),
      pathToClaudeCodeExecutable: program,
      env: { HOME: "/root", ANTHROPIC_API_KEY: "it's a key" },
      canUseTool: async (name, input) => {
        tools.push([name, input]);
        return { behavior: "allow", updatedInput: input };
      },
    },
  });
  let result;
  for await (const message of answers) {
    types.push(message.type);
    if (message.type === "result") {
      result = JSON.parse(message.result);
      break; // standard input cannot be closed through a terminal: leaving the loop kills the CLI
    }
  }
  assert.deepEqual(types, ["system", "assistant", "result"]);
  assert.deepEqual(tools, [["Bash", { command: "hostname" }]]);
  const { long, ...others } = result;
  assert.deepEqual(others, {
    length: Array.from(prompt).length,
    start: Array.from(prompt).slice(0, 40).join(""),
    end: Array.from(prompt).slice(-40).join(""),
    host: vm.vmId,
    key: "it's a key",
    folder: "/root",
  });
  assert.equal(long, "漢é🙂x".repeat(50_000));

  const [sessionId] = sessions;
  await until(async () => {
    const row = (await vm.pty.list()).sessions.find((each) => each.sessionId === sessionId);
    return row.exitCode === 137;
  });
  await until(async () => (await vm.exec(`pgrep -f ${program.replace("claude", "[c]laude")}`)).statusCode === 1);
  await vm.pty.close({ sessionId });
});
