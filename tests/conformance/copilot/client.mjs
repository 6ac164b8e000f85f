// Asks a Copilot server at a private address to run a command; prints what it says.
import { approveAll, CopilotClient, RuntimeConnection } from "@github/copilot-sdk";

const connectionToken = process.env.COPILOT_CONNECTION_TOKEN;
const connection = RuntimeConnection.forUri("192.168.10.10:4321", { connectionToken });
const client = new CopilotClient({ connection });
await client.start();
const reject = () => ({ kind: "reject" });
const session = await client.createSession({ onPermissionRequest: process.env.REJECT ? reject : approveAll });
session.on("assistant.message", ({ data }) => console.log(data.content));
const idle = new Promise((resolve) => session.on("session.idle", resolve));
await session.send({ prompt: "Run `cat /etc/machine-id` with the shell tool and reply with its output." });
await idle;
await session.disconnect();
await client.stop();
