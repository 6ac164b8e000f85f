package screen

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"testing"
)

// A test that compares with another emulator runs the test binary with STEAD_SCREEN_DUMP=1: it reads cases as lines of
// JSON and answers each with the state of the screen and its replay.
func TestMain(m *testing.M) {
	if os.Getenv("STEAD_SCREEN_DUMP") == "" {
		os.Exit(m.Run())
	}
	in := bufio.NewReaderSize(os.Stdin, 1<<20)
	out := bufio.NewWriter(os.Stdout)
	decoder, encoder := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var c dumpCase
		if decoder.Decode(&c) != nil {
			return
		}
		if err := encoder.Encode(c.run()); err != nil {
			panic(err)
		}
		out.Flush()
	}
}

type dumpCase struct {
	Cols, Rows, Scrollback int
	Steps                  []struct {
		Write  []byte
		Resize []int
	}
}

type dumpLine struct {
	Wrapped bool    `json:"wrapped"`
	Cells   [][]any `json:"cells"` // text, width, foreground, background, underline, link; without trailing blanks
}

func (c dumpCase) run() map[string]any {
	s := New(c.Cols, c.Rows, c.Scrollback)
	for _, step := range c.Steps {
		if step.Resize != nil {
			s.Resize(step.Resize[0], step.Resize[1])
		}
		s.Write(step.Write)
	}
	if err := s.checkInvariants(); err != nil {
		return map[string]any{"error": err.Error()}
	}
	return map[string]any{
		"alternate": s.buf == s.alt,
		"main":      s.dump(s.main),
		"alt":       s.dump(s.alt),
		"cursor":    []int{s.buf.x, s.buf.y},
		"title":     s.title,
		"palette":   s.dumpPalette(),
		"coloured":  s.palette != nil,
		"replies":   string(s.Replies()),
		"replay":    s.Replay(true),
		"screen":    s.Replay(false),
		"modes": map[string]any{
			"insert": s.modes.insert, "newLine": s.modes.newLine, "cursorKeys": s.modes.cursorKeys, "keypad": s.modes.keypad,
			"origin": s.modes.origin, "wrap": s.modes.wrap, "reverseWrap": s.modes.reverseWrap, "blink": s.modes.blink,
			"bracketedPaste": s.modes.bracketedPaste, "focus": s.modes.focus, "synchronized": s.modes.synchronized,
			"hidden": s.modes.hidden, "cursorStyle": s.modes.cursorStyle, "mouse": s.modes.mouse, "mouseEncoding": s.modes.mouseEncoding,
		},
	}
}

// dumpPalette has the colours that differ from the client's: number and RGB.
func (s *Screen) dumpPalette() []string {
	changed := []string{}
	if s.palette != nil {
		for number, colour := range s.palette {
			if colour != 0 {
				changed = append(changed, fmt.Sprintf("%d #%06x", number, colour&0xFFFFFF))
			}
		}
	}
	return changed
}

func (s *Screen) dump(b *buffer) map[string]any {
	lines := []dumpLine{}
	add := func(l *line) {
		cells := [][]any{}
		for x, c := range l.cells[:l.trimmed()] {
			width := map[uint32]int{0: 1, kindWide: 2, kindTail: 0, kindZero: 0}[c.kind()]
			a, uri := l.attrAt(x), ""
			if a.link != nil {
				uri = a.link.uri
			}
			underline := a.line
			if a.fg&fgUnderline == 0 {
				underline = 0
			} else if underline&underlineMask == 0 {
				underline |= underlineUnit
			}
			cells = append(cells, []any{l.textAt(x), width, a.fg, a.bg, underline, uri})
		}
		lines = append(lines, dumpLine{l.wrapped, cells})
	}
	if b.history != nil {
		b.history.each(func(encoded []byte) { add(decodeLine(encoded, s.cols)) })
	}
	for _, l := range b.lines {
		add(l)
	}
	tabs := []int{}
	for x, set := range b.tabs {
		if set {
			tabs = append(tabs, x)
		}
	}
	return map[string]any{
		"lines": lines, "base": b.base(), "region": []int{b.top, b.bottom}, "tabs": tabs,
		"saved": []int{b.saved.x, max(0, min(b.saved.y-b.base(), s.rows-1))},
	}
}
