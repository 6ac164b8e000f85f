// One create; its VM's id is printed.
import { freestyle } from "freestyle";

const { vmId } = await freestyle.vms.create({ name: process.env.NAME });
console.log(vmId);
