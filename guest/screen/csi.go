package screen

import "fmt"

const maxRepeat = 65535

func (s *Screen) dispatchCSI(final byte) {
	p := &s.parser.params
	if final == 'b' && s.parser.collect == 0 {
		s.repeat(min(p.count(0), maxRepeat))
		s.joinWidth = 0
		return
	}
	s.joinWidth = 0
	switch s.parser.collect {
	case 0:
		s.csi(final)
	case '?':
		s.privateCSI(final)
	case '>':
		if final == 'c' && p.at(0) == 0 {
			s.reply("\x1b[>0;276;0c")
		}
	case '!':
		if final == 'p' {
			s.softReset()
		}
	case '"':
		if final == 'q' {
			s.protect(p.at(0))
		}
	case '$':
		if final == 'p' {
			s.reportMode(false)
		}
	case '?'<<8 | '$':
		if final == 'p' {
			s.reportMode(true)
		}
	case ' ':
		switch final {
		case '@':
			s.shiftColumns(0, p.count(0), (*line).delete)
		case 'A':
			s.shiftColumns(0, p.count(0), (*line).insert)
		case 'q':
			if style := p.at(0); style <= 6 {
				s.modes.cursorStyle = style
			}
		}
	case '\'':
		x := min(s.buf.x, s.cols-1)
		switch final {
		case '}':
			s.shiftColumns(x, p.count(0), (*line).insert)
		case '~':
			s.shiftColumns(x, p.count(0), (*line).delete)
		}
	}
}

func (s *Screen) csi(final byte) {
	p := &s.parser.params
	b := s.buf
	n := p.count(0)
	switch final {
	case '@':
		s.clampCursor()
		b.lines[b.y].insert(b.x, n, s.attr.erase())
	case 'A':
		s.up(n)
	case 'B':
		s.down(n)
	case 'C', 'a':
		s.moveBy(n, 0)
	case 'D':
		s.moveBy(-n, 0)
	case 'E':
		s.down(n)
		b.x = 0
	case 'F':
		s.up(n)
		b.x = 0
	case 'G', '`':
		b.x = n - 1
		s.clampCursor()
	case 'H', 'f':
		s.moveTo(p.count(1)-1, n-1)
	case 'I':
		if b.x < s.cols {
			for range min(n, s.cols) {
				b.x = b.nextTab(b.x)
			}
		}
	case 'J':
		s.eraseDisplay(p.at(0), (*line).erase)
	case 'K':
		s.eraseLine(p.at(0), (*line).erase)
	case 'L':
		s.insertLines(n)
	case 'M':
		s.insertLines(-n)
	case 'P':
		s.clampCursor()
		b.lines[b.y].delete(b.x, n, s.attr.erase())
	case 'S':
		b.shift(b.top, b.bottom, min(n, s.rows), s.attr.erase())
	case 'T':
		b.shift(b.top, b.bottom, -min(n, s.rows), attr{})
	case 'X':
		s.clampCursor()
		b.lines[b.y].erase(b.x, min(b.x+min(n, s.cols), s.cols), s.attr.erase())
	case 'Z':
		if b.x < s.cols {
			for range min(n, s.cols) {
				b.x = b.previousTab(b.x)
			}
		}
	case 'c':
		if p.at(0) == 0 {
			s.reply("\x1b[?1;2c")
		}
	case 'd':
		s.moveTo(b.x, n-1)
	case 'e':
		s.moveBy(0, n)
	case 'g':
		s.clearTabs(p.at(0))
	case 'h':
		s.setMode(true)
	case 'l':
		s.setMode(false)
	case 'm':
		s.setAttributes()
	case 'n':
		switch p.at(0) {
		case 5:
			s.reply("\x1b[0n")
		case 6:
			s.reply(fmt.Sprintf("\x1b[%d;%dR", b.y+1, b.x+1))
		}
	case 'r':
		s.setRegion(n, p.at(1))
	case 's':
		s.saveCursor()
	case 't':
		s.windowOption(p.at(0), p.at(1))
	case 'u':
		s.restoreCursor()
	}
}

