package screen

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

const maxReplay = 15 << 20

// Replay returns bytes that bring a terminal of the same size into the state of this screen, whatever state it was in.
// With scrollback they reset it first (RIS), which also clears its scrollback; without, its scrollback stays.
//
// What a program began to send but did not finish (half of an escape sequence or of a character) comes last, so that
// the bytes that follow continue it. Blank cells with attributes other than a background colour become spaces; so does a
// blank at the end of a wrapped row on a screen of one row, and one in the last column with the cursor behind it. The oldest lines are left out
// of a replay that would be larger than 15 MiB.
func (s *Screen) Replay(scrollback bool) []byte { return s.ReplayTo(s.rows, scrollback) }

// ReplayTo is a Replay for a terminal that may have more rows: the screen is at its top, with blank rows below.
func (s *Screen) ReplayTo(rows int, scrollback bool) []byte {
	if !scrollback || s.main.history == nil {
		return s.replay(rows, scrollback, 0)
	}
	lines := s.main.history.lines
	skip := lines - s.main.history.newest(maxReplay) // most lines take more bytes than their encoding
	for {
		replay := s.replay(rows, true, skip)
		if len(replay) <= maxReplay || skip >= lines {
			return replay
		}
		left := lines - skip
		skip += max(left*(len(replay)-maxReplay)/len(replay), left/10, 1)
	}
}

// replay leaves out that many of the oldest lines of the scrollback.
func (s *Screen) replay(rows int, scrollback bool, skip int) []byte {
	e := &emitter{cols: s.cols, rows: s.rows}
	if s.main.history != nil && scrollback {
		e.out = make([]byte, 0, min(s.main.history.bytes, maxReplay)*5/4+s.cols*s.rows)
	}
	e.begin(scrollback)
	e.title(s)
	e.colours(s)
	if scrollback && s.main.history != nil {
		s.main.history.each(func(encoded []byte) {
			if skip--; skip < 0 {
				e.row(encoded)
			}
		})
	}
	e.lines(s.main)
	if scrollback && rows > s.rows {
		// The scrollback moves out of the higher window, and the screen to its top.
		e.sgr(attr{})
		e.text(strings.Repeat("\r\n", rows-s.rows))
	}
	e.bufferState(s, s.main)
	if s.buf == s.alt {
		e.sgr(attr{})
		e.text("\x1b[?1047h\x1b[r")
		e.startScreen()
		e.lines(s.alt)
		e.bufferState(s, s.alt)
	} else if s.alt.saved != (saved{}) {
		e.text("\x1b[?1047h")
		e.saved(s, s.alt)
		e.text("\x1b[?1047l")
	}
	e.finish(s)
	return s.appendUnfinished(e.out)
}

// emitter writes escape sequences and knows what they did to the terminal.
type emitter struct {
	out        []byte
	cols, rows int
	now        attr   // current attributes of the terminal
	written    int    // rows so far
	fill       uint32 // background of the current row
	full       bool   // the cursor is behind the last column
	previous   []byte // row above, encoded
	buffers    [2][]byte
}

func (e *emitter) text(t string) { e.out = append(e.out, t...) }

// csi writes a control sequence with numbers.
func (e *emitter) csi(final string, numbers ...int) {
	e.text("\x1b[")
	for i, n := range numbers {
		if i > 0 {
			e.out = append(e.out, ';')
		}
		e.out = strconv.AppendInt(e.out, int64(n), 10)
	}
	e.text(final)
}

func (e *emitter) begin(reset bool) {
	e.text("\x18") // ends an unfinished sequence
	if reset {
		e.text("\x1bc\x1b[20l\x1b[?12l\x1b[?25h")
	} else {
		e.text("\x1b[?1047l\x1b[!p\x1b[20l\x1b[?12l\x1b[?9;1000;1002;1003;1006;1016l\x1b[?5;1005;1007;1015l")
		e.text("\x1b[3g")
		for x := 0; x < e.cols; x += 8 {
			e.csi("G", x+1)
			e.text("\x1bH")
		}
		e.text("\x1b[H\x1b[2J")
	}
	e.startScreen()
}

