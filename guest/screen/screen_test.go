package screen

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
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

// look is a cell for comparison.
type look struct {
	text               string
	kind, fg, bg, line uint32
	link               hyperlink
}

// looks describes a line; a blank with more than a background colour is a space.
func looks(l *line, cols int) []look {
	cells := make([]look, cols)
	for x := range cells {
		c := l.cells[x]
		if c == (cell{}) {
			continue
		}
		a := l.attrAt(x)
		cells[x] = look{text: l.textAt(x), kind: c.kind(), fg: a.fg, bg: a.bg, line: a.line}
		if cells[x].text == "" && a.erase() != a && c.kind() == 0 {
			cells[x].text = " "
		}
		if a.link != nil {
			cells[x].link = *a.link
		}
	}
	return cells
}

// picture is what a replay reproduces of one buffer.
type picture struct {
	lines  [][]look
	wraps  []bool
	region [2]int
	tabs   []bool
	saved  saved
}

func (s *Screen) picture(b *buffer) picture {
	p := picture{region: [2]int{b.top, b.bottom}, tabs: b.tabs, saved: b.saved}
	p.saved.y = max(0, min(b.saved.y-b.base(), s.rows-1))
	add := func(l *line) { p.lines, p.wraps = append(p.lines, looks(l, s.cols)), append(p.wraps, l.wrapped) }
	if b.history != nil {
		b.history.each(func(encoded []byte) { add(decodeLine(encoded, s.cols)) })
	}
	for _, l := range b.lines {
		add(l)
	}
	p.wraps[0] = false               // nothing above it
	if b == s.buf && b.x == s.cols { // a blank that the cursor is behind is replayed as a space
		if last := &p.lines[b.base()+b.y][s.cols-1]; last.text == "" && last.kind == 0 {
			last.text = " "
		}
	}
	return p
}

// terminal is what a replay reproduces beside the buffers.
type terminal struct {
	size, cursor  [2]int
	modes         modes
	title, titles string
	palette       palette
	alternate     bool
	attr          attr
	link          hyperlink
	sets          [4]*charset
	level, join   int
	state         state
	partial       string
}

func (s *Screen) terminal() terminal {
	t := terminal{
		size: [2]int{s.cols, s.rows}, cursor: [2]int{s.buf.x, s.buf.y}, modes: s.modes, title: s.title,
		titles: strings.Join(s.titles, "\n"), alternate: s.buf == s.alt, attr: s.attr, sets: s.sets, level: s.level,
		join: s.joinWidth, state: s.parser.state,
	}
	if s.palette != nil {
		t.palette = *s.palette
	}
	if s.parser.missing > 0 {
		t.partial = string(s.parser.partial[:s.parser.have])
	}
	if s.attr.link != nil {
		t.link, t.attr.link = *s.attr.link, nil
	}
	return t
}

func differences(a, b *Screen) string {
	if x, y := a.terminal(), b.terminal(); x != y {
		return fmt.Sprintf("%+v\n%+v", x, y)
	}
	if d := a.picture(a.main).difference(b.picture(b.main)); d != "" {
		return "main screen: " + d
	}
	if a.buf == a.alt {
		if d := a.picture(a.alt).difference(b.picture(b.alt)); d != "" {
			return "alternate screen: " + d
		}
	}
	return ""
}

func (p picture) difference(o picture) string {
	switch {
	case len(p.lines) != len(o.lines):
		return fmt.Sprintf("%d, %d lines", len(p.lines), len(o.lines))
	case !slices.Equal(p.wraps, o.wraps):
		return fmt.Sprintf("wrapped lines %v, %v", p.wraps, o.wraps)
	case p.region != o.region || !slices.Equal(p.tabs, o.tabs) || p.saved != o.saved:
		return fmt.Sprintf("%v %v %v, %v %v %v", p.region, p.tabs, p.saved, o.region, o.tabs, o.saved)
	}
	for y := range p.lines {
		for x := range p.lines[y] {
			if p.lines[y][x] != o.lines[y][x] {
				return fmt.Sprintf("line %d column %d: %+v, %+v", y, x, p.lines[y][x], o.lines[y][x])
			}
		}
	}
	return ""
}