func (s *Screen) privateCSI(final byte) {
	p := &s.parser.params
	switch final {
	case 'J':
		s.eraseDisplay(p.at(0), (*line).eraseUnprotected)
	case 'K':
		s.eraseLine(p.at(0), (*line).eraseUnprotected)
	case 'h':
		s.setPrivateMode(true)
	case 'l':
		s.setPrivateMode(false)
	case 'n':
		if p.at(0) == 6 {
			s.reply(fmt.Sprintf("\x1b[?%d;%dR", s.buf.y+1, s.buf.x+1))
		}
	}
}

// clampCursor ends a pending wrap and keeps the cursor in the screen, in origin mode in the scroll region.
func (s *Screen) clampCursor() { s.clampCursorTo(s.cols - 1) }

func (s *Screen) clampCursorTo(right int) {
	b := s.buf
	b.x = max(0, min(b.x, right))
	if s.modes.origin {
		b.y = max(b.top, min(b.y, b.bottom))
	} else {
		b.y = max(0, min(b.y, s.rows-1))
	}
}

// moveTo goes to a position that counts from the top of the scroll region in origin mode.
func (s *Screen) moveTo(x, y int) {
	b := s.buf
	b.x, b.y = x, y
	if s.modes.origin {
		b.y += b.top
	}
	s.clampCursor()
}

func (s *Screen) moveBy(x, y int) {
	s.clampCursor()
	s.buf.x += x
	s.buf.y += y
	s.clampCursor()
}

// up stops at the top of the scroll region, unless it starts above it.
func (s *Screen) up(n int) {
	if room := s.buf.y - s.buf.top; room >= 0 {
		n = min(n, room)
	}
	s.moveBy(0, -n)
}

func (s *Screen) down(n int) {
	if room := s.buf.bottom - s.buf.y; room >= 0 {
		n = min(n, room)
	}
	s.moveBy(0, n)
}

func (s *Screen) backspace() {
	b := s.buf
	if !s.modes.reverseWrap {
		s.clampCursor()
		b.x = max(b.x-1, 0)
		return
	}
	s.clampCursorTo(s.cols)
	if b.x > 0 {
		b.x--
	} else if l := b.lines[b.y]; b.y > b.top && b.y <= b.bottom && l.wrapped {
		l.wrapped = false
		b.y--
		b.x = s.cols - 1
		// A wide character that did not fit left the last column blank.
		if last := b.lines[b.y].cells[b.x]; !last.content() && last.kind() != kindTail {
			b.x--
		}
	}
	s.clampCursor()
}

func (s *Screen) index() {
	s.clampCursor()
	if s.buf.y == s.buf.bottom {
		s.scroll(false)
	} else if s.buf.y < s.rows-1 {
		s.buf.y++
	}
	s.clampCursor()
}

func (s *Screen) reverseIndex() {
	s.clampCursor()
	if b := s.buf; b.y == b.top {
		b.shift(b.top, b.bottom, -1, s.attr.erase())
	} else {
		b.y--
		s.clampCursor()
	}
}

func (s *Screen) setRegion(top, bottom int) {
	if bottom == 0 || bottom > s.rows {
		bottom = s.rows
	}
	if bottom > top {
		s.buf.top, s.buf.bottom = top-1, bottom-1
		s.moveTo(0, 0)
	}
}

func (s *Screen) inRegion() bool { return s.buf.y >= s.buf.top && s.buf.y <= s.buf.bottom }

// insertLines is IL, and DL for negative numbers.
func (s *Screen) insertLines(n int) {
	s.clampCursor()
	if b := s.buf; s.inRegion() {
		b.shift(b.y, b.bottom, -max(-s.rows, min(n, s.rows)), s.attr.erase())
		b.x = 0
	}
}

