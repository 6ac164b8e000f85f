package screen

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
)

// written is a screen after some output.
func written(cols, rows int, text ...string) *Screen {
	s := New(cols, rows, 100)
	for _, t := range text {
		s.Write([]byte(t))
	}
	return s
}

// rows is the text of the screen, without trailing blanks.
func (s *Screen) text() string {
	var rows []string
	for _, l := range s.buf.lines {
		rows = append(rows, l.text())
	}
	return strings.TrimRight(strings.Join(rows, "\n"), "\n")
}

func (l *line) text() string {
	var b strings.Builder
	for x := range l.cells {
		switch text := l.textAt(x); {
		case text != "":
			b.WriteString(text)
		case l.cells[x].kind() != kindTail:
			b.WriteByte(' ')
		}
	}
	return strings.TrimRight(b.String(), " ")
}

func (s *Screen) scrollback() []string {
	var lines []string
	if s.main.history != nil {
		s.main.history.each(func(encoded []byte) { lines = append(lines, decodeLine(encoded, s.cols).text()) })
	}
	return lines
}

// looks describes a line for comparison: cells with their attributes, where a blank with more than a background colour is
// a space.
func looks(l *line, cols int) []string {
	var cells []string
	for x := range cols {
		c, a := l.cells[x], l.attrAt(x)
		text := l.textAt(x)
		if text == "" && a.erase() != a && c.kind() == 0 {
			text = " "
		}
		link := ""
		if a.link != nil {
			link = a.link.params + ";" + a.link.uri
		}
		cells = append(cells, fmt.Sprintf("%q %x %x %x %x %s", text, c.kind(), a.fg, a.bg, a.line, link))
	}
	return cells
}

// state is everything that a replay reproduces.
func (s *Screen) state() map[string]any {
	m := map[string]any{
		"size": [2]int{s.cols, s.rows}, "modes": s.modes, "title": s.title, "titles": append([]string{}, s.titles...),
		"alternate": s.buf == s.alt, "attr": [3]uint32{s.attr.fg, s.attr.bg, s.attr.line}, "sets": s.sets, "level": s.level,
		"cursor": [2]int{s.buf.x, s.buf.y}, "join": s.joinWidth, "parser": s.parser.state,
		"partial": string(s.parser.partial[:s.parser.have*min(s.parser.missing, 1)]),
	}
	if s.attr.link != nil {
		m["link"] = *s.attr.link
	}
	buffers := map[string]*buffer{"main": s.main}
	if s.buf == s.alt {
		buffers["alt"] = s.alt
	}
	for name, b := range buffers {
		var lines [][]string
		var wraps []bool
		if b.history != nil {
			b.history.each(func(encoded []byte) {
				l := decodeLine(encoded, s.cols)
				lines, wraps = append(lines, looks(l, s.cols)), append(wraps, l.wrapped)
			})
		}
		for _, l := range b.lines {
			lines, wraps = append(lines, looks(l, s.cols)), append(wraps, l.wrapped)
		}
		wraps[0] = false // nothing above it
		m[name] = map[string]any{"lines": lines, "wraps": wraps, "region": [2]int{b.top, b.bottom}, "tabs": b.tabs}
		m[name+" saved"] = [2]int{b.saved.x, max(0, min(b.saved.y-b.base(), s.rows-1))}
		m[name+" saved attr"] = b.saved.attr
	}
	return m
}

func differences(a, b *Screen) string {
	x, y := a.state(), b.state()
	var out []string
	for name := range x {
		if !reflect.DeepEqual(x[name], y[name]) {
			if lines, ok := x[name].(map[string]any); ok {
				other := y[name].(map[string]any)
				for part := range lines {
					if !reflect.DeepEqual(lines[part], other[part]) {
						out = append(out, name+" "+part+": "+firstDifference(lines[part], other[part]))
					}
				}
				continue
			}
			out = append(out, fmt.Sprintf("%s: %v, %v", name, x[name], y[name]))
		}
	}
	return strings.Join(out, "\n")
}

func firstDifference(a, b any) string {
	x, ok := a.([][]string)
	if !ok {
		return fmt.Sprintf("%v, %v", a, b)
	}
	y := b.([][]string)
	if len(x) != len(y) {
		return fmt.Sprintf("%d, %d lines", len(x), len(y))
	}
	for i := range x {
		for j := range x[i] {
			if x[i][j] != y[i][j] {
				return fmt.Sprintf("line %d column %d: %s, %s", i, j, x[i][j], y[i][j])
			}
		}
	}
	return ""
}

// checkInvariants panics on a screen that no input may lead to.
func (s *Screen) checkInvariants() error {
	for _, b := range []*buffer{s.main, s.buf} {
		if len(b.lines) != s.rows {
			return fmt.Errorf("%d lines, want %d", len(b.lines), s.rows)
		}
		if b.x < 0 || b.x > s.cols || b.y < 0 || b.y >= s.rows {
			return fmt.Errorf("cursor %d %d outside of %d x %d", b.x, b.y, s.cols, s.rows)
		}
		if b.top < 0 || b.bottom >= s.rows || b.top > b.bottom {
			return fmt.Errorf("region %d %d of %d rows", b.top, b.bottom, s.rows)
		}
		for y, l := range b.lines {
			if len(l.cells) != s.cols || l.used > s.cols {
				return fmt.Errorf("line %d: %d cells, %d used", y, len(l.cells), l.used)
			}
			for x, c := range l.cells {
				wide := x > 0 && l.cells[x-1].kind() == kindWide
				if (c.kind() == kindTail) != wide || c.kind() == kindWide && x == s.cols-1 {
					return fmt.Errorf("line %d column %d: half of a wide character", y, x)
				}
				if x >= l.used && c != (cell{}) {
					return fmt.Errorf("line %d column %d: not blank after %d", y, x, l.used)
				}
				if int(c.extra) > len(l.extras) {
					return fmt.Errorf("line %d column %d: extra %d of %d", y, x, c.extra, len(l.extras))
				}
			}
		}
		if b.base() > b.limit {
			return fmt.Errorf("%d lines of scrollback, limit %d", b.base(), b.limit)
		}
	}
	return nil
}

// checkReplay compares a screen with what its replays make of a fresh and of a used one.
func checkReplay(t *testing.T, s *Screen) {
	t.Helper()
	replay := s.Replay(true)
	for _, before := range []string{"", "\x1b[?1049h\x1b[5;10r\x1b[?6h\x1b[31mrubbish\x1b(0\x1b]2;unfinished"} {
		other := New(s.cols, s.rows, s.main.limit)
		other.Write([]byte(before))
		other.Write(replay)
		if d := differences(s, other); d != "" {
			t.Fatalf("replay after %q differs:\n%s\n%q", before, d, replay)
		}
	}
}

func TestPrintedTextWrapsAndScrollsIntoHistory(t *testing.T) {
	s := written(10, 3, "0123456789abc\r\nline\r\nlast\r\nmore")
	if got, want := s.text(), "line\nlast\nmore"; got != want {
		t.Errorf("screen %q, want %q", got, want)
	}
	if got, want := s.scrollback(), []string{"0123456789", "abc"}; !reflect.DeepEqual(got, want) {
		t.Errorf("scrollback %q, want %q", got, want)
	}
	checkReplay(t, s)
}