// checkInvariants reports a screen that no input may lead to.
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
	const rubbish = "one\r\ntwo\r\n\x1b[?1049h\x1b[2;5r\x1b[?6h\x1b[31mrubbish\x1b(0\x1b[3g\x1b[?1003;1006;5h\x1b]2;unfinished"
	replay := s.Replay(true)
	for _, before := range []string{"", rubbish} {
		other := New(s.cols, s.rows, s.main.limit)
		other.Write([]byte(before))
		other.Write(replay)
		if d := differences(s, other); d != "" {
			t.Fatalf("replay after %q differs:\n%s\n%q", before, d, replay)
		}
	}
	other := New(s.cols, s.rows, s.main.limit)
	other.Write([]byte(rubbish))
	kept := other.main.base()
	other.Write(s.Replay(false))
	if d := s.screenOnly().difference(other.screenOnly()); d != "" || s.terminal() != other.terminal() {
		t.Fatalf("replay without scrollback differs:\n%s\n%+v\n%+v\n%q", d, s.terminal(), other.terminal(), s.Replay(false))
	}
	if other.main.base() != kept {
		t.Fatalf("replay without scrollback left %d lines of scrollback, want %d", other.main.base(), kept)
	}
}

// screenOnly is the picture of what is shown.
func (s *Screen) screenOnly() picture {
	p := s.picture(s.buf)
	p.lines, p.wraps = p.lines[s.buf.base():], p.wraps[s.buf.base():]
	p.wraps[0] = false
	return p
}

func TestChangedColoursAreReplayed(t *testing.T) {
	s := written(10, 3, "\x1b]4;1;#f80;7;rgb:8/80/8;300;#fff;255;rgb:ffff/8000/0\x07\x1b]10;rgb:12/34/56;#abcdef;?\x1b\\")
	want := []string{"1 #f08000", "256 #123456", "257 #abcdef"}
	if got := s.dumpPalette(); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	other := written(10, 3, "\x1b]4;2;#fff;1;#000\x07\x1b]12;#fff\x07")
	other.Write(s.Replay(false))
	if got := other.dumpPalette(); !slices.Equal(got, want) {
		t.Errorf("replayed %q, want %q", got, want)
	}
	s.Write([]byte("\x1bc\x1b]104\x07\x1b]110\x07\x1b]111\x07"))
	other.Write(s.Replay(true))
	if got := other.dumpPalette(); len(got) > 0 {
		t.Errorf("replayed %q after a reset", got)
	}
	if replay := string(written(10, 3, "\x1b]104\x07\x1b]4;1;?\x07plain").Replay(true)); strings.Contains(replay, "\x1b]1") {
		t.Errorf("colours of the client are reset: %q", replay)
	}
}

func TestPrintedTextWrapsAndScrollsIntoHistory(t *testing.T) {
	s := written(10, 3, "0123456789abc\r\nline\r\nlast\r\nmore")
	if got, want := s.text(), "line\nlast\nmore"; got != want {
		t.Errorf("screen %q, want %q", got, want)
	}
	if got, want := s.scrollback(), []string{"0123456789", "abc"}; !slices.Equal(got, want) {
		t.Errorf("scrollback %q, want %q", got, want)
	}
	checkReplay(t, s)
}