// startScreen begins at the top of a blank screen.
func (e *emitter) startScreen() {
	e.sgr(attr{})
	e.text("\x1b[H")
	e.written, e.fill, e.full, e.previous = 0, 0, false, nil
}

func (e *emitter) title(s *Screen) {
	for _, title := range s.titles {
		e.text("\x1b]2;" + title + "\x1b\\\x1b[22;2t")
	}
	e.text("\x1b]2;" + s.title + "\x1b\\")
}

func (e *emitter) lines(b *buffer) {
	for i, l := range b.lines {
		buffer := &e.buffers[i%2] // the row above stays valid
		*buffer = appendLine((*buffer)[:0], l)
		e.row(*buffer)
	}
}

// row writes one encoded line in the row after the last.
func (e *emitter) row(encoded []byte) {
	cells, continued, body := head(encoded)
	if e.written > 0 {
		if continued {
			e.wrap(body)
		} else {
			if e.now.bg&colourMask != 0 {
				e.sgr(attr{}) // the row that scrolls in gets the background colour
			}
			e.text("\r\n")
			e.fill = 0
		}
	}
	e.cells(body, cells)
	e.written++
	e.previous = encoded
}

// wrap moves to the next row such that it continues this one: by printing a character behind the last column.
func (e *emitter) wrap(next []byte) {
	first, a := firstCell(next)
	last, lastBlank := lastCell(e.previous, e.cols)
	natural := e.full && first != 0
	if first != 0 && width(first) == 2 && lastBlank && last.same(a) {
		// A wide character that does not fit wraps by itself and leaves a blank with its attributes.
		e.column(e.cols - 1)
		natural = true
	}
	scrolls := e.written >= e.rows
	if natural {
		e.fill = 0
		if scrolls {
			e.fill = a.bg & colourMask
		}
		return
	}
	blankEnd := !e.full
	e.sgr(attr{})
	if blankEnd {
		e.column(e.cols - 1)
		e.text(" ")
	}
	e.text(" ")
	if blankEnd && e.rows > 1 {
		e.text("\x1b[A")
		e.column(e.cols - 1)
		e.sgr(last) // not printed, so a background colour at most
		e.text("\x1b[X")
		e.sgr(attr{})
		e.text("\x1b[B")
	}
	e.text("\r\x1b[X")
	e.fill = 0
}

func (e *emitter) column(x int) { e.csi("G", x+1) }

// firstCell is the first character of a row and its attributes; 0 when it is blank.
func firstCell(body []byte) (rune, attr) {
	var a attr
	r := reader{body}
	for len(r.rest) > 0 {
		if r.attr(&a) {
			continue
		}
		if r.rest[0] < 0x20 {
			return 0, attr{}
		}
		return r.rune(), a
	}
	return 0, attr{}
}

// lastCell returns the attributes of the last column and whether it is blank.
func lastCell(encoded []byte, cols int) (attr, bool) {
	if cells, _, _ := head(encoded); cells < cols {
		return attr{}, true
	}
	l := decodeLine(encoded, cols)
	last := l.cells[cols-1]
	return l.attrAt(cols - 1), !last.content() && last.kind() == 0
}

// cells writes n cells of a row from its first column on.
func (e *emitter) cells(body []byte, n int) {
	r := reader{body}
	var a attr
	skip := 0
	e.full = false
	for len(r.rest) > 0 {
		if r.attr(&a) {
			continue
		}
		if r.rest[0] == opBlank {
			r.rest = r.rest[1:]
			blanks := int(r.varint())
			e.full = false
			switch {
			case a == attr{bg: e.fill}:
				skip += blanks
			case a == a.erase():
				e.skip(&skip)
				e.sgr(a)
				e.csi("X", blanks)
				skip = blanks
			default:
				e.skip(&skip)
				e.sgr(a)
				for range blanks {
					e.out = append(e.out, ' ')
				}
				e.full = len(r.rest) == 0
			}
			continue
		}
		e.skip(&skip)
		e.sgr(a)
		switch r.rest[0] {
		case opJoin:
			r.rest = r.rest[1:]
			e.out = utf8.AppendRune(e.out, r.rune())
		case opZero:
			r.rest = r.rest[1:]
			e.now.fg = ^a.fg // any sequence: then it does not combine with the cell before
			e.sgr(a)
			e.out = utf8.AppendRune(e.out, r.rune())
		default:
			end := 1
			for end < len(r.rest) && r.rest[end] >= 0x20 {
				end++
			}
			e.out = append(e.out, r.rest[:end]...)
			r.rest = r.rest[end:]
		}
		e.full = len(r.rest) == 0
	}
	e.full = e.full && n == e.cols
	if e.fill != 0 && n < e.cols {
		e.skip(&skip)
		e.sgr(attr{})
		e.csi("X", e.cols-n)
	}
}

