package screen

// setAttributes is SGR.
func (s *Screen) setAttributes() {
	p := &s.parser.params
	a := &s.attr
	for i := 0; i < p.n; i++ {
		switch v := p.at(i); {
		case v == 0:
			*a = attr{link: a.link}
		case v == 1:
			a.fg |= fgBold
		case v == 2:
			a.bg |= bgDim
		case v == 3:
			a.bg |= bgItalic
		case v == 4:
			style := int32(1)
			if subs := p.subsOf(i); len(subs) > 0 {
				style = subs[0]
			}
			a.underline(style)
		case v == 5:
			a.fg |= fgBlink
		case v == 7:
			a.fg |= fgInverse
		case v == 8:
			a.fg |= fgInvisible
		case v == 9:
			a.fg |= fgStrike
		case v == 21:
			a.underline(2)
		case v == 22:
			a.fg &^= fgBold
			a.bg &^= bgDim
		case v == 23:
			a.bg &^= bgItalic
		case v == 24:
			a.underline(0)
		case v == 25:
			a.fg &^= fgBlink
		case v == 27:
			a.fg &^= fgInverse
		case v == 28:
			a.fg &^= fgInvisible
		case v == 29:
			a.fg &^= fgStrike
		case v >= 30 && v <= 37:
			a.fg = a.fg&^colourMask | mode16 | uint32(v-30)
		case v == 38 || v == 48 || v == 58:
			i += s.setColour(i)
		case v == 39:
			a.fg &^= colourMask
		case v >= 40 && v <= 47:
			a.bg = a.bg&^colourMask | mode16 | uint32(v-40)
		case v == 49:
			a.bg &^= colourMask
		case v == 53:
			a.bg |= bgOverline
		case v == 55:
			a.bg &^= bgOverline
		case v == 59:
			a.line &^= colourMask
		case v >= 90 && v <= 97:
			a.fg = a.fg&^colourMask | mode16 | uint32(v-90) | 8
		case v >= 100 && v <= 107:
			a.bg = a.bg&^colourMask | mode16 | uint32(v-100) | 8
		}
	}
}

func (a *attr) underline(style int32) {
	if style < 0 || style > 5 {
		style = 1
	}
	a.line = a.line&^underlineMask | uint32(style)*underlineUnit
	if style == 0 {
		a.fg &^= fgUnderline
	} else {
		a.fg |= fgUnderline
	}
}

// setColour reads an extended colour from parameter i on (38;5;n, 38;2;r;g;b, 38:5:n, 38:2::r:g:b and mixtures), and
// returns how many further parameters belong to it.
func (s *Screen) setColour(i int) int {
	p := &s.parser.params
	// Target, format, colour space, then one or three numbers.
	values := [6]int32{0, 0, -1}
	space, advance := 0, 0
	for {
		values[advance+space] = p.values[i+advance]
		if subs := p.subsOf(i + advance); len(subs) > 0 {
			for k, sub := range subs {
				if values[1] == 5 {
					space = 1
				}
				if at := advance + k + 1 + space; at < len(values) {
					values[at] = sub
				}
			}
			break
		}
		if values[1] == 5 && advance+space >= 2 || values[1] == 2 && advance+space >= 5 {
			break
		}
		if values[1] != 0 {
			space = 1
		}
		advance++
		if i+advance >= p.n || advance+space >= len(values) {
			break
		}
	}
	for k := 2; k < len(values); k++ {
		values[k] = max(values[k], 0)
	}
	var target *uint32
	switch values[0] {
	case 38:
		target = &s.attr.fg
	case 48:
		target = &s.attr.bg
	case 58:
		target = &s.attr.line
	default:
		return advance
	}
	switch values[1] {
	case 2:
		*target = *target&^colourMask | modeRGB | uint32(values[3]&255)<<16 | uint32(values[4]&255)<<8 | uint32(values[5]&255)
	case 5:
		*target = *target&^colourMask | mode256 | uint32(values[3]&255)
	}
	return advance
}

// protect is DECSCA.
func (s *Screen) protect(what int) {
	switch what {
	case 1:
		s.attr.bg |= bgProtected
	case 0, 2:
		s.attr.bg &^= bgProtected
	}
}
