package screen

import (
	"encoding/binary"
	"slices"
	"unicode/utf8"
)

// An encoded line is a varint (number of cells and whether it continues the line above), then UTF-8 text with these
// codes between. Characters below 0x20 are never in a cell.
const (
	opBlank = 1 + iota // varint: number of cells that nothing was printed to
	opAttr             // varints: foreground, background, underline
	opJoin             // a combining character for the cell before
	opZero             // a zero-width character in a cell of its own
	opLink             // two strings, each with its length: parameters and address of a hyperlink; empty: none
)

const blockSize = 32 << 10

// history is the scrollback: encoded lines in blocks, oldest first.
type history struct {
	blocks []block
	lines  int
	bytes  int // capacity of all blocks
	spare  []byte
}

type block struct {
	data  []byte
	ends  []uint32 // where each line ends in data
	first int      // lines before it were dropped
}

func (b *block) line(i int) []byte {
	start := uint32(0)
	if i > 0 {
		start = b.ends[i-1]
	}
	return b.data[start:b.ends[i]:b.ends[i]]
}

func (h *history) push(encoded []byte) {
	if n := len(h.blocks); n == 0 || cap(h.blocks[n-1].data)-len(h.blocks[n-1].data) < len(encoded) {
		h.grow(len(encoded))
	}
	last := &h.blocks[len(h.blocks)-1]
	last.data = append(last.data, encoded...)
	last.ends = append(last.ends, uint32(len(last.data)))
	h.lines++
}

func (h *history) grow(need int) {
	data := h.spare
	h.spare = nil
	if need > blockSize || data == nil {
		data = make([]byte, 0, max(need, blockSize))
	}
	h.blocks = append(h.blocks, block{data: data[:0]})
	h.bytes += cap(data)
}

// held counts the memory of the blocks and of their index.
func (h *history) held() int { return h.bytes + 4*h.lines }

func (h *history) dropOldest() {
	b := &h.blocks[0]
	b.first++
	h.lines--
	if b.first == len(b.ends) {
		h.drop(0)
	}
}

func (h *history) drop(i int) {
	data := h.blocks[i].data
	h.bytes -= cap(data)
	if cap(data) == blockSize {
		h.spare = data
	}
	h.blocks = append(h.blocks[:i], h.blocks[i+1:]...)
}

// popNewest removes the newest line; its bytes are valid until the next push.
func (h *history) popNewest() []byte {
	b := &h.blocks[len(h.blocks)-1]
	last := len(b.ends) - 1
	encoded := b.line(last)
	b.data, b.ends = b.data[:len(b.data)-len(encoded)], b.ends[:last]
	h.lines--
	if b.first == len(b.ends) {
		h.drop(len(h.blocks) - 1)
	}
	return encoded
}

// newest counts the newest lines that have at most so many bytes together.
func (h *history) newest(bytes int) int {
	lines := 0
	for i := len(h.blocks) - 1; i >= 0; i-- {
		b := &h.blocks[i]
		for j := len(b.ends) - 1; j >= b.first; j-- {
			if bytes -= len(b.line(j)); bytes < 0 {
				return lines
			}
			lines++
		}
	}
	return lines
}

// each calls f with all lines, oldest first.
func (h *history) each(f func(encoded []byte)) {
	for i := range h.blocks {
		b := &h.blocks[i]
		for j := b.first; j < len(b.ends); j++ {
			f(b.line(j))
		}
	}
}

func (h *history) clear() { *h = history{} }

// head splits an encoded line into its number of cells, its wrapped flag and the rest.
func head(encoded []byte) (cells int, wrapped bool, body []byte) {
	v, n := binary.Uvarint(encoded)
	return int(v >> 1), v&1 != 0, encoded[n:]
}

