package screen

// buffer is the main or the alternate screen. x may be cols: the next character wraps first (pending wrap).
type buffer struct {
	lines       []*line
	x, y        int
	top, bottom int // scroll region, both inclusive
	tabs        []bool
	saved       saved
	history     *history // nil on the alternate screen
	limit       int      // lines of history
}

// saved is what DECSC saves. y counts from the oldest line of the history, as in xterm.js.
type saved struct {
	x, y    int
	attr    attr
	charset *charset
}

func newBuffer(cols, rows, limit int) *buffer {
	b := &buffer{bottom: rows - 1, limit: limit, tabs: defaultTabs(cols)}
	if limit > 0 {
		b.history = &history{}
	}
	b.blankLines(cols, rows, attr{})
	return b
}

func defaultTabs(cols int) []bool {
	tabs := make([]bool, cols)
	for x := 0; x < cols; x += 8 {
		tabs[x] = true
	}
	return tabs
}

func (b *buffer) blankLines(cols, rows int, a attr) {
	b.lines = make([]*line, rows)
	for i := range b.lines {
		b.lines[i] = newLine(cols)
		b.lines[i].reset(a, false)
	}
}

// base is the number of lines above the screen.
func (b *buffer) base() int {
	if b.history == nil {
		return 0
	}
	return b.history.lines
}

// remember appends a line to the history, which loses its oldest line when it is full.
func (b *buffer) remember(l *line, scratch []byte) []byte {
	if b.history == nil {
		return scratch
	}
	scratch = appendLine(scratch[:0], l)
	b.rememberEncoded(scratch)
	return scratch
}

func (b *buffer) rememberEncoded(line []byte) {
	if b.history.lines >= b.limit {
		b.history.dropOldest()
	}
	b.history.push(line)
}

// shift moves lines[top:bottom+1] up by n, or down by -n; the lines that come in are blank.
func (b *buffer) shift(top, bottom, n int, a attr) {
	height := bottom - top + 1
	n = max(-height, min(n, height))
	region := b.lines[top : bottom+1]
	for range n { // up
		first := region[0]
		copy(region, region[1:])
		first.reset(a, false)
		region[height-1] = first
	}
	for range -n { // down
		last := region[height-1]
		copy(region[1:], region[:height-1])
		last.reset(a, false)
		region[0] = last
	}
}

func (b *buffer) nextTab(x int) int {
	for x++; x < len(b.tabs); x++ {
		if b.tabs[x] {
			return x
		}
	}
	return len(b.tabs) - 1
}

func (b *buffer) previousTab(x int) int {
	for x--; x > 0; x-- {
		if x < len(b.tabs) && b.tabs[x] {
			return x
		}
	}
	return 0
}

// extendTabs keeps the tab stops and adds one every 8 columns after the last.
func (b *buffer) extendTabs(cols int) {
	tabs := make([]bool, cols)
	copy(tabs, b.tabs)
	last := cols - 1
	for last > 0 && !tabs[last] {
		last--
	}
	for x := last; x < cols; x += 8 {
		tabs[x] = true
	}
	b.tabs = tabs
}
