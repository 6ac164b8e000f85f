package screen

import (
	"strconv"
	"unicode/utf8"
)

// bufferState sets tab stops, saved cursor and scroll region of the screen that is shown.
func (e *emitter) bufferState(s *Screen, b *buffer) {
	e.tabs(b)
	if b.saved != (saved{}) {
		e.saved(s, b)
	}
	if b.top > 0 || b.bottom < s.rows-1 {
		e.csi("r", b.top+1, b.bottom+1)
	}
}

func (e *emitter) tabs(b *buffer) {
	usual := true
	for x, set := range b.tabs {
		usual = usual && set == (x%8 == 0)
	}
	if usual {
		return
	}
	e.text("\x1b[3g")
	for x, set := range b.tabs {
		if set {
			e.column(x)
			e.text("\x1bH")
		}
	}
}

func (e *emitter) saved(s *Screen, b *buffer) {
	e.csi("H", max(0, min(b.saved.y-b.base(), s.rows-1))+1, b.saved.x+1)
	e.sgr(b.saved.attr)
	e.designate('(', b.saved.charset)
	e.text("\x1b7")
	e.designate('(', nil)
}

func (e *emitter) designate(set byte, c *charset) {
	final := byte('B')
	if c != nil {
		final = c.final
	}
	e.out = append(e.out, 0x1b, set, final)
}

// finish sets what belongs to the whole terminal, and the cursor.
func (e *emitter) finish(s *Screen) {
	e.sgr(attr{})
	e.modes(s)
	if s.joinWidth > 0 || s.charset != s.sets[s.level] {
		e.charsets(s)
		e.cursor(s, s.charset)
	} else { // the character before the cursor may not be in the character set that is in use now
		e.cursor(s, nil)
		e.charsets(s)
	}
}

func (e *emitter) charsets(s *Screen) {
	for i, c := range s.sets {
		if c != nil {
			e.designate("()*+"[i], c)
		}
	}
	switch s.level {
	case 1:
		e.text("\x0e")
	case 2:
		e.text("\x1bn")
	case 3:
		e.text("\x1bo")
	}
	if s.charset != s.sets[s.level] && s.charset == s.buf.saved.charset {
		e.text("\x1b8") // the character set in use came from a saved cursor
		e.now = attr{fg: ^uint32(0)}
		e.sgr(attr{})
	}
}

func (e *emitter) modes(s *Screen) {
	m := &s.modes
	private := func(mode int, on bool) {
		e.text("\x1b[?")
		e.out = strconv.AppendInt(e.out, int64(mode), 10)
		if on {
			e.text("h")
		} else {
			e.text("l")
		}
	}
	for _, mode := range [...]int{1, 12, 45, 1004, 2004, 2026} {
		if *m.flag(mode) {
			private(mode, true)
		}
	}
	for i, on := range m.others {
		if on {
			private(otherModes[i], true)
		}
	}
	if m.keypad {
		e.text("\x1b=")
	}
	if !m.wrap {
		private(7, false)
	}
	if m.mouse != 0 {
		private(m.mouse, true)
	}
	if m.mouseEncoding != 0 {
		private(m.mouseEncoding, true)
	}
	if m.hidden {
		private(25, false)
	}
	if m.cursorStyle != 0 {
		e.csi(" q", m.cursorStyle)
	}
	if m.newLine {
		e.text("\x1b[20h")
	}
	if m.insert {
		e.text("\x1b[4h")
	}
	if m.origin {
		private(6, true)
	}
}

