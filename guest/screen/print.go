package screen

import "encoding/binary"

// printASCII prints bytes from 0x20 to 0x7E.
func (s *Screen) printASCII(p []byte) {
	if s.charset != nil || s.modes.insert {
		for _, c := range p {
			s.print(rune(c))
		}
		return
	}
	b := s.buf
	l := b.lines[b.y]
	if b.x > 0 {
		s.splitWide(l, b.x)
	}
	for {
		if b.x >= s.cols {
			if !s.modes.wrap { // every further character lands in the last column
				b.x = s.cols - 1
				s.splitWide(l, b.x)
				p = p[len(p)-1:]
			} else {
				l = s.wrapLine()
			}
		}
		n := min(s.cols-b.x, len(p))
		c := l.cellOf(s.attr)
		text := p[:n]
		cells := l.cells[b.x:][:len(text)]
		for i, code := range text {
			c.code = uint32(code)
			cells[i] = c
		}
		b.x += n
		if b.x > l.used {
			l.used = b.x
		}
		p = p[n:]
		if len(p) == 0 {
			break
		}
	}
	s.endWide(l)
	s.joinWidth = 1
}

// print prints one character.
func (s *Screen) print(r rune) {
	if s.charset != nil {
		r = s.charset.translate(r)
	}
	b := s.buf
	l := b.lines[b.y]
	w := width(r)
	if w == 0 {
		s.printZeroWidth(l, r)
		return
	}
	if b.x > 0 {
		s.splitWide(l, b.x)
	}
	s.joinWidth = w
	if b.x+w > s.cols {
		if s.modes.wrap {
			l.fill(b.x, s.cols, s.attr)
			l = s.wrapLine()
		} else {
			b.x = s.cols - 1
			if w == 2 {
				s.endWide(l)
				return
			}
			s.splitWide(l, b.x)
		}
	}
	if s.modes.insert {
		l.insert(b.x, w, s.attr)
	}
	c := l.cellOf(s.attr)
	c.code = uint32(r)
	if w == 2 {
		c.code |= kindWide
		l.cells[b.x] = c
		c.code = kindTail
		l.cells[b.x+1] = c
	} else {
		l.cells[b.x] = c
	}
	b.x += w
	l.touch(b.x)
	s.endWide(l)
}

func (s *Screen) printZeroWidth(l *line, r rune) {
	b := s.buf
	if s.joinWidth > 0 && b.x > 0 {
		at := b.x - 1
		if kind := l.cells[at].kind(); (kind == kindTail || kind == kindZero) && at > 0 {
			at--
		}
		l.join(at, r)
		return
	}
	if b.x >= s.cols {
		return
	}
	s.splitWide(l, b.x)
	c := l.cellOf(s.attr)
	c.code = uint32(r) | kindZero
	l.cells[b.x] = c
	b.x++
	l.touch(b.x)
	s.endWide(l)
}

// splitWide blanks the first half of a wide character whose second half at x is about to be overwritten.
func (s *Screen) splitWide(l *line, x int) {
	if x > 0 && l.cells[x-1].kind() == kindWide {
		l.fill(x-1, x, s.attr)
	}
}

// endWide blanks the second half of a wide character whose first half was overwritten.
func (s *Screen) endWide(l *line) {
	if x := s.buf.x; x < s.cols && l.cells[x].kind() == kindTail && l.cells[x-1].kind() != kindWide {
		l.fill(x, x+1, s.attr)
	}
}

// wrapLine moves to the start of the next row, which continues this one.
func (s *Screen) wrapLine() *line {
	b := s.buf
	b.x = 0
	switch {
	case b.y == b.bottom:
		s.scroll(true)
	case b.y < s.rows-1:
		b.y++
		b.lines[b.y].wrapped = true
	default:
		b.lines[b.y].wrapped = true
	}
	return b.lines[b.y]
}

// scroll moves the scroll region up by one line. The top line of the screen goes to the scrollback.
func (s *Screen) scroll(wrapped bool) {
	b := s.buf
	region := b.lines[b.top : b.bottom+1]
	first := region[0]
	if b.top == 0 {
		s.scratch = b.remember(first, s.scratch)
	}
	copy(region, region[1:])
	first.reset(s.attr.erase(), wrapped)
	region[len(region)-1] = first
}

func (s *Screen) lineFeed() {
	b := s.buf
	if s.modes.newLine {
		b.x = 0
	}
	if b.y == b.bottom {
		s.scroll(false)
	} else if b.y < s.rows-1 {
		b.y++
		b.lines[b.y].wrapped = false
	}
	if b.x >= s.cols {
		b.x = s.cols - 1
	}
}

// minLines is how many bytes must be left for writeLines to be worth its while.
const minLines = 1 << 10

// scrollsPlainly reports whether the cursor is at the start of a blank last row and plain text would only scroll.
func (s *Screen) scrollsPlainly() bool {
	b := s.buf
	if b.history == nil || b.x != 0 || b.y != s.rows-1 || b.top != 0 || b.bottom != s.rows-1 {
		return false
	}
	l := b.lines[b.y]
	return s.charset == nil && !s.modes.insert && s.attr == (attr{}) && l.used == 0 && !l.wrapped
}

// writeLines prints lines of ASCII that fit into a row. Those that would leave the screen again go to the scrollback at
// once, without cells. It returns how many bytes it has printed, and how many it has looked at.
func (s *Screen) writeLines(p []byte) (printed, seen int) {
	s.ends = s.ends[:0]
	for start := 0; ; {
		end := start
		for end < len(p) && p[end]-0x20 < 0x5F {
			end++
		}
		seen = end
		if end-start > s.cols || end+1 >= len(p) || p[end] != '\r' || p[end+1] != '\n' {
			break
		}
		s.ends = append(s.ends, end)
		start = end + 2
	}
	b := s.buf
	through := len(s.ends) - (s.rows - 1)
	if through < 8 {
		return 0, seen
	}
	for _, l := range b.lines[:s.rows-1] {
		s.scratch = b.remember(l, s.scratch)
	}
	start := 0
	for _, end := range s.ends[:through] {
		s.scratch = binary.AppendUvarint(s.scratch[:0], uint64(end-start)<<1)
		s.scratch = append(s.scratch, p[start:end]...)
		b.rememberEncoded(s.scratch)
		start = end + 2
	}
	for _, l := range b.lines {
		l.reset(attr{}, false)
	}
	b.y = 0
	for _, end := range s.ends[through:] {
		if end > start {
			s.printASCII(p[start:end])
		}
		b.x = 0
		b.y++
		start = end + 2
	}
	s.joinWidth = 0
	return start, seen
}