func TestScreensAfterControlSequences(t *testing.T) {
	for _, c := range []struct{ name, output, want string }{
		{"cursor position", "\x1b[2;3Hx\x1b[Hy", "y\n  x"},
		{"erase line", "abcdef\x1b[3D\x1b[K\r\nabc\x1b[1K", "abc"},
		{"insert and delete characters", "abcdef\x1b[1;2H\x1b[2@xy\x1b[P", "axycdef"},
		{"insert mode", "abc\r\x1b[4hxy\x1b[4l", "xyabc"},
		{"insert and delete lines", "a\r\nb\r\nc\x1b[1;1H\x1b[L\x1b[3;1H\x1b[M", "\na\nc"},
		{"scroll region", "a\r\nb\r\nc\r\nd\x1b[2;3r\x1b[3;1H\nx", "a\nc\nx\nd"},
		{"origin mode", "\x1b[2;4r\x1b[?6h\x1b[Hx\x1b[C\x1b[Cy", "\nx  y"},
		{"line drawing", "\x1b(0lqk\x1b(Bq", "┌─┐q"},
		{"character set changed behind the last column", "\x1b[2;10Ha\x1b(0", "\n         a"},
		{"repeat", "ab\x1b[3b", "abbbb"},
		{"tabs", "\ta\r\x1b[3g\x1b[4G\x1bH\r\tb", "   b    a"},
		{"no autowrap", "\x1b[?7l0123456789xyz", "012345678z"},
		{"half of a wide character", "漢字\x1b[1;2Hx", " x字"},
		{"combining characters", "e\u0301a\u0300\u0301", "e\u0301a\u0300\u0301"},
		{"wide character that does not fit", "123456789漢", "123456789\n漢"},
		{"alternate screen", "main\x1b[?1049halt\x1b[?1049l", "main"},
		{"malformed UTF-8", "a\ufeff\xff\xc3\xe2\x82b\xed\xa0\x80c\xf8\x80d", "abcd"},
		{"cancelled sequence", "\x1b[3\x18x\x1b]0;t\x1ay", "xy"},
		{"huge numbers", "\x1b[99999999999;99999999999Hx\x1b[2147483647A\x1b[2147483647L\x1b[999999999P", ""},
		{"soft reset", "\x1b[2;3r\x1b[4h\x1b[!pab\rc", "cb"},
		{"full reset", "abc\x1b[5;1H\x1bcx", "x"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := written(10, 4, c.output)
			if got := s.text(); got != c.want {
				t.Errorf("screen %q, want %q", got, c.want)
			}
			if err := s.checkInvariants(); err != nil {
				t.Error(err)
			}
			checkReplay(t, s)
		})
	}
}

// TestRecordedProgramsAreReplayedAtAnyMoment stops recordings in many places, escape sequences and characters included.
func TestRecordedProgramsAreReplayedAtAnyMoment(t *testing.T) {
	for name, output := range recordings(t) {
		t.Run(name, func(t *testing.T) {
			s := New(80, 24, 1000)
			step := max(len(output)/25, 7)
			for at := 0; at < len(output); at += step {
				s.Write(output[at:min(at+step, len(output))])
				checkReplay(t, s)
			}
			if err := s.checkInvariants(); err != nil {
				t.Error(err)
			}
		})
	}
}

func recordings(t testing.TB) map[string][]byte {
	t.Helper()
	found := map[string][]byte{}
	files, err := filepath.Glob("testdata/recordings/*.gz")
	if err != nil || len(files) == 0 {
		t.Fatalf("no recordings: %v", err)
	}
	for _, file := range files {
		packed, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		unpacked, err := gzip.NewReader(bytes.NewReader(packed))
		if err != nil {
			t.Fatal(err)
		}
		output, err := io.ReadAll(unpacked)
		if err != nil {
			t.Fatal(err)
		}
		found[filepath.Base(file)] = output
	}
	return found
}

// TestBulkOutputEqualsSingleBytes prints lines in pieces of many sizes: large ones take a way of their own.
func TestBulkOutputEqualsSingleBytes(t *testing.T) {
	var output []byte
	for i := range 900 {
		output = fmt.Appendf(output, "%s%d%s\r\n", strings.Repeat("x", i%23), i, strings.Repeat(" ", i%3))
		switch i % 300 {
		case 150:
			output = append(output, "\x1b[31mred\r\n\x1b[0m漢字\r\n"...)
		case 250:
			output = append(output, "0123456789012345678901234567890123456789\r\n\x1b7"...)
		}
	}
	want := New(20, 5, 500)
	for i := range output {
		want.Write(output[i : i+1])
	}
	for _, size := range []int{len(output), 4096, 1777, 1100, 64} {
		s := New(20, 5, 500)
		for at := 0; at < len(output); at += size {
			s.Write(output[at:min(at+size, len(output))])
		}
		if d := differences(want, s); d != "" {
			t.Errorf("pieces of %d: %s", size, d)
		}
		if err := s.checkInvariants(); err != nil {
			t.Errorf("pieces of %d: %v", size, err)
		}
		checkReplay(t, s)
	}
}

