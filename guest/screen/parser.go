package screen

type state uint8

// States of the parser at https://vt100.net/emu/dec_ansi_parser, with the transitions of xterm.js.
const (
	ground state = iota
	escape
	escapeIntermediate
	csiEntry
	csiParam
	csiIntermediate
	csiIgnore
	ignoredString // SOS, PM, APC
	oscString
	dcsEntry
	dcsParam
	dcsIgnore
	dcsIntermediate
	dcsPassthrough
)

const (
	maxParams = 32
	maxValue  = 1<<31 - 1
	maxString = 8 << 10 // of an OSC or DCS sequence
)

type parser struct {
	state   state
	collect uint32 // prefix and intermediate bytes, one in each byte
	params  params
	text    []byte // OSC from its number on; DCS after its final byte
	tooLong bool
	final   byte // of the DCS sequence

	partial       [4]byte // of a UTF-8 sequence
	have, missing int
}

// params are numbers separated by semicolons; each may have numbers after colons (-1 when empty).
type params struct {
	values   [maxParams]int32
	n        int
	subs     [maxParams]int32
	subStart [maxParams + 1]uint8 // subs[subStart[i]:subEnd[i]] belong to values[i]
	subEnd   [maxParams]uint8
	nsubs    int
	inSub    bool
	full     bool // further numbers are dropped
	subFull  bool
}

func (p *params) reset() {
	p.values[0], p.n, p.nsubs = 0, 1, 0
	p.subStart[0], p.subEnd[0] = 0, 0
	p.inSub, p.full, p.subFull = false, false, false
}

func (p *params) add(c rune) {
	switch {
	case c == ';':
		p.inSub = false
		if p.n == maxParams {
			p.full = true
			return
		}
		p.values[p.n] = 0
		p.subStart[p.n], p.subEnd[p.n] = uint8(p.nsubs), uint8(p.nsubs)
		p.n++
	case c == ':':
		p.inSub = true
		if p.full || p.nsubs == maxParams {
			p.subFull = true
			return
		}
		p.subs[p.nsubs] = -1
		p.nsubs++
		p.subEnd[p.n-1]++
	case p.full || p.inSub && (p.subFull || p.nsubs == 0):
	case p.inSub:
		p.subs[p.nsubs-1] = digit(max(p.subs[p.nsubs-1], 0), c)
	default:
		p.values[p.n-1] = digit(p.values[p.n-1], c)
	}
}

func digit(v int32, c rune) int32 { return int32(min(int64(v)*10+int64(c-'0'), maxValue)) }

func (p *params) subsOf(i int) []int32 { return p.subs[p.subStart[i]:p.subEnd[i]] }

// at is parameter i, 0 if it is absent.
func (p *params) at(i int) int {
	if i < p.n {
		return int(p.values[i])
	}
	return 0
}

// count is parameter i where 0 and absent mean 1.
func (p *params) count(i int) int { return max(p.at(i), 1) }

func (s *Screen) clearSequence() {
	s.parser.params.reset()
	s.parser.collect = 0
}

// step processes one character in any state.
func (s *Screen) step(c rune) {
	p := &s.parser
	if c >= 0xA0 {
		s.stepUnicode(c)
		return
	}
	if c == 0x18 || c == 0x1A || c == 0x1B || c >= 0x80 {
		s.stepAnywhere(c)
		return
	}
	switch p.state {
	case ground:
		if c < 0x20 {
			s.execute(c)
		} else if c != 0x7F {
			s.print(c)
		}
		return
	case oscString:
		if c == 0x07 {
			s.endOSC(true)
			p.state = ground
		} else if c >= 0x20 {
			s.put(byte(c))
		}
		return
	case ignoredString, dcsIgnore:
		return
	case dcsPassthrough:
		if c != 0x7F {
			s.put(byte(c))
		}
		return
	case dcsEntry, dcsParam, dcsIntermediate:
		if c >= 0x20 && c != 0x7F {
			s.stepDCS(c)
		}
		return
	}
	// Escape and control sequences: control characters take effect within them.
	if c < 0x20 {
		s.execute(c)
		return
	}
	if c == 0x7F {
		return
	}
	switch p.state {
	case escape:
		s.stepEscape(c)
	case escapeIntermediate:
		if c < 0x30 {
			s.collect(c)
		} else {
			p.state = ground
			s.dispatchEscape(byte(c))
		}
	case csiIgnore:
		if c >= 0x40 {
			p.state = ground
		}
	default:
		s.stepCSI(c)
	}
}

func (s *Screen) stepUnicode(c rune) {
	if c == 0xFEFF { // byte order mark
		return
	}
	switch s.parser.state {
	case ground:
		s.print(c)
	case oscString, dcsPassthrough:
		s.put([]byte(string(c))...)
	case csiIgnore, dcsIgnore:
	default:
		s.parser.state = ground
	}
}