// appendLine encodes a line.
func appendLine(to []byte, l *line) []byte {
	n := l.trimmed()
	flag := uint64(0)
	if l.wrapped {
		flag = 1
	}
	to = binary.AppendUvarint(to, uint64(n)<<1|flag)
	var now attr
	for x := 0; x < n; {
		c := &l.cells[x]
		if c.extra != 0 {
			if a := l.attrAt(x); a != now {
				to = appendAttr(to, &now, a)
			}
		} else {
			if c.fg != now.fg || c.bg != now.bg || now.line != 0 || now.link != nil {
				to = appendAttr(to, &now, attr{fg: c.fg, bg: c.bg})
			}
			if plain := plainCells(l.cells[x:n]); plain > 0 {
				to = slices.Grow(to, plain)
				text := to[len(to) : len(to)+plain]
				for i := range text {
					text[i] = byte(l.cells[x+i].code)
				}
				to = to[:len(to)+plain]
				x += plain
				continue
			}
		}
		if !c.content() {
			end := x + 1
			for end < n && l.cells[end] == *c {
				end++
			}
			to = binary.AppendUvarint(append(to, opBlank), uint64(end-x))
			x = end
			continue
		}
		if c.kind() == kindZero {
			to = append(to, opZero)
		}
		if c.code&combined == 0 {
			to = utf8.AppendRune(to, rune(c.code&codeMask))
		} else {
			for i, r := range l.textAt(x) {
				if i > 0 {
					to = append(to, opJoin)
				}
				to = utf8.AppendRune(to, r)
			}
		}
		if c.kind() == kindWide {
			x++
		}
		x++
	}
	return to
}

// plainCells counts the cells at the start with ASCII text and the attributes of the first, which has no extra.
func plainCells(cells []cell) int {
	fg, bg := cells[0].fg, cells[0].bg
	for i := range cells {
		if c := &cells[i]; c.code-0x20 >= 0x60 || c.fg != fg || c.bg != bg || c.extra != 0 {
			return i
		}
	}
	return len(cells)
}

func appendAttr(to []byte, now *attr, a attr) []byte {
	if a.fg != now.fg || a.bg != now.bg || a.line != now.line {
		to = append(to, opAttr)
		to = binary.AppendUvarint(to, uint64(a.fg))
		to = binary.AppendUvarint(to, uint64(a.bg))
		to = binary.AppendUvarint(to, uint64(a.line))
	}
	if a.link != now.link {
		var l hyperlink
		if a.link != nil {
			l = *a.link
		}
		to = append(to, opLink)
		to = append(binary.AppendUvarint(to, uint64(len(l.params))), l.params...)
		to = append(binary.AppendUvarint(to, uint64(len(l.uri))), l.uri...)
	}
	*now = a
	return to
}

// reader goes through the body of an encoded line.
type reader struct{ rest []byte }

func (r *reader) varint() uint32 {
	v, n := binary.Uvarint(r.rest)
	r.rest = r.rest[n:]
	return uint32(v)
}

func (r *reader) string() string {
	n := r.varint()
	s := string(r.rest[:n])
	r.rest = r.rest[n:]
	return s
}

func (r *reader) rune() rune {
	c, n := utf8.DecodeRune(r.rest)
	r.rest = r.rest[n:]
	return c
}

// attr reads a change of the attribute, and reports whether there was one.
func (r *reader) attr(now *attr) bool {
	switch r.rest[0] {
	case opAttr:
		r.rest = r.rest[1:]
		now.fg, now.bg, now.line = r.varint(), r.varint(), r.varint()
	case opLink:
		r.rest = r.rest[1:]
		link := hyperlink{params: r.string(), uri: r.string()}
		now.link = nil
		if link.uri != "" {
			now.link = &link
		}
	default:
		return false
	}
	return true
}

// decodeLine reverses appendLine; the line has at least cols columns.
func decodeLine(encoded []byte, cols int) *line {
	n, wrapped, body := head(encoded)
	l := newLine(max(n, cols))
	l.wrapped = wrapped
	var now attr
	blank := cell{}
	x := 0
	r := reader{body}
	for len(r.rest) > 0 {
		if r.attr(&now) {
			blank = l.cellOf(now)
			continue
		}
		switch r.rest[0] {
		case opBlank:
			r.rest = r.rest[1:]
			for range r.varint() {
				l.cells[x] = blank
				x++
			}
		case opJoin:
			r.rest = r.rest[1:]
			l.used = x
			at := x - 1
			if l.cells[at].kind() == kindTail {
				at--
			}
			l.join(at, r.rune())
			if now.extended() {
				blank = l.cellOf(now) // join may have moved the extras
			}
		case opZero:
			r.rest = r.rest[1:]
			l.cells[x] = blank
			l.cells[x].code = uint32(r.rune()) | kindZero
			x++
		default:
			c := r.rune()
			l.cells[x] = blank
			l.cells[x].code = uint32(c)
			x++
			if c >= 0x1100 && width(c) == 2 {
				l.cells[x-1].code |= kindWide
				l.cells[x] = blank
				l.cells[x].code = kindTail
				x++
			}
		}
		l.used = x
	}
	return l
}
