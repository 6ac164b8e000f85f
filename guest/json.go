package main

import (
	"encoding/base64"
	"errors"
	"slices"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// jsonReader decodes the requests of a create (identity, exec) without reflection: a restored clone runs every
// piece of code for the first time in its emulator, and encoding/json is fifteen times as much of it. Like
// encoding/json it takes null for an absent value and ignores unknown members. After the first error everything
// it reads is empty.
type jsonReader struct {
	data []byte
	at   int
	err  error
}

const jsonDepth = 64

var errJSON = errors.New("malformed JSON")

// readable is a value that decodes itself.
type readable interface{ readFrom(*jsonReader) }

// writable is a value that encodes itself.
type writable interface{ appendTo([]byte) []byte }

func decodeJSON(data []byte, into readable) error {
	r := &jsonReader{data: data}
	into.readFrom(r)
	if r.next(); r.err == nil && r.at != len(data) {
		r.fail()
	}
	return r.err
}

func (r *jsonReader) fail() {
	if r.err == nil {
		r.err = errJSON
	}
	r.at = len(r.data)
}

// next skips white space and returns the byte after it, 0 at the end.
func (r *jsonReader) next() byte {
	for ; r.at < len(r.data); r.at++ {
		switch r.data[r.at] {
		case ' ', '\t', '\n', '\r':
		default:
			return r.data[r.at]
		}
	}
	return 0
}

// take consumes a byte if it comes next.
func (r *jsonReader) take(wanted byte) bool {
	if r.next() != wanted {
		return false
	}
	r.at++
	return true
}

// word consumes a literal such as null.
func (r *jsonReader) word(wanted string) bool {
	r.next()
	end := r.at + len(wanted)
	if end > len(r.data) || string(r.data[r.at:end]) != wanted {
		return false
	}
	r.at = end
	return true
}

// list calls each for every value between two brackets; each has to read it.
func (r *jsonReader) list(open, end byte, each func()) {
	if r.word("null") {
		return
	}
	if !r.take(open) {
		r.fail()
	}
	if r.take(end) {
		return
	}
	for r.err == nil {
		each()
		if r.take(end) {
			return
		}
		if !r.take(',') {
			r.fail()
		}
	}
}

// object calls member with each name; it has to read the value.
func (r *jsonReader) object(member func(name string)) {
	r.list('{', '}', func() {
		if r.next() != '"' {
			r.fail()
		}
		name := r.text()
		if !r.take(':') {
			r.fail()
		}
		if r.err == nil {
			member(name)
		}
	})
}

func (r *jsonReader) texts() (found []string) {
	r.list('[', ']', func() { found = append(found, r.text()) })
	return found
}

func (r *jsonReader) textsByName() map[string]string {
	found := map[string]string{}
	r.object(func(name string) { found[name] = r.text() })
	return found
}

func (r *jsonReader) integer() int64 {
	if r.word("null") {
		return 0
	}
	start := r.at
	for r.at < len(r.data) && (r.data[r.at] == '-' || r.data[r.at] >= '0' && r.data[r.at] <= '9') {
		r.at++
	}
	digits := r.data[start:r.at]
	number, err := strconv.ParseInt(string(digits), 10, 64)
	if err != nil || len(digits) > 1 && digits[0] == '0' || len(digits) > 2 && digits[0] == '-' && digits[1] == '0' {
		r.fail()
		return 0
	}
	return number
}

func (r *jsonReader) base64() []byte {
	decoded, err := base64.StdEncoding.DecodeString(r.text())
	if err != nil {
		r.fail()
	}
	return decoded
}

func (r *jsonReader) text() string {
	if r.word("null") {
		return ""
	}
	if !r.take('"') {
		r.fail()
	}
	var decoded []byte // nil while the text stands for itself
	for start := r.at; r.at < len(r.data); {
		switch c := r.data[r.at]; {
		case c == '"':
			plain := r.data[start:r.at]
			r.at++
			if decoded != nil {
				plain = append(decoded, plain...)
			}
			if !utf8.Valid(plain) {
				r.fail()
				return ""
			}
			return string(plain)
		case c < ' ':
			r.fail()
		case c == '\\':
			decoded = r.escape(append(decoded, r.data[start:r.at]...))
			start = r.at
		default:
			r.at++
		}
	}
	r.fail()
	return ""
}

// escape decodes the escape sequence that comes next; half of a surrogate pair becomes U+FFFD.
func (r *jsonReader) escape(to []byte) []byte {
	const letters, meanings = `"\/bfnrt`, "\"\\/\b\f\n\r\t"
	if r.at+1 < len(r.data) {
		if i := slices.Index([]byte(letters), r.data[r.at+1]); i >= 0 {
			r.at += 2
			return append(to, meanings[i])
		}
	}
	character := r.unit()
	if utf16.IsSurrogate(character) {
		first := r.at
		if both := utf16.DecodeRune(character, r.unit()); both != utf8.RuneError {
			return utf8.AppendRune(to, both)
		}
		r.at, character = first, utf8.RuneError
	}
	if character < 0 {
		r.fail()
	}
	return utf8.AppendRune(to, character)
}

// unit reads \uXXXX; it returns -1 if that is not what comes next.
func (r *jsonReader) unit() rune {
	if r.at+6 > len(r.data) || r.data[r.at] != '\\' || r.data[r.at+1] != 'u' {
		return -1
	}
	number, err := strconv.ParseUint(string(r.data[r.at+2:r.at+6]), 16, 16)
	if err != nil {
		return -1
	}
	r.at += 6
	return rune(number)
}

// skip reads a value that nothing wants.
func (r *jsonReader) skip() { r.skipTo(jsonDepth) }

func (r *jsonReader) skipTo(depth int) {
	switch c := r.next(); {
	case depth == 0:
		r.fail()
	case c == '{':
		r.object(func(string) { r.skipTo(depth - 1) })
	case c == '[':
		r.list('[', ']', func() { r.skipTo(depth - 1) })
	case c == '"':
		r.text()
	case r.word("true"), r.word("false"), r.word("null"):
	default:
		r.integer()
	}
}

// appendText encodes a string. What is not UTF-8 becomes U+FFFD.
func appendText(to []byte, text string) []byte {
	const hex = "0123456789abcdef"
	to = append(to, '"')
	for _, character := range text {
		switch {
		case character == '"' || character == '\\':
			to = append(to, '\\', byte(character))
		case character < ' ':
			to = append(to, '\\', 'u', '0', '0', hex[character>>4], hex[character&15])
		default:
			to = utf8.AppendRune(to, character)
		}
	}
	return append(to, '"')
}

// appendMember encodes a name, which needs no escapes, and a text; before the first member stands a bracket.
func appendMember(to []byte, name, text string) []byte {
	return appendText(appendName(to, name), text)
}

func appendName(to []byte, name string) []byte {
	if to[len(to)-1] != '{' {
		to = append(to, ',')
	}
	return append(append(append(to, '"'), name...), '"', ':')
}

func appendInteger(to []byte, name string, number int64) []byte {
	return strconv.AppendInt(appendName(to, name), number, 10)
}
