// Output of programs for the terminal emulator: random, from a grammar, repeatable by seed.

/** A generator of random numbers that gives the same ones for the same seed. */
export function random(seed) {
  let state = seed >>> 0;
  const next = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  const below = (n) => Math.floor(next() * n);
  return { below, pick: (list) => list[below(list.length)], chance: (p) => next() < p };
}

const csi = (final, ...numbers) => `\x1b[${numbers.join(";")}${final}`;
const words = ["error", "ok", "Makefile", "drwxr-xr-x", "100%", "~$ ", "a", " ", "   ", "0123456789", "[====>    ]", "\\"];
const wide = ["漢字", "日本語テキスト", "한국어", "中", "（全角）", "ｆｕｌｌ"];
const joined = ["e\u0301", "n\u0303o", "a\u0300\u0301\u0302", "👩\u200d💻", "❤\ufe0f", "🇩🇪", "🎉", "ก\u0e31", "क\u093c"];
const links = ["http://a.example/x", "file:///tmp/ü"];

function sgr({ below, pick }, full) {
  const colour = (base) =>
    pick([
      `${base + below(8)}`,
      `${base + 60 + below(8)}`,
      `${base + 8};5;${below(256)}`,
      `${base + 8};2;${below(256)};${below(256)};${below(256)}`,
      `${base + 8}:2::${below(256)}:${below(256)}:${below(256)}`,
      `${base + 8}:5:${below(256)}`,
      `${base + 9}`,
    ]);
  const flags = ["1", "2", "3", "4", "5", "7", "8", "9", "22", "23", "24", "25", "27", "28", "29", "53", "55"];
  const underlines = ["4:2", "4:3", "4:4", "4:5", "21", `58:5:${below(256)}`, `58:2::${below(256)}:9:8`, "59"];
  const part = () => pick([() => colour(30), () => colour(40), () => pick(full ? [...flags, ...underlines] : flags), () => "0"])();
  return `\x1b[${Array.from({ length: 1 + below(3) }, part).join(";")}m`;
}

/** Changes and resets of colours (OSC 4, 10 to 12, 104, 110 to 112), with some that are not understood. */
function colours({ below, pick, chance }) {
  const digits = (n) => Array.from({ length: n }, () => pick([..."0123456789abcdefABCDEF"])).join("");
  const colour = () => {
    const n = 1 + below(4);
    return pick([`#${digits(3 * n)}`, `rgb:${digits(n)}/${digits(n)}/${digits(n)}`, `rgb:${digits(n)}/${digits(1)}/${digits(n)}`, "red", "", "#12"]);
  };
  const number = () => (chance(0.1) ? pick(["256", "-1", "x", "", "99999999999"]) : below(256));
  const sequence = pick([
    () => `4;${number()};${colour()}`,
    () => `4;${number()};${colour()};${number()};${colour()};${number()}`,
    () => `${10 + below(3)};${colour()}`,
    () => `10;${colour()};${colour()};${colour()};${colour()}`,
    () => pick(["104", "104;", `104;${number()}`, `104;${number()};${number()}`]),
    () => pick(["110", "111", "112", "110;", "4", "10"]),
  ])();
  return `\x1b]${sequence}${pick(["\x07", "\x1b\\"])}`;
}

/**
 * What one case uses. xterm.js has bugs where these meet (see the documentation of the Go package `screen`), so no case
 * has all of them: wide characters with insertions, origin mode with relative movements, saved cursors with styled
 * underlines or with a cleared scrollback.
 */
const profiles = ["text", "edit", "wide", "origin", "saved", "styles", "modes"];