// stepAnywhere processes the characters that end any sequence: ESC, CAN, SUB and C1.
func (s *Screen) stepAnywhere(c rune) {
	p := &s.parser
	before := p.state
	if c == 0x1B || c == 0x9C || c == 0x18 || c == 0x1A {
		done := c == 0x1B || c == 0x9C
		if before == oscString {
			s.endOSC(done)
		} else if before == dcsPassthrough {
			s.endDCS(done)
		}
	}
	p.state = ground
	switch c {
	case 0x1B:
		s.clearSequence()
		p.state = escape
	case 0x9B:
		s.clearSequence()
		p.state = csiEntry
	case 0x90:
		s.clearSequence()
		p.state = dcsEntry
	case 0x9D:
		s.startString()
		p.state = oscString
	case 0x98, 0x9E, 0x9F:
		p.state = ignoredString
	case 0x9C:
	default:
		if before != oscString && before != dcsPassthrough || c >= 0x80 {
			s.execute(c)
		}
	}
}

func (s *Screen) collect(c rune) {
	p := &s.parser
	if p.collect>>16 != 0 {
		p.collect = 0xFFFFFF // too many: no sequence has them
	} else {
		p.collect = p.collect<<8 | uint32(c)
	}
	switch p.state {
	case escape:
		p.state = escapeIntermediate
	case csiEntry, csiParam:
		p.state = csiIntermediate
	case dcsEntry, dcsParam:
		p.state = dcsIntermediate
	}
}

func (s *Screen) stepEscape(c rune) {
	p := &s.parser
	switch {
	case c < 0x30:
		s.collect(c)
	case c == '[':
		s.clearSequence()
		p.state = csiEntry
	case c == ']':
		s.startString()
		p.state = oscString
	case c == 'P':
		s.clearSequence()
		p.state = dcsEntry
	case c == 'X' || c == '^' || c == '_':
		p.state = ignoredString
	default:
		p.state = ground
		s.dispatchEscape(byte(c))
	}
}

func (s *Screen) stepCSI(c rune) {
	p := &s.parser
	switch {
	case c >= 0x40:
		p.state = ground
		s.dispatchCSI(byte(c))
	case c < 0x30:
		s.collect(c)
	case p.state == csiIntermediate:
		p.state = csiIgnore
	case c < 0x3C:
		p.state = csiParam
		p.params.add(c)
	case p.state == csiEntry:
		p.collect = uint32(c)
		p.state = csiParam
	default:
		p.state = csiIgnore
	}
}

func (s *Screen) stepDCS(c rune) {
	p := &s.parser
	switch {
	case c >= 0x40:
		p.state = dcsPassthrough
		p.final = byte(c)
		s.startString()
	case c < 0x30:
		s.collect(c)
	case p.state == dcsIntermediate:
		p.state = dcsIgnore
	case c < 0x3C:
		p.state = dcsParam
		p.params.add(c)
	case p.state == dcsEntry:
		p.collect = uint32(c)
		p.state = dcsParam
	default:
		p.state = dcsIgnore
	}
}

func (s *Screen) startString() { s.parser.text, s.parser.tooLong = s.parser.text[:0], false }

func (s *Screen) put(bytes ...byte) {
	p := &s.parser
	if len(p.text)+len(bytes) > maxString {
		p.text, p.tooLong = nil, true
	}
	if !p.tooLong {
		p.text = append(p.text, bytes...)
	}
}

func (s *Screen) execute(c rune) {
	b := s.buf
	switch c {
	case '\n', '\v', '\f':
		s.lineFeed()
	case '\r':
		b.x = 0
	case '\b':
		s.backspace()
	case '\t':
		if b.x < s.cols {
			b.x = b.nextTab(b.x)
		}
	case 0x0E:
		s.shiftSet(1)
	case 0x0F:
		s.shiftSet(0)
	case 0x84:
		s.index()
	case 0x85:
		b.x = 0
		s.index()
	case 0x88:
		s.setTab()
	}
	s.joinWidth = 0
}

func (s *Screen) dispatchEscape(final byte) {
	s.joinWidth = 0
	switch s.parser.collect {
	case 0:
		s.escape(final)
	case '#':
		if final == '8' {
			s.alignmentTest()
		}
	case '%':
		if final == '@' || final == 'G' {
			s.shiftSet(0)
			s.setCharset(0, nil)
		}
	case '(':
		s.designate(0, final)
	case ')', '-':
		s.designate(1, final)
	case '*', '.':
		s.designate(2, final)
	case '+':
		s.designate(3, final)
	}
}

func (s *Screen) escape(final byte) {
	switch final {
	case '7':
		s.saveCursor()
	case '8':
		s.restoreCursor()
	case 'D':
		s.index()
	case 'E':
		s.buf.x = 0
		s.index()
	case 'H':
		s.setTab()
	case 'M':
		s.reverseIndex()
	case '=':
		s.modes.keypad = true
	case '>':
		s.modes.keypad = false
	case 'c':
		s.reset()
	case 'n', '}':
		s.shiftSet(2)
	case 'o', '|':
		s.shiftSet(3)
	case '~':
		s.shiftSet(1)
	}
}

func (s *Screen) designate(set int, final byte) {
	c := findCharset(final)
	if c != nil || final == 'B' {
		s.setCharset(set, c)
	}
}

func (s *Screen) setCharset(set int, c *charset) {
	s.sets[set] = c
	if s.level == set {
		s.charset = c
	}
}

func (s *Screen) shiftSet(level int) { s.level, s.charset = level, s.sets[level] }