func TestReplayToAHigherWindowDrawsTheScreenAtItsTop(t *testing.T) {
	for _, lines := range []int{0, 3, 9, 50} {
		s := written(20, 5, strings.Repeat("line\r\n", lines), "\x1b[31mlast\x1b[m$ ")
		other := New(20, 12, 100)
		other.Write(s.ReplayTo(12, true))
		if other.text() != s.text() || other.buf.x != s.buf.x || other.buf.y != s.buf.y {
			t.Errorf("after %d lines: %q at %d,%d instead of %q at %d,%d",
				lines, other.text(), other.buf.x, other.buf.y, s.text(), s.buf.x, s.buf.y)
		}
		if want := max(0, lines+1-5); len(other.scrollback()) != want {
			t.Errorf("after %d lines: %d lines of scrollback instead of %d", lines, len(other.scrollback()), want)
		}
	}
}

func TestTitlesLinksAndReplies(t *testing.T) {
	s := written(20, 4, "\x1b]2;first\x07\x1b[22;0t\x1b]0;sec\u00f6nd\x1b\\")
	if got := s.Title(); got != "secönd" {
		t.Errorf("title %q", got)
	}
	checkReplay(t, s)
	s.Write([]byte("\x1b[23;0t\x1b]8;id=1;http://a.example\x1b\\link\x1b]8;;\x1b\\"))
	if got := s.Title(); got != "first" {
		t.Errorf("title %q after a pop", got)
	}
	if link := s.buf.lines[0].attrAt(3).link; link == nil || link.uri != "http://a.example" {
		t.Errorf("link %v", link)
	}
	s.Write([]byte("\x1b[c\x1b[>c\x1b[5n\x1b[6n\x1b[?2004$p"))
	if got, want := string(s.Replies()), "\x1b[?1;2c\x1b[>0;276;0c\x1b[0n\x1b[1;5R\x1b[?2004;2$y"; got != want {
		t.Errorf("replies %q, want %q", got, want)
	}
	for range 10_000 {
		s.Write([]byte("\x1b[c"))
	}
	if n := len(s.Replies()); n > maxReplies || n < maxReplies/2 {
		t.Errorf("%d bytes of replies", n)
	}
	if s.Replies() != nil {
		t.Error("replies were returned twice")
	}
}

func TestLongStringsAreDropped(t *testing.T) {
	s := written(20, 4, "\x1b]2;"+strings.Repeat("x", 100_000))
	if held := cap(s.parser.text); held > 2*maxString {
		t.Errorf("%d bytes held", held)
	}
	other := New(20, 4, 100)
	other.Write(s.Replay(true))
	for _, screen := range []*Screen{s, other} {
		screen.Write([]byte("xxx\x07shown"))
		if got := screen.text(); got != "shown" || screen.Title() != "" {
			t.Errorf("screen %q, title %q", got, screen.Title())
		}
	}
}

func TestScrollbackIsCompactAndTrimmed(t *testing.T) {
	s := New(80, 24, 10_000)
	for i := range 20_000 {
		fmt.Fprintf(writer{s}, "%-72d\x1b[3%dmred\x1b[0m end\r\n", i, i%8)
	}
	if lines := s.main.base(); lines != 10_000 {
		t.Errorf("%d lines of scrollback", lines)
	}
	if held := s.Held(); held > 3<<19 {
		t.Errorf("%d bytes held for 10,000 lines", held)
	}
	s.Trim(100_000)
	if held := s.Held(); held > 100_000 || held < 50_000 {
		t.Errorf("%d bytes held after trimming to 100,000", held)
	}
	if got := s.scrollback(); !strings.HasPrefix(got[len(got)-1], "19976 ") {
		t.Errorf("newest line of scrollback %q", got[len(got)-1])
	}
	checkReplay(t, s)
	s.Trim(0)
	if s.Held() != 0 || s.main.base() != 0 {
		t.Errorf("%d bytes held after trimming to 0", s.Held())
	}
	checkReplay(t, s)
}

