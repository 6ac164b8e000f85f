// The class of the guide, which the test has written beside this file.
import { FreestyleSandbox } from "./freestyle-sandbox.ts";

export default (options?: any) => new FreestyleSandbox(options?.create);
