package screen

import "fmt"

// modes are what DECSET, SM, DECSCUSR and a few escape sequences switch.
type modes struct {
	insert         bool // IRM
	newLine        bool // LNM
	cursorKeys     bool // DECCKM
	keypad         bool // DECNKM
	origin         bool // DECOM
	wrap           bool // DECAWM
	reverseWrap    bool
	blink          bool // ?12
	bracketedPaste bool
	focus          bool
	synchronized   bool
	hidden         bool // cursor
	cursorStyle    int  // DECSCUSR, 0 to 6
	mouse          int  // 0, 9, 1000, 1002 or 1003
	mouseEncoding  int  // 0, 1006 or 1016
	others         [len(otherModes)]bool
}

// otherModes are private modes without an effect on the screen that xterm.js does not know: only replayed.
var otherModes = [...]int{5, 1005, 1007, 1015}

func defaultModes() modes { return modes{wrap: true} }

// flag finds the private mode that is a plain switch.
func (m *modes) flag(mode int) *bool {
	switch mode {
	case 1:
		return &m.cursorKeys
	case 7:
		return &m.wrap
	case 12:
		return &m.blink
	case 45:
		return &m.reverseWrap
	case 66:
		return &m.keypad
	case 1004:
		return &m.focus
	case 2004:
		return &m.bracketedPaste
	case 2026:
		return &m.synchronized
	}
	for i, other := range otherModes {
		if other == mode {
			return &m.others[i]
		}
	}
	return nil
}

func (s *Screen) setMode(on bool) {
	p := &s.parser.params
	for i := range p.n {
		switch p.at(i) {
		case 4:
			s.modes.insert = on
		case 20:
			s.modes.newLine = on
		}
	}
}

func (s *Screen) setPrivateMode(on bool) {
	p := &s.parser.params
	for i := range p.n {
		mode := p.at(i)
		if flag := s.modes.flag(mode); flag != nil {
			*flag = on
			continue
		}
		switch mode {
		case 2:
			if on {
				s.sets, s.charset = [4]*charset{}, nil
			}
		case 6:
			s.modes.origin = on
			s.moveTo(0, 0)
		case 9, 1000, 1002, 1003:
			s.modes.mouse = 0
			if on {
				s.modes.mouse = mode
			}
		case 1006, 1016:
			s.modes.mouseEncoding = 0
			if on {
				s.modes.mouseEncoding = mode
			}
		case 25:
			s.modes.hidden = !on
		case 47, 1047, 1048, 1049:
			s.setAlternate(mode, on)
		}
	}
}

func (s *Screen) setAlternate(mode int, on bool) {
	if on {
		if mode == 1048 || mode == 1049 {
			s.saveCursor()
		}
		if mode != 1048 {
			s.enterAlternate()
		}
		return
	}
	if mode != 1048 {
		s.leaveAlternate()
	}
	if mode == 1048 || mode == 1049 {
		s.restoreCursor()
	}
}

func (s *Screen) enterAlternate() {
	if s.buf == s.alt {
		return
	}
	s.alt.blankLines(s.cols, s.rows, s.attr.erase())
	s.alt.x, s.alt.y = s.main.x, s.main.y
	s.buf = s.alt
	s.clampToOrigin()
}

func (s *Screen) leaveAlternate() {
	if s.buf == s.main {
		return
	}
	s.main.x, s.main.y = s.alt.x, s.alt.y
	s.alt = &buffer{bottom: s.rows - 1, tabs: defaultTabs(s.cols), saved: s.alt.saved}
	s.buf = s.main
	s.clampToOrigin()
}

// clampToOrigin keeps the cursor in the scroll region in origin mode: the two screens may have different ones.
func (s *Screen) clampToOrigin() {
	if b := s.buf; s.modes.origin {
		b.y = max(b.top, min(b.y, b.bottom))
	}
}

// reset is RIS. Title and colours stay, as in xterm.js.
func (s *Screen) reset() {
	s.modes = defaultModes()
	s.attr = attr{}
	s.charset, s.sets, s.level = nil, [4]*charset{}, 0
	s.main = newBuffer(s.cols, s.rows, s.main.limit)
	s.alt = &buffer{bottom: s.rows - 1, tabs: defaultTabs(s.cols)}
	s.buf = s.main
}

// softReset is DECSTR.
func (s *Screen) softReset() {
	kept := s.modes
	s.modes = defaultModes()
	s.modes.newLine, s.modes.blink = kept.newLine, kept.blink
	s.modes.mouse, s.modes.mouseEncoding, s.modes.others = kept.mouse, kept.mouseEncoding, kept.others
	s.attr = attr{}
	s.charset, s.sets, s.level = nil, [4]*charset{}, 0
	b := s.buf
	b.top, b.bottom = 0, s.rows-1
	b.saved = saved{y: b.base()}
}

// reportMode is DECRQM.
func (s *Screen) reportMode(private bool) {
	mode := s.parser.params.at(0)
	const unknown, permanentlySet, permanentlyReset = 0, 3, 4
	state := func(on bool) int {
		if on {
			return 1
		}
		return 2
	}
	value := unknown
	if !private {
		switch mode {
		case 2:
			value = permanentlyReset
		case 4:
			value = state(s.modes.insert)
		case 12:
			value = permanentlySet
		case 20:
			value = state(s.modes.newLine)
		}
		s.reply(fmt.Sprintf("\x1b[%d;%d$y", mode, value))
		return
	}
	switch mode {
	case 6:
		value = state(s.modes.origin)
	case 8:
		value = permanentlySet
	case 9, 1000, 1002, 1003:
		value = state(s.modes.mouse == mode)
	case 25:
		value = state(!s.modes.hidden)
	case 67:
		value = permanentlyReset
	case 1006, 1016:
		value = state(s.modes.mouseEncoding == mode)
	case 1048:
		value = state(true)
	case 47, 1047, 1049:
		value = state(s.buf == s.alt)
	default:
		if flag := s.modes.flag(mode); flag != nil {
			value = state(*flag)
		}
	}
	s.reply(fmt.Sprintf("\x1b[?%d;%d$y", mode, value))
}
