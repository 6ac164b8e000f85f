import { steadSandbox } from "./stead-sandbox.ts";

export default () => steadSandbox();
