package screen

// The layout of fg and bg is that of xterm.js: 24 bits of colour, 2 bits of colour mode, flags above them.
const (
	colourMask    = 0x03FFFFFF // colour and its mode
	modeMask      = 0x03000000
	mode16        = 0x01000000
	mode256       = 0x02000000
	modeRGB       = 0x03000000
	fgInverse     = 0x04000000
	fgBold        = 0x08000000
	fgUnderline   = 0x10000000
	fgBlink       = 0x20000000
	fgInvisible   = 0x40000000
	fgStrike      = 0x80000000
	bgItalic      = 0x04000000
	bgDim         = 0x08000000
	bgProtected   = 0x20000000
	bgOverline    = 0x40000000
	underlineMask = 0x1C000000 // style of the underline, in attr.line
	underlineUnit = 0x04000000
)

const (
	codeMask  = 0x001FFFFF
	kindMask  = 0x00C00000
	kindWide  = 0x00400000 // first half of a wide character
	kindTail  = 0x00800000 // second half of a wide character; has no code
	kindZero  = 0x00C00000 // zero-width character that had nothing to combine with
	combined  = 0x00200000 // the text is in the line's extras
	maxJoined = 16         // code points that one cell holds; more are dropped
)

// attr is how a cell looks. line holds style (0 and 1: plain) and colour of the underline.
type attr struct {
	fg, bg, line uint32
	link         *hyperlink
}

type hyperlink struct{ params, uri string }

// extended reports whether the attribute needs an entry in the extras of a line.
func (a attr) extended() bool {
	return a.link != nil || a.fg&fgUnderline != 0 && a.line > underlineUnit
}

// erase is the attribute of erased cells: the background colour alone.
func (a attr) erase() attr { return attr{bg: a.bg & colourMask} }

// cell is one column of a line; the zero value is a blank that was never written.
type cell struct {
	code   uint32 // code point, kind, combined
	fg, bg uint32
	extra  uint32 // 1 + index into the extras of the line, or 0
}

func (c cell) kind() uint32 { return c.code & kindMask }

// content reports whether something was printed here, a space included.
func (c cell) content() bool { return c.code&codeMask != 0 }

// extra is what few cells have: combining characters, styled underlines, hyperlinks.
type extra struct {
	text string // the whole text of a combined cell
	line uint32
	link *hyperlink
}

// line is one row of the screen. cells[used:] are all blank.
type line struct {
	cells   []cell
	extras  []extra
	used    int
	wrapped bool // continues the line above
}

func newLine(cols int) *line { return &line{cells: make([]cell, cols)} }

// cellOf makes a cell without text of the attribute; the text is added to its code.
func (l *line) cellOf(a attr) cell {
	c := cell{fg: a.fg, bg: a.bg}
	if a.extended() {
		c.extra = l.extra(extra{line: a.line, link: a.link})
	}
	return c
}

func (l *line) extra(e extra) uint32 {
	if n := len(l.extras); n > 0 && l.extras[n-1] == e {
		return uint32(n)
	}
	if len(l.extras) >= 2*len(l.cells)+8 {
		l.compact()
	}
	l.extras = append(l.extras, e)
	return uint32(len(l.extras))
}

// compact drops extras that no cell uses any more.
func (l *line) compact() {
	var kept []extra
	moved := make(map[uint32]uint32)
	for i := range l.cells[:l.used] {
		c := &l.cells[i]
		if c.extra == 0 {
			continue
		}
		if moved[c.extra] == 0 {
			kept = append(kept, l.extras[c.extra-1])
			moved[c.extra] = uint32(len(kept))
		}
		c.extra = moved[c.extra]
	}
	l.extras = kept
}

func (l *line) attrAt(x int) attr {
	c := l.cells[x]
	a := attr{fg: c.fg, bg: c.bg}
	if c.extra != 0 {
		a.line, a.link = l.extras[c.extra-1].line, l.extras[c.extra-1].link
	}
	return a
}

func (l *line) textAt(x int) string {
	c := l.cells[x]
	if c.code&combined != 0 {
		return l.extras[c.extra-1].text
	}
	if !c.content() {
		return ""
	}
	return string(rune(c.code & codeMask))
}

// join adds a combining character to a cell.
func (l *line) join(x int, r rune) {
	c := &l.cells[x]
	if c.kind() == kindZero {
		return // no sequence of bytes could print it again
	}
	var e extra
	if c.extra != 0 {
		e = l.extras[c.extra-1]
	}
	if c.code&combined == 0 {
		if !c.content() { // the character that it belongs to was not printed: autowrap is off
			c.code = uint32(r) | kindZero
			l.touch(x + 1)
			return
		}
		e.text = string(rune(c.code & codeMask))
	}
	if joined := len([]rune(e.text)); joined >= maxJoined {
		return
	}
	e.text += string(r)
	c.code |= combined
	c.extra = l.extra(e)
}