type writer struct{ *Screen }

func (w writer) Write(p []byte) (int, error) {
	w.Screen.Write(p)
	return len(p), nil
}

func TestLargeReplaysLeaveOutTheOldestLines(t *testing.T) {
	s := New(100, 24, 10_000)
	var row []byte
	for x := range 99 {
		row = fmt.Appendf(row, "\x1b[38;2;%d;1;2;48;2;3;4;%dmx", x, x)
	}
	for range 10_000 {
		s.Write(row)
		s.Write([]byte("\x1b[m\r\n"))
	}
	replay := s.Replay(true)
	if len(replay) > maxReplay || len(replay) < maxReplay/2 {
		t.Errorf("%d bytes of replay", len(replay))
	}
	other := New(100, 24, 10_000)
	other.Write(replay)
	if d := s.screenOnly().difference(other.screenOnly()); d != "" {
		t.Error(d)
	}
	if other.main.base() < 1000 || s.main.base() < 2*other.main.base() {
		t.Errorf("%d lines of %d were replayed", other.main.base(), s.main.base())
	}
}

func TestResizeReflowsWrappedLines(t *testing.T) {
	s := written(10, 3, "0123456789abcdef\r\n\r\n\r\n漢字漢字漢字\r\n$ ")
	s.Resize(20, 3)
	if got, want := s.scrollback(), []string{"0123456789abcdef", ""}; !slices.Equal(got, want) {
		t.Errorf("scrollback %q, want %q", got, want)
	}
	if got, want := s.text(), "\n漢字漢字漢字\n$"; got != want {
		t.Errorf("screen %q, want %q", got, want)
	}
	s.Resize(7, 3)
	if got, want := s.text(), "漢字漢\n字漢字\n$"; got != want {
		t.Errorf("screen %q, want %q", got, want)
	}
	s.Resize(7, 6)
	if got, want := s.text(), "ef\n\n\n漢字漢\n字漢字\n$"; got != want {
		t.Errorf("screen %q after growing, want %q", got, want)
	}
	checkReplay(t, s)
	s.Resize(0, -5)
	if cols, rows := s.Size(); cols != MinCols || rows != MinRows {
		t.Errorf("size %d x %d", cols, rows)
	}
	s.Resize(1<<30, 1<<30)
	if cols, rows := s.Size(); cols != MaxCols || rows != MaxRows {
		t.Errorf("size %d x %d", cols, rows)
	}
	if err := s.checkInvariants(); err != nil {
		t.Error(err)
	}
}

func benchmark(b *testing.B, output []byte) {
	s := New(80, 24, 10_000)
	b.SetBytes(int64(len(output)))
	b.ReportAllocs()
	for b.Loop() {
		s.Write(output)
	}
}

func BenchmarkPlainLines(b *testing.B) {
	benchmark(b, []byte(strings.Repeat("drwxr-xr-x 2 root root 4096 Nov 17 07:04 some file name.txt\r\n", 1000)))
}

func BenchmarkLongLines(b *testing.B) {
	benchmark(b, []byte(strings.Repeat(strings.Repeat("0123456789abcdef", 64)+"\r\n", 100)))
}

func BenchmarkColouredLines(b *testing.B) { benchmark(b, recordings(b)["apt-list.gz"]) }

func BenchmarkFullScreenProgram(b *testing.B) { benchmark(b, recordings(b)["vim.gz"]) }

func BenchmarkCJK(b *testing.B) {
	benchmark(b, []byte(strings.Repeat("吾輩は猫である。名前はまだ無い。\r\n", 1000)))
}

func BenchmarkReplay(b *testing.B) {
	s := New(80, 24, 10_000)
	for i := range 10_100 {
		fmt.Fprintf(writer{s}, "\x1b[32m%06d\x1b[0m a line of output as programs print them\r\n", i)
	}
	b.ReportAllocs()
	for b.Loop() {
		b.SetBytes(int64(len(s.Replay(true))))
	}
}
