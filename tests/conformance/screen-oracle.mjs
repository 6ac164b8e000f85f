// xterm.js as the judge of the terminal emulator in the guest agent.
import { spawn } from "node:child_process";
import { createInterface } from "node:readline";
import xterm from "@xterm/headless";

const HAS_EXTENDED = 0x10000000;
const COLOUR = { set: 1, restore: 2 };
const hexadecimal = (parts) => parts.map((part) => part.toString(16).padStart(2, "0")).join("");

/** The emulator, as a process that answers cases with what its screen holds (see guest/screen/dump_test.go). */
export class Emulator {
  constructor(program) {
    this.process = spawn(program, [], { env: { ...process.env, STEAD_SCREEN_DUMP: "1" }, stdio: ["pipe", "pipe", "inherit"] });
    this.answers = createInterface({ input: this.process.stdout })[Symbol.asyncIterator]();
  }

  async run({ cols, rows, scrollback, steps }) {
    const encoded = steps.map(({ write, resize }) => (resize ? { resize } : { write: write.toString("base64") }));
    this.process.stdin.write(JSON.stringify({ cols, rows, scrollback, steps: encoded }) + "\n");
    const { value, done } = await this.answers.next();
    if (done) throw new Error("the emulator has died");
    const answer = JSON.parse(value);
    if (answer.error) throw new Error(answer.error);
    return answer;
  }

  close() {
    this.process.stdin.end();
  }
}

/** xterm.js, fed with the same bytes. */
export class Oracle {
  constructor({ cols, rows, scrollback }) {
    const windowOptions = { pushTitle: true, popTitle: true };
    this.terminal = new xterm.Terminal({ cols, rows, scrollback, allowProposedApi: true, logLevel: "off", windowOptions });
    this.title = "";
    this.replies = "";
    this.links = new Map(); // xterm.js forgets links once a line that they were on is erased
    const { _oscLinkService: service } = this.terminal._core;
    const register = service.registerLink.bind(service);
    service.registerLink = (link) => {
      const id = register(link);
      this.links.set(id, link.uri);
      return id;
    };
    this.terminal.onTitleChange((title) => (this.title = title));
    this.colours = new Map(); // of the program; the headless terminal has no theme that they would change
    this.terminal._core._inputHandler.onColor((requests) => requests.forEach((request) => this.recolour(request)));
    this.terminal.onData((data) => (this.replies += data));
  }

  write(bytes) {
    return new Promise((resolve) => this.terminal.write(bytes, resolve));
  }

  /** Sets or restores a colour: 0 to 255 of the palette, then foreground, background and cursor; without a number all of the palette. */
  recolour({ type, index, color }) {
    if (type === COLOUR.set) this.colours.set(index, color);
    if (type === COLOUR.restore)
      for (const number of [...this.colours.keys()]) if (number === index || (index === undefined && number < 256)) this.colours.delete(number);
  }

  resize(cols, rows) {
    this.terminal.resize(cols, rows);
  }

  dispose() {
    this.terminal.dispose();
  }

  /** The state, in the form of the emulator's. */
  state() {
    const core = this.terminal._core;
    const { buffers } = core._bufferService;
    const { decPrivateModes: dec, modes } = core.coreService;
    const style = { block: 2, underline: 4, bar: 6 }[dec.cursorStyle];
    return {
      alternate: buffers.active === buffers.alt,
      main: this.buffer(buffers.normal),
      alt: this.buffer(buffers.alt),
      cursor: [buffers.active.x, buffers.active.y],
      title: this.title,
      palette: [...this.colours].sort(([a], [b]) => a - b).map(([number, parts]) => `${number} #${hexadecimal(parts)}`),
      replies: this.replies,
      modes: {
        insert: modes.insertMode,
        newLine: this.terminal.options.convertEol,
        cursorKeys: dec.applicationCursorKeys,
        keypad: dec.applicationKeypad,
        origin: dec.origin,
        wrap: dec.wraparound,
        reverseWrap: dec.reverseWraparound,
        blink: this.terminal.options.cursorBlink,
        bracketedPaste: dec.bracketedPasteMode,
        focus: dec.sendFocus,
        synchronized: dec.synchronizedOutput,
        hidden: core.coreService.isCursorHidden,
        cursorStyle: style ? style - (dec.cursorBlink ? 1 : 0) : 0,
        mouse: { NONE: 0, X10: 9, VT200: 1000, DRAG: 1002, ANY: 1003 }[core.coreMouseService.activeProtocol],
        mouseEncoding: { DEFAULT: 0, SGR: 1006, SGR_PIXELS: 1016 }[core.coreMouseService.activeEncoding],
      },
    };
  }