// cursor moves to the cursor. Behind the last column, and where a combining character or REP may follow, it prints the
// character before the cursor again: that is the only way to get there.
func (e *emitter) cursor(s *Screen, c *charset) {
	b := s.buf
	row, l := b.y, b.lines[b.y]
	if s.modes.origin {
		row -= b.top
	}
	at := b.x - 1
	if at >= 0 && l.cells[at].kind() == kindTail {
		at--
	}
	joins := s.joinWidth > 0 && at == b.x-s.joinWidth && l.cells[at].content() && l.attrAt(at).same(visible(s.attr))
	if b.x < s.cols && !joins {
		e.csi("H", row+1, b.x+1)
		e.sgr(s.attr)
		return
	}
	e.csi("H", row+1, at+1)
	a := l.attrAt(at)
	if joins {
		a = s.attr
	}
	e.sgr(a)
	if s.modes.insert && b.x < s.cols {
		e.csi("P", b.x-at) // printing moves the rest to where it was
	}
	switch {
	case l.cells[at].content():
		e.characters(c, l.textAt(at))
	case uniform(l):
		e.text(" \x1b[1K")
	default:
		e.text(" ")
	}
	if !joins {
		e.now.fg = ^s.attr.fg // any sequence: what follows does not combine
	}
	e.sgr(s.attr)
}

// visible is the attribute as cells keep it: without what has no effect.
func visible(a attr) attr {
	if !a.extended() {
		a.line = 0
	}
	return a
}

// uniform reports whether the whole line was erased with one background colour.
func uniform(l *line) bool {
	for _, c := range l.cells {
		if c != l.cells[0] {
			return false
		}
	}
	return !l.cells[0].content() && l.attrAt(0) == l.attrAt(0).erase()
}

func (e *emitter) characters(c *charset, text string) {
	for _, r := range text {
		if source, found := c.source(r); found {
			e.out = utf8.AppendRune(e.out, source)
		}
	}
}

// appendUnfinished appends what brings the parser of another terminal into the state of this one.
func (s *Screen) appendUnfinished(to []byte) []byte {
	p := &s.parser
	switch p.state {
	case escape, escapeIntermediate:
		to = append(to, 0x1b)
		to = p.appendCollected(to)
	case csiEntry, csiParam, csiIntermediate:
		to = append(to, "\x1b["...)
		to = p.appendSequence(to, p.state == csiEntry)
	case csiIgnore:
		to = append(to, "\x1b[0<"...)
	case ignoredString:
		to = append(to, "\x1b_"...)
	case oscString:
		to = append(to, "\x1b]"...)
		if p.tooLong {
			to = append(to, "-;"...) // no command has this number: the rest is ignored
		}
		to = append(to, p.text...)
	case dcsEntry, dcsParam, dcsIntermediate, dcsPassthrough:
		if p.state == dcsPassthrough && p.tooLong {
			to = append(to, "\x1bP0<"...)
			break
		}
		to = append(to, "\x1bP"...)
		to = p.appendSequence(to, p.state == dcsEntry)
		if p.state == dcsPassthrough {
			to = append(to, p.final)
			to = append(to, p.text...)
		}
	case dcsIgnore:
		to = append(to, "\x1bP0<"...)
	}
	if p.missing > 0 {
		to = append(to, p.partial[:p.have]...)
	}
	return to
}

func (p *parser) appendCollected(to []byte) []byte {
	for shift := 16; shift >= 0; shift -= 8 {
		if c := byte(p.collect >> shift); c >= 0x20 && c < 0x30 {
			to = append(to, c)
		} else if c == 0xFF {
			to = append(to, ' ') // too many of them
		}
	}
	return to
}

func (p *parser) appendSequence(to []byte, empty bool) []byte {
	for shift := 16; shift >= 0; shift -= 8 {
		if c := byte(p.collect >> shift); c >= 0x3C && c < 0x40 {
			to = append(to, c)
		}
	}
	for i := 0; i < p.params.n && !empty; i++ {
		if i > 0 {
			to = append(to, ';')
		}
		if v := p.params.values[i]; v != 0 || i == 0 && p.collect == 0 {
			to = strconv.AppendInt(to, int64(v), 10)
		}
		for _, sub := range p.params.subsOf(i) {
			to = append(to, ':')
			if sub >= 0 {
				to = strconv.AppendInt(to, int64(sub), 10)
			}
		}
	}
	if p.params.full {
		to = append(to, ';')
	} else if p.params.inSub && p.params.subFull {
		to = append(to, ':')
	}
	return p.appendCollected(to)
}
