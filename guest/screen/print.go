package screen

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