func (e *emitter) skip(n *int) {
	if *n > 0 {
		e.csi("C", *n)
	}
	*n = 0
}

// sgr sets the attributes.
func (e *emitter) sgr(a attr) {
	if a.fg != e.now.fg || a.bg != e.now.bg || a.line != e.now.line {
		if e.now.bg&^a.bg&bgProtected != 0 {
			e.text("\x1b[0\"q")
		}
		e.out = appendSGR(e.out, a)
		if a.bg&bgProtected != 0 {
			e.text("\x1b[1\"q")
		}
	}
	if !sameLink(a.link, e.now.link) {
		if a.link == nil {
			e.text("\x1b]8;;\x1b\\")
		} else {
			e.text("\x1b]8;" + a.link.params + ";" + a.link.uri + "\x1b\\")
		}
	}
	e.now = a
}

func sameLink(a, b *hyperlink) bool { return a == b || a != nil && b != nil && *a == *b }

func (a attr) same(b attr) bool {
	return a.fg == b.fg && a.bg == b.bg && a.line == b.line && sameLink(a.link, b.link)
}

func appendSGR(to []byte, a attr) []byte {
	to = append(to, "\x1b[0"...)
	if a.fg&fgBold != 0 {
		to = append(to, ";1"...)
	}
	if a.bg&bgDim != 0 {
		to = append(to, ";2"...)
	}
	if a.bg&bgItalic != 0 {
		to = append(to, ";3"...)
	}
	if a.fg&fgUnderline != 0 {
		to = append(to, ";4"...)
		if style := a.line & underlineMask / underlineUnit; style > 1 {
			to = append(to, ':', '0'+byte(style))
		}
	}
	if a.fg&fgBlink != 0 {
		to = append(to, ";5"...)
	}
	if a.fg&fgInverse != 0 {
		to = append(to, ";7"...)
	}
	if a.fg&fgInvisible != 0 {
		to = append(to, ";8"...)
	}
	if a.fg&fgStrike != 0 {
		to = append(to, ";9"...)
	}
	if a.bg&bgOverline != 0 {
		to = append(to, ";53"...)
	}
	to = appendColour(to, a.fg, 30)
	to = appendColour(to, a.bg, 40)
	if a.line&modeMask != 0 {
		to = appendUnderlineColour(to, a.line)
	}
	return append(to, 'm')
}

// appendUnderlineColour uses colons: terminals that do not know this attribute ignore all of it.
func appendUnderlineColour(to []byte, colour uint32) []byte {
	if colour&modeMask != modeRGB {
		return strconv.AppendInt(append(to, ";58:5:"...), int64(colour&0xFF), 10)
	}
	to = append(to, ";58:2:"...)
	for shift := 16; shift >= 0; shift -= 8 {
		to = strconv.AppendInt(append(to, ':'), int64(colour>>shift&0xFF), 10)
	}
	return to
}

func appendColour(to []byte, colour uint32, base int) []byte {
	n := int(colour & 0xFF)
	switch colour & modeMask {
	case mode16:
		if n >= 8 {
			n += 60 - 8
		}
		to = strconv.AppendInt(append(to, ';'), int64(base+n), 10)
	case mode256:
		to = strconv.AppendInt(append(to, ';'), int64(base+8), 10)
		to = strconv.AppendInt(append(to, ";5;"...), int64(n), 10)
	case modeRGB:
		to = strconv.AppendInt(append(to, ';'), int64(base+8), 10)
		to = append(to, ";2"...)
		for shift := 16; shift >= 0; shift -= 8 {
			to = strconv.AppendInt(append(to, ';'), int64(colour>>shift&0xFF), 10)
		}
	}
	return to
}
