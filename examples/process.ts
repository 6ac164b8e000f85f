// A command in a VM with pipes, over one WebSocket: background processes of Stead. The npm package has terminals,
// which merge standard output and standard error, and whose input has no end.

const URL_OF_API = (process.env.FREESTYLE_API_URL ?? "http://127.0.0.1:8600").replace(/\/$/, "");
const AUTHORIZATION = { Authorization: `Bearer ${process.env.FREESTYLE_API_KEY}` };

export type ProcessOptions = {
  cwd?: string;
  env?: Record<string, string>;
  timeoutMs?: number;
  onStdout?: (bytes: Uint8Array) => void;
  onStderr?: (bytes: Uint8Array) => void;
  /** Called when output is lost: more than 1 MiB was printed before this program was attached. Default: an error. */
  onLost?: (bytes: number) => void;
};

type Message = Partial<Ended> & { type: string; from?: number; to?: number };

export type Ended = {
  /** 128 plus the number of the signal that ended it. */
  exitCode: number;
  timedOut: boolean;
};

export type VmProcess = {
  id: string;
  exited: Promise<Ended>;
  write(bytes: Uint8Array | string): void;
  closeStdin(): void;
  signal(name: string): void;
};

/** Start a command and attach to it. What it printed before is not lost, up to 1 MiB. */
export async function startProcess(
  vmId: string,
  command: string | string[],
  { cwd, env, timeoutMs, onStdout, onStderr, onLost }: ProcessOptions = {},
): Promise<VmProcess> {
  const started = await fetch(`${URL_OF_API}/v1/vms/${vmId}/processes`, {
    method: "POST",
    headers: { ...AUTHORIZATION, "Content-Type": "application/json" },
    body: JSON.stringify({ command, cwd, env, timeoutMs, stdin: true }),
  });
  if (!started.ok) throw new Error(`cannot start a process: ${await started.text()}`);
  const { id } = (await started.json()) as { id: string };
  const socket = attach(vmId, id);

  let ended: Ended | undefined;
  const exited = new Promise<Ended>((resolve, reject) => {
    socket.addEventListener("message", ({ data }) => {
      if (typeof data === "string") {
        const { type, exitCode, timedOut, from = 0, to = 0 } = JSON.parse(data) as Message;
        if (type === "exited") resolve((ended = { exitCode: exitCode ?? -1, timedOut: timedOut ?? false }));
        if (type !== "cut") return;
        if (onLost) return onLost(to - from);
        reject(new Error(`${to - from} bytes of output of process ${id} are lost`));
        socket.close();
        return;
      }
      const bytes = new Uint8Array(data as ArrayBuffer);
      (bytes[0] === 2 ? onStderr : onStdout)?.(bytes.subarray(1));
    });
    socket.addEventListener("close", ({ reason }) => {
      if (ended === undefined) reject(new Error(`the connection to process ${id} ended: ${reason}`));
    });
  });
  exited.catch(() => {}); // the caller that awaits it sees the error
  await new Promise<void>((resolve, reject) => {
    socket.addEventListener("open", () => resolve());
    exited.catch(reject);
  });

  const send = (message: Uint8Array | string) => {
    if (ended === undefined && socket.readyState === WebSocket.OPEN) socket.send(message);
  };
  return {
    id,
    exited,
    write: (bytes) => send(typeof bytes === "string" ? new TextEncoder().encode(bytes) : bytes),
    closeStdin: () => send(JSON.stringify({ type: "closeStdin" })),
    signal: (name) => send(JSON.stringify({ type: "signal", signal: name })),
  };
}

function attach(vmId: string, id: string): WebSocket {
  const url = `${URL_OF_API.replace(/^http/, "ws")}/v1/vms/${vmId}/processes/${id}/attach?offset=0`;
  // The second argument with headers is an extension of Node.js and Bun.
  const socket = new WebSocket(url, { headers: AUTHORIZATION } as unknown as string[]);
  socket.binaryType = "arraybuffer";
  return socket;
}