  buffer(buffer) {
    const { cols, rows } = this.terminal;
    const lines = [];
    for (let y = 0; y < buffer.lines.length; y++) lines.push(this.line(buffer.lines.get(y), cols));
    const tabs = Object.keys(buffer.tabs).filter((x) => buffer.tabs[x] && x < cols);
    return {
      lines,
      base: buffer.ybase,
      region: [buffer.scrollTop, buffer.scrollBottom],
      tabs: tabs.map(Number),
      saved: [Math.min(buffer.savedX, cols - 1), Math.max(0, Math.min(buffer.savedY - buffer.ybase, rows - 1))],
    };
  }

  line(line, cols) {
    const cells = [];
    for (let x = 0; x < Math.min(cols, line.length); x++) {
      const fg = colour(line.getFg(x));
      const bg = line.getBg(x);
      const extended = bg & HAS_EXTENDED ? line._extendedAttrs[x] : undefined;
      const underline = (fg & 0x10000000) !== 0 ? underlineOf(extended) : 0;
      const link = this.links.get(extended?._urlId) ?? "";
      cells.push([line.getString(x), line.getWidth(x), fg, colour(bg & ~HAS_EXTENDED), underline, link]);
    }
    while (cells.length && isBlank(cells.at(-1))) cells.pop();
    return { wrapped: line.isWrapped, cells };
  }
}

const isBlank = ([text, width, ...attributes]) => text === "" && width === 1 && attributes.every((a) => !a);

/** xterm.js keeps bits of an earlier colour that the mode of the colour does not use. */
function colour(value) {
  const mode = value & 0x3000000;
  const mask = { 0: 0, 0x1000000: 0xff, 0x2000000: 0xff, 0x3000000: 0xffffff }[mode];
  return ((value & 0xff000000) | (value & mask)) >>> 0;
}

function underlineOf(extended) {
  const ext = extended?._ext ?? 0;
  let line = ext & 0x3ffffff;
  if (line === 0x3ffffff) line = 0; // SGR 59 sets white instead of the default
  const style = (ext & 0x1c000000) >>> 26;
  return ((style || 1) * 0x4000000 + colour(line)) >>> 0;
}

/** A replay prints some blanks as spaces, and has nothing that the first line continues (see Replay of the Go package). */
export function asReplayed(state, cols) {
  const copy = structuredClone(state);
  const shown = copy.alternate ? copy.alt : copy.main;
  const [x, y] = copy.cursor;
  if (x === cols) {
    const { cells } = shown.lines[shown.base + y];
    while (cells.length < cols) cells.push(["", 1, 0, 0, 0, ""]);
    cells[cols - 1][0] ||= " ";
  }
  for (const { lines } of [copy.main, copy.alt]) {
    for (const { cells } of lines)
      for (const cell of cells)
        if (cell[0] === "" && cell[1] === 1 && (cell[2] || cell[3] & ~0x3ffffff || cell[4] || cell[5])) cell[0] = " ";
    if (lines.length) lines[0].wrapped = false;
  }
  return copy;
}

