// Package screen emulates a terminal without IO: bytes that programs print go in, and bytes that redraw everything
// (scrollback, screen, cursor, modes, title) on another terminal come out.
//
// It behaves like xterm.js 6, which judges it in the tests and is the usual client. Deliberate differences:
//   - Half of a wide character is never left on the screen. xterm.js leaves halves behind after ICH, SR, DECIC, in insert
//     mode, in the last column without autowrap, and when the window becomes narrower.
//   - Cursor movements relative to the cursor (CUU, CUF, CHA, ...) work in origin mode. xterm.js adds the top margin again.
//     When the alternate screen is entered or left in origin mode, the cursor stays within the margins.
//   - ED 1 in the last column ends the wrapping of the next row; xterm.js changes a line of the scrollback, or throws.
//     DECIC and DECDC in a pending wrap work on the last column; in xterm.js on the first.
//   - DECRC also restores style and colour of the underline, SGR 59 resets that colour, RIS shows the cursor and resets
//     LNM and cursor blinking.
//   - The alternate screen loses what is right of a narrower window. A reflow loses cells that are only coloured and lie
//     beyond the text, and when the scrollback overflows it drops its oldest lines; xterm.js puts one of them at the bottom.
//   - A zero-width character in a pending wrap, or for a cell with one alone, is dropped; a cell holds at most 16 code
//     points; REP repeats at most 65,535 times; OSC and DCS strings beyond 8 KiB are ignored; the size is at most
//     1000 x 500.
//   - Titles are pushed and popped (CSI 22 t, CSI 23 t), which xterm.js does only with an option.
//   - Kept for clients other than xterm.js: reverse video (?5), mouse encodings 1005 and 1015, alternate scroll (?1007).
//
// Queries of colours (OSC 4, 10, 11, 12 with ?) are not answered: the colours are those of the client.
//
// Not kept: keyboard protocols (modifyOtherKeys, kitty), which xterm.js 6.0 does not have, images, the icon name.
package screen

import "unicode/utf8"

// Limits of a screen's size; New and Resize clamp to them.
const (
	MinCols, MaxCols = 2, 1000
	MinRows, MaxRows = 1, 500
)

const (
	maxReplies = 4 << 10
	maxTitles  = 10 // on the stack
)

// Screen is one terminal. It is not safe for concurrent use.
type Screen struct {
	cols, rows int
	main, alt  *buffer
	buf        *buffer // main or alt
	attr       attr
	charset    *charset // in use; usually sets[level]
	sets       [4]*charset
	level      int
	modes      modes
	title      string
	titles     []string
	palette    *palette // nil until the program changes a colour
	parser     parser
	joinWidth  int // width of the character printed last, 0 after anything else
	replies    []byte
	scratch    []byte
	ends       []int // of the lines in writeLines
}

// New makes a blank screen with room for that many lines of scrollback.
func New(cols, rows, scrollback int) *Screen {
	cols, rows = clampSize(cols, rows)
	s := &Screen{cols: cols, rows: rows, modes: defaultModes()}
	s.main = newBuffer(cols, rows, max(scrollback, 0))
	s.alt = &buffer{bottom: rows - 1, tabs: defaultTabs(cols)}
	s.buf = s.main
	return s
}

func clampSize(cols, rows int) (int, int) {
	return max(MinCols, min(cols, MaxCols)), max(MinRows, min(rows, MaxRows))
}

// Write processes what a program printed. Any split of the same bytes gives the same screen.
func (s *Screen) Write(p []byte) {
	unread := len(p) // from here on lines were not looked at by writeLines
	for len(p) > 0 {
		c := p[0]
		if s.parser.state == ground && s.parser.missing == 0 {
			if c-0x20 < 0x5F {
				if len(p) <= unread && len(p) >= minLines && s.scrollsPlainly() {
					lines, seen := s.writeLines(p)
					unread = len(p) - seen
					if lines > 0 {
						p = p[lines:]
						continue
					}
				}
				n := 1
				for n < len(p) && p[n]-0x20 < 0x5F {
					n++
				}
				s.printASCII(p[:n])
				p = p[n:]
				continue
			}
			if c >= 0xC2 {
				if r, n := utf8.DecodeRune(p); n > 1 {
					s.step(r)
					p = p[n:]
					continue
				}
			} else if c < 0x18 {
				s.execute(rune(c))
				p = p[1:]
				continue
			}
		}
		p = p[1:]
		s.decode(c)
	}
}

// decode feeds one byte of UTF-8. Malformed sequences are dropped.
func (s *Screen) decode(c byte) {
	u := &s.parser
	if u.missing > 0 {
		if c&0xC0 == 0x80 {
			u.partial[u.have] = c
			u.have++
			u.missing--
			if u.missing == 0 {
				if r, n := utf8.DecodeRune(u.partial[:u.have]); n == u.have {
					s.step(r)
				}
			}
			return
		}
		u.missing = 0
	}
	switch {
	case c < 0x80:
		s.step(rune(c))
		return
	case c&0xE0 == 0xC0:
		u.missing = 1
	case c&0xF0 == 0xE0:
		u.missing = 2
	case c&0xF8 == 0xF0:
		u.missing = 3
	default:
		return
	}
	u.partial[0], u.have = c, 1
}

// Title is the window title that the program has set.
func (s *Screen) Title() string { return s.title }

// Size is the number of columns and rows.
func (s *Screen) Size() (cols, rows int) { return s.cols, s.rows }

// Held is the number of bytes held for scrollback.
func (s *Screen) Held() int {
	if s.main.history == nil {
		return 0
	}
	return s.main.history.held()
}

// Trim drops the oldest lines of scrollback until at most that many bytes are held.
func (s *Screen) Trim(bytes int) {
	h := s.main.history
	if h == nil {
		return
	}
	before := h.lines
	for h.lines > 0 && h.held() > bytes {
		h.dropOldest()
	}
	if h.held() > bytes || h.lines == 0 {
		h.clear()
	}
	s.main.saved.y = max(0, s.main.saved.y-before+h.lines)
}

// Replies returns the answers to queries (device attributes, cursor position, ...) since the last call. Answers beyond
// 4 KiB are dropped.
func (s *Screen) Replies() []byte {
	replies := s.replies
	s.replies = nil
	return replies
}

func (s *Screen) reply(text string) {
	if len(s.replies)+len(text) <= maxReplies {
		s.replies = append(s.replies, text...)
	}
}
