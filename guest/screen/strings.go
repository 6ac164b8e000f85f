package screen

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
)

// endOSC carries out an operating system command: titles, hyperlinks and colours.
func (s *Screen) endOSC(complete bool) {
	s.joinWidth = 0
	p := &s.parser
	s.clearSequence()
	if !complete || p.tooLong {
		return
	}
	number, data, _ := bytes.Cut(p.text, []byte{';'})
	switch string(number) {
	case "0", "2":
		s.title = string(data)
	case "4":
		s.changeColours(string(data))
	case "8":
		s.setLink(string(data))
	case "10":
		s.changeSpecialColours(foreground, string(data))
	case "11":
		s.changeSpecialColours(background, string(data))
	case "12":
		s.changeSpecialColours(cursorColour, string(data))
	case "104":
		s.resetColours(string(data))
	case "110":
		s.resetSpecialColour(foreground)
	case "111":
		s.resetSpecialColour(background)
	case "112":
		s.resetSpecialColour(cursorColour)
	}
}

func (s *Screen) setLink(data string) {
	params, uri, found := strings.Cut(data, ";")
	params = strings.TrimSpace(params)
	switch {
	case !found:
	case uri != "":
		s.attr.link = &hyperlink{params, uri}
	case params == "":
		s.attr.link = nil
	}
}

// endDCS carries out a device control string: DECRQSS is the only one.
func (s *Screen) endDCS(complete bool) {
	s.joinWidth = 0
	p := &s.parser
	known := complete && !p.tooLong && p.collect == '$' && p.final == 'q'
	s.clearSequence()
	if !known {
		return
	}
	answer := "0$r"
	switch string(p.text) {
	case `"q`:
		protected := 0
		if s.attr.bg&bgProtected != 0 {
			protected = 1
		}
		answer = fmt.Sprintf(`1$r%d"q`, protected)
	case `"p`:
		answer = `1$r61;1"p`
	case "r":
		answer = fmt.Sprintf("1$r%d;%dr", s.buf.top+1, s.buf.bottom+1)
	case "m":
		answer = "1$r0m"
	case " q":
		answer = "1$r" + strconv.Itoa(max(s.modes.cursorStyle, 1)) + " q"
	}
	s.reply("\x1bP" + answer + "\x1b\\")
}
