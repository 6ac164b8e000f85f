// VPCs: the package has create only; the answer of the server has more.
import assert from "node:assert/strict";
import test from "node:test";
import { freestyle } from "./client.mjs";

const options = { timeout: 120_000 };

async function call(method, path) {
  const response = await freestyle.fetch(path, { method });
  return { status: response.status, body: await response.json() };
}

test("vpc.create returns the id and a handle", options, async () => {
  const made = await freestyle.vpc.create({ name: "workspace-network", cidr: "192.168.10.0/24" });
  assert.match(made.vpcId, /^vpc-[a-z0-9]{20}$/);
  assert.equal(made.vpc.vpcId, made.vpcId);
  assert.equal(made.cidr, "192.168.10.0/24");
  const { body } = await call("GET", `/v1/vpcs/${made.vpcId}`);
  assert.deepEqual([body.name, body.cidr, body.vms], ["workspace-network", "192.168.10.0/24", []]);
  assert.equal((await call("DELETE", `/v1/vpcs/${made.vpcId}`)).status, 200);
  assert.equal((await call("GET", `/v1/vpcs/${made.vpcId}`)).status, 404);
});

test("vpc.create without arguments has the default range", options, async () => {
  const { vpcId } = await freestyle.vpc.create();
  const { body } = await call("GET", "/v1/vpcs");
  assert.ok(body.vpcs.some((each) => each.vpcId === vpcId && each.cidr === "10.0.0.0/16"));
  await call("DELETE", `/v1/vpcs/${vpcId}`);
});

test("vpc.create shows why a range is refused", options, async () => {
  await assert.rejects(
    () => freestyle.vpc.create({ cidr: "8.8.8.0/24" }),
    /Failed to create VPC: 400 .*"code":"BAD_REQUEST".*not private/,
  );
});

test("VMs attached to a VPC reach each other by private address", { timeout: 240_000 }, async () => {
  const { vpcId } = await freestyle.vpc.create({ name: "workspace-network", cidr: "192.168.10.0/24" });
  const nic = (ipv4) => ({ nics: [{ default: true, vpc: vpcId, mode: "routed", ipv4 }] });
  const { vm: apiVm } = await freestyle.vms.create(nic("192.168.10.10"));
  const { vm: workerVm, vmId: worker } = await freestyle.vms.create(nic("192.168.10.11"));
  const result = await apiVm.exec("ping -c 3 192.168.10.11");
  assert.match(result.stdout, / 0% packet loss/);
  const python = (await workerVm.exec("command -v python3")).stdout.trim();
  await workerVm.fs.writeTextFile(
    "/etc/systemd/system/http.service",
    `[Service]
ExecStart=${python} -m http.server 8080 --bind 0.0.0.0
Restart=always
[Install]
WantedBy=multi-user.target`,
  );
  await workerVm.exec("systemctl daemon-reload && systemctl enable --now http");
  const response = await apiVm.exec("curl -sS --retry 9 --retry-connrefused http://192.168.10.11:8080");
  assert.match(response.stdout, /Directory listing/);

  const key = "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=";
  const wanted = { gatewayVmId: worker, clientPublicKey: key };
  const peer = await freestyle.vpc.configureWireGuardPeer(vpcId, wanted);
  assert.deepEqual(
    [peer.vpcId, peer.gatewayVmId, peer.vpcCidr, peer.clientTunnelIp],
    [vpcId, worker, "192.168.10.0/24", "100.96.0.2"],
  );
  assert.match(peer.clientConfig, new RegExp(`Endpoint = ${peer.endpointHost}:${peer.endpointPort}\n`));
  await assert.rejects(
    () => freestyle.vpc.configureWireGuardPeer(vpcId, { ...wanted, clientPublicKey: "x" }),
    /400 .*"code":"BAD_REQUEST".*invalid public key/,
  );

  const taken = await freestyle.vms.create(nic("192.168.10.11")).then(assert.fail, (error) => error);
  assert.deepEqual([taken.constructor.name, taken.constructor.statusCode], ["ConflictError", 409]);
  const outside = await freestyle.vms.create(nic("10.0.0.1")).then(assert.fail, (error) => error);
  assert.equal(outside.constructor.statusCode, 400);
  const fork = await workerVm.fork().then(assert.fail, (error) => error);
  assert.equal(fork.constructor.name, "VpcForkUnsupportedError");
  const refused = await call("DELETE", `/v1/vpcs/${vpcId}`);
  assert.equal(refused.status, 409);
  assert.ok(refused.body.message.includes(worker), refused.body.message);
  await apiVm.delete();
  await workerVm.delete();
  assert.equal((await call("DELETE", `/v1/vpcs/${vpcId}`)).status, 200);
});

test("vpc.wireguard.createEphemeral returns a file for wg-quick until it is closed", options, async () => {
  const { vpcId, vpc } = await freestyle.vpc.create({ cidr: "192.168.10.0/24" });
  const connection = await vpc.wireguard.createEphemeral();
  assert.match(connection.clientConfig, /AllowedIPs = 192\.168\.10\.0\/24/);
  assert.ok(connection.clientConfig.includes(`PrivateKey = ${connection.clientPrivateKey}`));
  assert.equal(connection.vpcId, vpcId);
  assert.ok(`wg-${connection.sessionId}`.length <= 15, "wg-quick refuses longer names");
  await connection.close();
  await assert.rejects(() => connection.close(), /404/);
  await call("DELETE", `/v1/vpcs/${vpcId}`);
});