func (l *line) touch(end int) {
	if end > l.used {
		l.used = end
	}
}

// fill sets cells[from:to] to blanks of the attribute.
func (l *line) fill(from, to int, a attr) {
	to = min(to, len(l.cells))
	if a == (attr{}) {
		if to >= l.used {
			clear(l.cells[min(from, l.used):l.used])
			l.used = min(l.used, from)
			if l.used == 0 {
				l.extras = nil
			}
		} else if from < to {
			clear(l.cells[from:to])
		}
		return
	}
	if from >= to {
		return
	}
	blank := l.cellOf(a)
	for x := from; x < to; x++ {
		l.cells[x] = blank
	}
	l.touch(to)
}

// erase is fill for whole characters: the other half of a wide character at either end becomes a blank as well.
func (l *line) erase(from, to int, a attr) {
	to = min(to, len(l.cells))
	if from >= to {
		return
	}
	if l.cells[from].kind() == kindTail {
		l.fill(from-1, from, a)
	}
	if to < len(l.cells) && l.cells[to].kind() == kindTail {
		l.fill(to, to+1, a)
	}
	l.fill(from, to, a)
}

// eraseUnprotected is erase for cells that DECSCA did not protect.
func (l *line) eraseUnprotected(from, to int, a attr) {
	to = min(to, len(l.cells))
	for x := from; x < to; x++ {
		if l.cells[x].bg&bgProtected == 0 {
			l.erase(x, x+1, a)
		}
	}
}

// insert moves cells[x:] right by n columns; what leaves the line is lost.
func (l *line) insert(x, n int, a attr) {
	cols := len(l.cells)
	n = min(n, cols-x)
	if n <= 0 {
		return
	}
	if l.cells[x].kind() == kindTail {
		l.fill(x-1, x+1, a)
	}
	if l.used > x {
		copy(l.cells[x+n:], l.cells[x:l.used])
		l.used = min(l.used+n, cols)
	}
	l.touch(x + n)
	l.blank(x, x+n, a)
	if l.cells[cols-1].kind() == kindWide {
		l.fill(cols-1, cols, a)
	}
}

// delete moves cells[x+n:] left to x.
func (l *line) delete(x, n int, a attr) {
	cols := len(l.cells)
	n = min(n, cols-x)
	if n <= 0 {
		return
	}
	if l.cells[x].kind() == kindTail {
		l.fill(x-1, x+1, a)
	}
	if x+n < cols && l.cells[x+n].kind() == kindTail {
		l.fill(x+n, x+n+1, a)
	}
	copy(l.cells[x:], l.cells[x+n:])
	l.used = cols
	l.blank(cols-n, cols, a)
	l.used = l.trimmed()
}

// blank is fill that leaves used alone.
func (l *line) blank(from, to int, a attr) {
	blank := l.cellOf(a)
	for x := from; x < to; x++ {
		l.cells[x] = blank
	}
}

// trimmed is the number of cells before the trailing blanks.
func (l *line) trimmed() int {
	n := l.used
	for n > 0 && l.cells[n-1] == (cell{}) {
		n--
	}
	return n
}

// textLength is the number of cells up to the last one with content: what a reflow moves.
func (l *line) textLength() int {
	for x := l.used - 1; x >= 0; x-- {
		if l.cells[x].content() {
			if l.cells[x].kind() == kindWide {
				return x + 2
			}
			return x + 1
		}
	}
	return 0
}

func (l *line) reset(a attr, wrapped bool) {
	clear(l.cells[:l.used])
	l.used, l.extras, l.wrapped = 0, nil, wrapped
	if a != (attr{}) {
		l.fill(0, len(l.cells), a)
	}
}

// resize changes the number of columns; a wide character that is cut in half becomes a blank.
func (l *line) resize(cols int) {
	if cols <= len(l.cells) {
		l.cells = l.cells[:cols:cols]
		l.used = min(l.used, cols)
		if cols > 0 && l.cells[cols-1].kind() == kindWide {
			l.cells[cols-1] = cell{}
		}
		return
	}
	cells := make([]cell, cols)
	copy(cells, l.cells[:l.used])
	l.cells = cells
}

// copyFrom copies n cells of another line.
func (l *line) copyFrom(from *line, source, target, n int) {
	for i := range n {
		c := from.cells[source+i]
		if c.extra != 0 {
			c.extra = l.extra(from.extras[c.extra-1])
		}
		l.cells[target+i] = c
		l.touch(target + i + 1) // before the next extra: compact looks at used cells only
	}
}
