package screen

// Resize changes the size as xterm.js does: lines of the main screen that wrapped are laid out again, except the line
// with the cursor, which the program redraws.
func (s *Screen) Resize(cols, rows int) {
	cols, rows = clampSize(cols, rows)
	if cols == s.cols && rows == s.rows {
		return
	}
	old := s.cols
	s.cols, s.rows = cols, rows
	s.resizeBuffer(s.main, old)
	if s.buf == s.alt {
		s.resizeBuffer(s.alt, old)
	} else {
		s.alt.top, s.alt.bottom = 0, rows-1
	}
	s.main.extendTabs(cols)
	s.alt.extendTabs(cols)
	s.clampToOrigin()
}

func (s *Screen) resizeBuffer(b *buffer, oldCols int) {
	if s.cols > oldCols {
		for _, l := range b.lines {
			l.resize(s.cols)
		}
	}
	s.resizeRows(b)
	b.x = min(b.x, s.cols-1)
	b.saved.x = min(b.saved.x, s.cols-1)
	b.top, b.bottom = 0, s.rows-1
	if s.cols != oldCols && b == s.main {
		s.reflow(b, oldCols)
	}
	for _, l := range b.lines {
		if len(l.cells) != s.cols {
			l.resize(s.cols)
		}
	}
}

// resizeRows adds rows from the scrollback when the cursor is in the last row, else blank ones; it removes rows below
// the cursor first, then moves rows into the scrollback.
func (s *Screen) resizeRows(b *buffer) {
	added := 0
	for len(b.lines) < s.rows {
		if b.base() > 0 && len(b.lines) <= b.y+added+1 {
			above := decodeLine(b.history.popNewest(), s.cols)
			above.resize(max(s.cols, len(b.lines[0].cells)))
			b.lines = append([]*line{above}, b.lines...)
			added++
		} else {
			b.lines = append(b.lines, newLine(len(b.lines[0].cells)))
		}
	}
	for len(b.lines) > s.rows {
		if len(b.lines) > b.y+1 {
			b.lines = b.lines[:len(b.lines)-1]
			continue
		}
		if b.history == nil || b.history.lines >= b.limit {
			b.saved.y = max(b.saved.y-1, 0)
		}
		s.scratch = b.remember(b.lines[0], s.scratch)
		b.lines = b.lines[1:]
		b.y--
	}
	b.y = min(b.y+added, s.rows-1)
}

// layout is a buffer while its lines are laid out anew: all lines encoded, those of the scrollback first.
type layout struct {
	lines  [][]byte
	base   int // lines above the screen
	y      int
	savedY int
	limit  int // lines in all
}

func (s *Screen) reflow(b *buffer, oldCols int) {
	l := layout{base: b.base(), y: b.y, savedY: b.saved.y, limit: s.rows + b.limit}
	if b.history != nil {
		b.history.each(func(encoded []byte) { l.lines = append(l.lines, encoded) })
	}
	for _, row := range b.lines {
		l.lines = append(l.lines, appendLine(nil, row))
	}
	if s.cols > oldCols {
		l.larger(oldCols, s.cols, s.rows)
	} else {
		l.smaller(oldCols, s.cols, s.rows)
	}
	for len(l.lines) < l.base+s.rows {
		l.lines = append(l.lines, []byte{0})
	}
	fresh := &history{}
	for _, encoded := range l.lines[:l.base] {
		if cells, _, _ := head(encoded); cells > s.cols {
			cut := decodeLine(encoded, 0)
			cut.resize(s.cols)
			encoded = appendLine(nil, cut)
		}
		fresh.push(encoded)
	}
	if b.history != nil {
		b.history = fresh
	}
	for i := range b.lines {
		b.lines[i] = decodeLine(l.lines[l.base+i], s.cols)
	}
	b.y, b.saved.y = max(0, min(l.y, s.rows-1)), l.savedY
}

// group decodes the line at i and those that continue it.
func (l *layout) group(i, end, cols int) []*line {
	lines := make([]*line, 0, end-i)
	for ; i < end; i++ {
		lines = append(lines, decodeLine(l.lines[i], cols))
	}
	return lines
}

func wrapped(encoded []byte) bool { return encoded[0]&1 != 0 }

