// Random output, compared for as long as asked: node screen-fuzz.mjs EMULATOR SECONDS [SEED]
import { randomCase, resizedCase } from "./screen-cases.mjs";
import { compare, Emulator } from "./screen-oracle.mjs";

const [program, seconds, first = Date.now() % 1e9] = process.argv.slice(2);
const emulator = new Emulator(program);
const end = Date.now() + Number(seconds) * 1000;
let cases = 0;
let bytes = 0;
let disagreements = 0;
let previous;
for (let seed = Number(first); Date.now() < end && disagreements < 10; seed++) {
  const random = seed % 10 ? randomCase(seed) : resizedCase(seed);
  const result = await compare(emulator, { ...random, dirty: previous });
  previous = random.before;
  cases++;
  bytes += random.before?.length ?? 0;
  if (result) {
    disagreements++;
    console.log(`${random.name}: ${result}`);
  }
}
emulator.close();
console.log(`${cases} cases, ${bytes} bytes, ${disagreements} disagreements, seeds from ${first}`);
process.exit(disagreements ? 1 : 0);