// shiftColumns moves the columns from x on, in all lines of the scroll region.
func (s *Screen) shiftColumns(x, n int, move func(*line, int, int, attr)) {
	if !s.inRegion() {
		return
	}
	for _, l := range s.buf.lines[s.buf.top : s.buf.bottom+1] {
		move(l, x, min(n, s.cols), s.attr.erase())
		l.wrapped = false
	}
}

type eraser func(l *line, from, to int, a attr)

func (s *Screen) eraseLine(what int, erase eraser) {
	s.clampCursorTo(s.cols)
	b := s.buf
	l := b.lines[b.y]
	switch what {
	case 0:
		erase(l, b.x, s.cols, s.attr.erase())
		if b.x == 0 {
			l.wrapped = false
		}
	case 1:
		erase(l, 0, b.x+1, s.attr.erase())
	case 2:
		erase(l, 0, s.cols, s.attr.erase())
		l.wrapped = false
	}
}

func (s *Screen) eraseDisplay(what int, erase eraser) {
	s.clampCursorTo(s.cols)
	b := s.buf
	whole := func(lines []*line) {
		for _, l := range lines {
			erase(l, 0, s.cols, s.attr.erase())
			l.wrapped = false
		}
	}
	switch what {
	case 0:
		s.eraseLine(0, erase)
		whole(b.lines[b.y+1:])
	case 1:
		s.eraseLine(1, erase)
		b.lines[b.y].wrapped = false
		if b.x+1 >= s.cols && b.y+1 < s.rows {
			b.lines[b.y+1].wrapped = false
		}
		whole(b.lines[:b.y])
	case 2:
		whole(b.lines)
	case 3:
		if b.history != nil {
			b.history.clear()
		}
	}
}

func (s *Screen) alignmentTest() {
	s.moveTo(0, 0)
	a := s.attr
	a.line, a.link = 0, nil
	for _, l := range s.buf.lines[s.buf.y:] {
		l.reset(attr{}, false)
		c := l.cellOf(a)
		c.code = 'E'
		for x := range l.cells {
			l.cells[x] = c
		}
		l.used = s.cols
	}
	s.moveTo(0, 0)
}

// repeat is REP: prints the character before the cursor again.
func (s *Screen) repeat(n int) {
	b := s.buf
	x := b.x - s.joinWidth
	if s.joinWidth == 0 || x < 0 || x >= s.cols {
		return
	}
	text := []rune(b.lines[b.y].textAt(x))
	for range n {
		for _, r := range text {
			s.print(r)
		}
	}
}

func (s *Screen) saveCursor() {
	b := s.buf
	b.saved = saved{x: min(b.x, s.cols-1), y: b.base() + b.y, attr: s.attr, charset: s.charset}
	b.saved.attr.link = nil
}

func (s *Screen) restoreCursor() {
	b := s.buf
	b.x, b.y = b.saved.x, max(b.saved.y-b.base(), 0)
	link := s.attr.link
	s.attr, s.charset = b.saved.attr, b.saved.charset
	s.attr.link = link
	s.clampCursor()
}

func (s *Screen) setTab() {
	if s.buf.x < s.cols {
		s.buf.tabs[s.buf.x] = true
	}
}

func (s *Screen) clearTabs(what int) {
	if what == 3 {
		clear(s.buf.tabs)
	} else if what == 0 && s.buf.x < s.cols {
		s.buf.tabs[s.buf.x] = false
	}
}

// windowOption pushes and pops the title.
func (s *Screen) windowOption(option, what int) {
	if what != 0 && what != 2 {
		return
	}
	switch n := len(s.titles); {
	case option == 22:
		if n == maxTitles {
			s.titles = append(s.titles[:0], s.titles[1:]...)
		}
		s.titles = append(s.titles, s.title)
	case option == 23 && n > 0:
		s.title, s.titles = s.titles[n-1], s.titles[:n-1]
	}
}