// larger joins wrapped lines in more columns.
func (l *layout) larger(oldCols, cols, rows int) {
	kept := l.lines[:0:0]
	removed := 0
	for start := 0; start < len(l.lines); {
		end := start + 1
		for end < len(l.lines) && wrapped(l.lines[end]) {
			end++
		}
		cursor := l.base + l.y
		if end == start+1 || cursor >= start && cursor < end {
			kept = append(kept, l.lines[start:end]...)
		} else {
			flowed := flow(l.group(start, end, oldCols), oldCols, cols)
			for len(flowed) > 1 && flowed[len(flowed)-1].textLength() == 0 {
				flowed = flowed[:len(flowed)-1]
			}
			for _, row := range flowed {
				kept = append(kept, appendLine(nil, row))
			}
			removed += end - start - len(flowed)
		}
		start = end
	}
	l.lines = kept
	for range removed {
		if l.base > 0 {
			l.base--
		} else {
			l.y = max(l.y-1, 0)
			if len(l.lines) < rows {
				l.lines = append(l.lines, []byte{0})
			}
		}
	}
	if removed > 0 {
		l.savedY = max(l.savedY-removed, 0)
	}
}

// smaller wraps lines that do not fit into fewer columns.
func (l *layout) smaller(oldCols, cols, rows int) {
	var groups [][][]byte // last first
	total := len(l.lines) // with the lines that came in and those that were removed at the end
	cut := 0              // blank lines removed at the end
	for end := len(l.lines); end > 0; {
		start := end - 1
		for start > 0 && wrapped(l.lines[start]) {
			start--
		}
		group := l.lines[start:end]
		cursor := l.base + l.y
		cells, _, _ := head(group[0])
		if cursor >= start && cursor < end || end == start+1 && cells <= cols && !wrapped(group[0]) {
			groups = append(groups, group)
			end = start
			continue
		}
		flowed := flow(l.group(start, end, oldCols), oldCols, cols)
		group = nil
		for _, row := range flowed {
			group = append(group, appendLine(nil, row))
		}
		added := len(group) - (end - start)
		groups = append(groups, group)
		trimmed := 0
		if l.base == 0 && l.y != len(l.lines)-cut-1 {
			trimmed = max(0, l.y-l.limit+added)
		} else {
			trimmed = max(0, len(l.lines)-cut-l.limit+added)
		}
		total += added
		for range added - trimmed {
			switch {
			case l.base == 0 && l.y < rows-1:
				l.y++
				cut++
				total--
			case l.base == 0 || l.base < min(l.limit, total)-rows:
				l.base++
			}
		}
		l.savedY = min(l.savedY+added, l.base+rows-1)
		end = start
	}
	lines := make([][]byte, 0, total+cut)
	for i := len(groups) - 1; i >= 0; i-- {
		lines = append(lines, groups[i]...)
	}
	lines = lines[:max(len(lines)-cut, 1)]
	if over := len(lines) - l.limit; over > 0 {
		lines = lines[over:]
	}
	l.lines = lines
	l.base = max(0, min(l.base, len(lines)-1))
}

// flow lays out lines that continue each other with another number of columns.
func flow(from []*line, oldCols, cols int) []*line {
	to := []*line{newLine(cols)}
	to[0].wrapped = from[0].wrapped
	x := 0
	for i, l := range from {
		n := flowLength(from, i, oldCols)
		for at := 0; at < n; {
			w := 1
			if l.cells[at].kind() == kindWide {
				w = 2
			}
			if x+w > cols {
				to = append(to, newLine(cols))
				to[len(to)-1].wrapped = true
				x = 0
			}
			to[len(to)-1].copyFrom(l, at, x, min(w, n-at))
			x += w
			at += w
		}
	}
	return to
}

// flowLength is how many cells of line i belong to the text: all, unless it is the last or its last column was too
// narrow for the wide character that follows.
func flowLength(from []*line, i, cols int) int {
	if i == len(from)-1 {
		return from[i].textLength()
	}
	last := from[i].cells[cols-1]
	if !last.content() && last.kind() == 0 && from[i+1].cells[0].kind() == kindWide {
		return cols - 1
	}
	return cols
}
