import { SteadSandbox, type SteadSandboxOptions } from "./stead-sandbox.ts";

export default (options?: SteadSandboxOptions) => new SteadSandbox(options);
