// A laptop joins a VPC: everything by the package, the tunnel by wg-quick, until Ctrl-C.
import { spawnSync } from "node:child_process";
import { once } from "node:events";
import { rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { freestyle } from "freestyle";

const { vpcId, vpc } = await freestyle.vpc.create({ name: "workspace-network", cidr: "192.168.10.0/24" });
const nic = { default: true, vpc: vpcId, mode: "routed", ipv4: "192.168.10.10" };
const { vmId } = await freestyle.vms.create({ nics: [nic] });
const connection = await vpc.wireguard.createEphemeral();
const file = join(tmpdir(), `wg-${connection.sessionId}.conf`);
await writeFile(file, connection.clientConfig, { mode: 0o600 });
const wgQuick = (action) => spawnSync("sudo", ["wg-quick", action, file], { stdio: "inherit" }).status;
if (wgQuick("up") !== 0) throw new Error("wg-quick up failed");

console.log(`VM ${vmId} in VPC ${vpcId}`);
console.log("Ctrl-C disconnects.");
await once(process, "SIGINT");
wgQuick("down");
await connection.close();
await rm(file);
process.exit(130);
