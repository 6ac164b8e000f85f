// One create; its VM's id is printed. With SLOW it has to be built first.
import { VmSpec, freestyle } from "freestyle";

const built = { spec: new VmSpec().runCommands("sleep 1").snapshot() };
const { vmId } = await freestyle.vms.create(process.env.SLOW ? built : {});
console.log(vmId);
