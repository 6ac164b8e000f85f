package screen

import (
	"strings"
	"testing"
)

func FuzzWrite(f *testing.F) {
	for _, seed := range []string{
		"hello\r\nworld", "\x1b[31;1mred\x1b[0m \x1b[38;5;200mx\x1b[48;2;1;2;3my\x1b[K\r\n\n\n\n\n\n\n\n\n",
		"漢字かな交じり文漢字かな交じり文\r\n👩‍💻 e\u0301\u0302", "\x1b[?1049h\x1b[2;5r\x1b[?6h\x1b[3;3Hx\x1b7\x1b[?1049l",
		"\x1b(0lqqk\x1b(B\x0e\x0f", "\x1b]2;title\x07\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "\x1b[4hins\x1b[D\x1b[D\x1b[@\x1b[P",
		"\x1b]4;1;#f80;255;rgb:1234/ab/0\x07\x1b]10;#010203;rgb:f/0/8\x1b\\\x1b]104;1\x07\x1b]112\x07",
		"0123456789012345678901234567890123456789", "\x1b[?7l012345678901234567890123456789\x1b[b", "\x1b#8\x1b[1;3H\x1b[1J\x1b[3J",
		"\x1b[1\"qprot\x1b[0\"q\x1b[?2J\x1b[?1K", "\x1b[3g\x1b[5G\x1bH\t\t\x1b[Z\x1b[2 q\x1b[?25l\x1b[?1000;1006h",
	} {
		f.Add([]byte(seed), uint8(12), uint8(5), uint16(3))
	}
	f.Add([]byte(strings.Repeat("a plain line\r\nanother\r\n\r\n", 80)), uint8(12), uint8(5), uint16(3))
	f.Fuzz(func(t *testing.T, data []byte, cols, rows uint8, split uint16) {
		c, r := int(cols%40), 2+int(rows%11)
		s := New(c, r, 20)
		s.Write(data)
		if err := s.checkInvariants(); err != nil {
			t.Fatalf("%v after %q", err, data)
		}
		parts := New(c, r, 20)
		at := 0
		if len(data) > 0 {
			at = int(split) % len(data)
		}
		parts.Write(data[:at])
		for i := range data[at:] {
			parts.Write(data[at+i : at+i+1])
		}
		if d := differences(s, parts); d != "" {
			t.Fatalf("split at %d of %q differs:\n%s", at, data, d)
		}
		checkReplay(t, s)
		parts.Resize(int(split%45), 2+int(split/45%12))
		if err := parts.checkInvariants(); err != nil {
			t.Fatalf("%v after %q and a resize", err, data)
		}
		parts.Write(data)
		if err := parts.checkInvariants(); err != nil {
			t.Fatalf("%v after a resize and %q", err, data)
		}
		checkReplay(t, parts)
		parts.Trim(int(split))
		checkReplay(t, parts)
	})
}
