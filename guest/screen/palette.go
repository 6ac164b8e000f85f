package screen

import (
	"math"
	"strconv"
	"strings"
)

// Colours after the 256 of the palette.
const (
	foreground = 256 + iota
	background
	cursorColour
	colours
)

const colourSet = 1 << 24

// palette has the colours that the program has changed (OSC 4, 10, 11, 12): colourSet and RGB, or 0.
type palette [colours]uint32

// changeColours is OSC 4: pairs of a number and a colour.
func (s *Screen) changeColours(data string) {
	fields := strings.Split(data, ";")
	for ; len(fields) > 1; fields = fields[2:] {
		if number, ok := colourNumber(fields[0]); ok {
			s.changeColour(number, fields[1])
		}
	}
}

// changeSpecialColours is OSC 10, 11 and 12: further colours are for the numbers after it.
func (s *Screen) changeSpecialColours(number int, data string) {
	for _, colour := range strings.Split(data, ";") {
		if number < colours {
			s.changeColour(number, colour)
		}
		number++
	}
}

func (s *Screen) changeColour(number int, text string) {
	colour, ok := parseColour(text)
	if !ok {
		return
	}
	if s.palette == nil {
		s.palette = &palette{}
	}
	s.palette[number] = colourSet | colour
}

// resetColours is OSC 104: the colours with these numbers, or the 256 of the palette.
func (s *Screen) resetColours(data string) {
	if s.palette == nil {
		return
	}
	if data == "" {
		clear(s.palette[:foreground])
		return
	}
	for _, text := range strings.Split(data, ";") {
		if number, ok := colourNumber(text); ok {
			s.palette[number] = 0
		}
	}
}

// resetSpecialColour is OSC 110, 111 and 112.
func (s *Screen) resetSpecialColour(number int) {
	if s.palette != nil {
		s.palette[number] = 0
	}
}

func colourNumber(text string) (int, bool) {
	if text == "" || strings.Trim(text, "0123456789") != "" {
		return 0, false
	}
	number, err := strconv.Atoi(text)
	return number, err == nil && number < foreground
}

// parseColour reads rgb:R/G/B and #RGB with 1 to 4 hexadecimal digits for each part. The first are scaled to 8 bits, the
// others are shifted.
func parseColour(text string) (colour uint32, ok bool) {
	text = strings.ToLower(text)
	parts, scaled := strings.Split(strings.TrimPrefix(text, "rgb:"), "/"), strings.HasPrefix(text, "rgb:")
	if digits, found := strings.CutPrefix(text, "#"); found {
		if len(digits)%3 != 0 {
			return 0, false
		}
		n := len(digits) / 3
		parts = []string{digits[:n], digits[n : 2*n], digits[2*n:]}
	} else if !scaled {
		return 0, false
	}
	for _, part := range parts {
		bits := 4 * len(part)
		if len(parts) != 3 || bits != 4*len(parts[0]) || bits > 16 || strings.Trim(part, "0123456789abcdef") != "" {
			return 0, false
		}
		value, err := strconv.ParseUint(part, 16, 16)
		if err != nil {
			return 0, false
		}
		switch {
		case scaled:
			value = uint64(math.Round(float64(value) / float64(uint64(1)<<bits-1) * 255))
		case bits == 4:
			value <<= 4
		default:
			value >>= bits - 8
		}
		colour = colour<<8 | uint32(value)
	}
	return colour, true
}

// colours sets the colours that the program has changed. A program that never changed one leaves those of the client.
func (e *emitter) colours(s *Screen) {
	if s.palette == nil {
		return
	}
	e.text("\x1b]104\x1b\\\x1b]110\x1b\\\x1b]111\x1b\\\x1b]112\x1b\\")
	for number, colour := range s.palette {
		if colour == 0 {
			continue
		}
		e.text("\x1b]")
		if number < foreground {
			e.text("4;")
			e.out = strconv.AppendInt(e.out, int64(number), 10)
		} else {
			e.out = strconv.AppendInt(e.out, int64(10+number-foreground), 10)
		}
		e.text(";#")
		for shift := 20; shift >= 0; shift -= 4 {
			e.out = append(e.out, "0123456789abcdef"[colour>>shift&0xF])
		}
		e.text("\x1b\\")
	}
}