export function randomCase(seed) {
  const r = random(seed);
  const { below, pick, chance } = r;
  const cols = pick([10, 13, 20, 40, 80]);
  const rows = pick([2, 3, 5, 8, 24]);
  const profile = pick(profiles);
  const has = (...names) => names.includes(profile);
  const n = () => (chance(0.3) ? "" : chance(0.05) ? 9999 : below(12));
  const row = () => 1 + below(rows + 1);
  const col = () => 1 + below(cols + 1);
  const text = [
    () => pick(words),
    () => "x".repeat(below(cols + 4)),
    () => "\r\n",
    () => "\n",
    () => "\r",
    () => pick(words) + "\r\n",
    () => sgr(r, has("styles")),
  ];
  const moves = [
    () => csi("H", row(), col()),
    () => csi("H"),
    () => csi("d", row()),
    ...(has("origin") ? [] : [() => csi(pick([..."ABCDEFGae`"]), n()), () => "\b", () => "\t", () => csi(pick(["I", "Z"]), 1 + below(4))]),
  ];
  const erase = [
    () => csi("K", pick(["", 0, 1, 2])),
    () => csi("J", pick(["", 0, 2])),
    () => "\r" + csi("J", 1),
    () => csi("X", n()),
    () => csi("P", n()),
  ];
  const lines = [
    () => csi("L", n()),
    () => csi("M", n()),
    () => csi("S", n()),
    () => csi("T", n()),
    () => "\x1bD",
    () => "\x1bM",
    () => "\x1bE",
    () => csi("r", row(), row()),
    () => csi("r"),
    () => `\x1b[?1049${pick(["h", "l"])}`,
    () => `\x1b[?${pick([47, 1047])}${pick(["h", "l"])}`,
  ];
  const insertions = [
    () => csi("@", n()),
    () => csi(" @", below(4)),
    () => csi(" A", below(4)),
    () => "\b" + csi("'}", below(4)),
    () => "\b" + csi("'~", below(4)),
    () => `\x1b[4${pick(["h", "l"])}`,
    () => `\x1b[?7${pick(["h", "l"])}`,
    () => pick(words) + csi("b", 1 + below(15)),
  ];
  const wideText = [() => pick(wide), () => pick(wide) + "\r\n", () => pick(joined), () => pick(wide) + csi("b", 1 + below(4)), () => pick(joined) + csi("b", 2)];
  const modes = [
    () => `\x1b[?${pick([1, 12, 25, 45, 66, 9, 1000, 1002, 1003, 1004, 1006, 1016, 2004])}${pick(["h", "l"])}`,
    () => pick(["\x1b=", "\x1b>", "\x1b[20h", "\x1b[20l", "\x1b[!p", "\x1bc\x1b[?25h\x1b[20l\x1b[?12l"]),
    () => csi(" q", below(7)),
    () => `\x1b]${pick([0, 2])};${pick(words)} ü${pick(["\x07", "\x1b\\"])}`,
    () => pick([csi("22;2t"), csi("23;2t"), csi("22;0t"), csi("23;0t")]),
    () => pick(["\x1b(0", "\x1b(B", "\x1b)0", "\x1b(A", "\x1b(4", "\x0e", "\x0f", "\x1bn", "\x1b*0", "\x1b%G"]) + pick(["lqqk", "x", "#|]"]),
    () => colours(r),
    () => pick(["\x1bH", csi("g"), csi("3g")]),
    () => pick(["\x1b#8", csi("3J"), "\x1b_ignored\x1b\\", "\x1bP1$tx\x1b\\", "\x1b]999;x\x07", "\x1b]0;cancelled\x18"]),
    () => csi('"q', below(3)) + pick(words) + csi(pick(["?K", "?J", "?1K", "?2K"])),
    () => pick([csi("c"), csi(">c"), csi("5n"), csi("6n"), csi("?6n"), csi("$p", 4), csi("?1$p"), csi("?2004$p"), "\x1bP$qm\x1b\\", "\x1bP$qr\x1b\\"]),
    () => pick(["\x18", "\x7f", "\xc2\x85", "\x00", "\x1b[1;2;3;;<x", "\x1b[1:2:3m", "\x1b[;;5H", "\x1b[99999999999C"]),
  ];
  const saves = [() => "\x1b7", () => "\x1b8", () => csi("s"), () => csi("u"), () => "\x1b[?1048h", () => "\x1b[?1048l", ...modes.slice(5, 6)];
  const styles = [() => sgr(r, true), () => `\x1b]8;${pick(["", "id=1"])};${pick(["", ...links])}\x1b\\`, () => pick(wide)];
  const origin = [() => `\x1b[?6${pick(["h", "l"])}`, () => csi("r", row(), row())];
  const sets = [text, text, text];
  if (!has("text")) sets.push(moves, erase, lines);
  if (has("text")) sets.push(wideText, [() => "\x1b[?25l", () => csi("K"), () => "\x1b[A", () => "\r"]);
  if (has("edit")) sets.push(insertions, insertions);
  if (has("wide")) sets.push(wideText, wideText);
  if (has("origin")) sets.push(origin, saves.slice(0, 2));
  if (has("saved")) sets.push(saves);
  if (has("styles")) sets.push(styles);
  if (has("modes")) sets.push(modes, modes);
  if (has("styles", "origin")) sets.splice(sets.indexOf(lines), 1, lines.slice(0, 9)); // no alternate screen
  const output = (length) => Array.from({ length }, () => pick(pick(sets))()).join("");
  return {
    name: `seed ${seed} (${profile}, ${cols}x${rows})`,
    cols,
    rows,
    scrollback: pick([0, 5, 30, 1000]),
    before: latin(output(5 + below(pick([20, 60, 200])))),
    after: latin(output(below(20))),
    split: chance(0.3),
  };
}

/** Characters above U+00FF as UTF-8; "\xc2\x85" in the grammar are bytes already. */
const latin = (text) => Buffer.from(text.replaceAll("\xc2\x85", "\u0085"), "utf8");

/** A case of plain and wide text whose window changes its size. */
export function resizedCase(seed) {
  const r = random(seed);
  const { below, pick, chance } = r;
  const size = () => [pick([8, 12, 20, 33, 50]), pick([2, 4, 8, 15])];
  const [cols, rows] = size();
  const part = () =>
    pick([
      () => pick(words) + " ",
      () => "lorem ipsum dolor sit amet ".repeat(below(4)),
      () => "\r\n",
      () => "\r\n",
      () => `\x1b[3${below(8)}m`,
      () => (chance(0.5) ? pick(wide) : "-".repeat(below(30))),
    ])();
  const steps = [];
  for (let i = 0; i < 2 + below(4); i++) {
    steps.push({ write: Buffer.from(Array.from({ length: below(40) }, part).join("") + "\r\n") });
    steps.push({ resize: size() });
  }
  return { name: `resize seed ${seed} (${cols}x${rows})`, cols, rows, scrollback: 1000, steps };
}
