package screen

import "strings"

// charset is a national or graphic character set: the byte that selects it and what it replaces.
type charset struct {
	final    byte
	from, to string // to[i] replaces from[i]; both in the same order
}

// charsets are those of xterm.js. ASCII (B) is nil.
var charsets = [...]charset{
	{'0', "`abcdefghijklmnopqrstuvwxyz{|}~", "◆▒␉␌␍␊°±␤␋┘┐┌└┼⎺⎻─⎼⎽├┤┴┬│≤≥π≠£·"},
	{'A', "#", "£"},
	{'4', "#@[\\]{|}~", "£¾i½|¨f¼´"},
	{'C', "[\\]^`{|}~", "ÄÖÅÜéäöåü"},
	{'5', "[\\]^`{|}~", "ÄÖÅÜéäöåü"},
	{'R', "#@[\\]{|}~", "£à°ç§éùè¨"},
	{'Q', "@[\\]^`{|}~", "àâçêîôéùèû"},
	{'K', "@[\\]{|}~", "§ÄÖÜäöüß"},
	{'Y', "#@[\\]`{|}~", "£§°çéùàòèì"},
	{'E', "@[\\]^`{|}~", "ÄÆØÅÜäæøåü"},
	{'6', "@[\\]^`{|}~", "ÄÆØÅÜäæøåü"},
	{'Z', "#@[\\]{|}", "£§¡Ñ¿°ñç"},
	{'H', "@[\\]^`{|}~", "ÉÄÖÅÜéäöåü"},
	{'7', "@[\\]^`{|}~", "ÉÄÖÅÜéäöåü"},
	{'=', "#@[\\]^_`{|}~", "ùàéçêîèôäöüû"},
}

func findCharset(final byte) *charset {
	for i := range charsets {
		if charsets[i].final == final {
			return &charsets[i]
		}
	}
	return nil
}

func (c *charset) translate(r rune) rune {
	if at := strings.IndexRune(c.from, r); at >= 0 && r < 0x7F {
		return []rune(c.to)[at]
	}
	return r
}

// source is a character that translate makes r of.
func (c *charset) source(r rune) (rune, bool) {
	if c == nil || c.translate(r) == r {
		return r, true
	}
	for at, to := range []rune(c.to) {
		if to == r {
			return rune(c.from[at]), true
		}
	}
	return 0, false
}