/** Where two states differ first, or "". */
export function difference(ours, theirs, names = ["ours", "xterm.js"]) {
  for (const part of ["alternate", "cursor", "title", "palette", "replies"])
    if (part in ours && part in theirs && String(ours[part]) !== String(theirs[part]))
      return `${part}: ${names[0]} ${JSON.stringify(ours[part])}, ${names[1]} ${JSON.stringify(theirs[part])}`;
  for (const mode in ours.modes)
    if (ours.modes[mode] !== theirs.modes[mode]) return `mode ${mode}: ${names[0]} ${ours.modes[mode]}, ${names[1]} ${theirs.modes[mode]}`;
  for (const name of ours.alternate ? ["main", "alt"] : ["main"]) {
    const [a, b] = [ours[name], theirs[name]];
    for (const part of ["base", "region", "tabs", "saved"])
      if (String(a[part]) !== String(b[part])) return `${name} ${part}: ${names[0]} ${a[part]}, ${names[1]} ${b[part]}`;
    if (a.lines.length !== b.lines.length) return `${name}: ${names[0]} ${a.lines.length} lines, ${names[1]} ${b.lines.length}`;
    for (let y = 0; y < a.lines.length; y++) {
      if (a.lines[y].wrapped !== b.lines[y].wrapped) return `${name} line ${y}: ${names[0]} wrapped ${a.lines[y].wrapped}`;
      for (let x = 0; x < Math.max(a.lines[y].cells.length, b.lines[y].cells.length); x++) {
        const [c, d] = [a.lines[y].cells[x], b.lines[y].cells[x]].map((cell) => JSON.stringify(cell ?? ["", 1, 0, 0, 0, ""]));
        if (c !== d) return `${name} line ${y} column ${x}: ${names[0]} ${c}, ${names[1]} ${d}`;
      }
    }
  }
  return "";
}

/**
 * Output that a terminal may have shown before a replay. No sequence empties the stack of titles, so nothing is left on
 * it; the replay of a program that changed no colours leaves those that there are.
 */
function usedBefore(output, coloured) {
  const kept = output.toString("latin1").replaceAll(/\x1b\[22;.t/g, "");
  return Buffer.from(coloured ? kept : kept.replaceAll(/\x1b\](4|1[0-2]);[^\x07\x1b]*/g, ""), "latin1");
}

/** Compares a case: screen, replay, and what the same output makes of both afterwards. */
export async function compare(emulator, { cols, rows, scrollback, steps, before, after = Buffer.of(), dirty }) {
  const size = { cols, rows, scrollback };
  steps ??= [{ write: before }];
  const oracle = new Oracle(size);
  const replayed = new Oracle(size);
  try {
    for (const { write, resize } of steps) resize ? oracle.resize(...resize) : await oracle.write(write);
    const ours = await emulator.run({ ...size, steps });
    const theirs = oracle.state();
    const different = difference(ours, theirs);
    if (different) return `screen: ${different}`;
    replayed.resize(oracle.terminal.cols, oracle.terminal.rows);
    if (dirty) await replayed.write(usedBefore(dirty, ours.coloured));
    replayed.replies = "";
    await replayed.write(Buffer.from(ours.replay, "base64"));
    const { replies, ...expected } = asReplayed(theirs, oracle.terminal.cols);
    const drawn = asReplayed(replayed.state(), oracle.terminal.cols);
    const wrong = difference(drawn, expected, ["replayed", "original"]);
    if (wrong) return `replay: ${wrong}`;
    if (after.length) {
      await oracle.write(after);
      await replayed.write(after);
      const later = difference(asReplayed(replayed.state(), oracle.terminal.cols), { ...asReplayed(oracle.state(), oracle.terminal.cols), replies: undefined }, ["replayed", "original"]);
      if (later && !later.startsWith("replies")) return `after the replay: ${later}`;
    }
    return "";
  } finally {
    oracle.dispose();
    replayed.dispose();
  }
}
