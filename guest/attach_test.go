package main

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"
)

func TestTheFirstClientOfATerminalIsSentItsOutputAsPrinted(t *testing.T) {
	const redrawn = "\x18\x1bc"
	h := start(t)
	screens := func(command string, printed int64, query string) []string {
		t.Helper()
		begun := h.startSession("", m{"kind": "terminal", "argv": []string{"sh", "-c", command + "; exec cat"}})
		within(t, 60*time.Second, "output", func() bool {
			return h.session("GET", "/v1/sessions/"+begun.ID, "", nil).Offset >= printed
		})
		var found []string
		for range 2 {
			each := h.attach(begun.ID, query)
			found = append(found, string(each.expect(frameScreen)))
			each.conn.Close()
		}
		return found
	}
	found := screens(`printf '\033[1mfirst\033[m'`, 12, "cols=80&rows=24")
	if found[0] != "\x1b[1mfirst\x1b[m" {
		t.Errorf("the first client was sent %q", found[0])
	}
	if !strings.HasPrefix(found[1], redrawn) || !strings.Contains(found[1], "first") {
		t.Errorf("the second client was sent %q", found[1])
	}
	for name, found := range map[string][]string{
		"the agent has answered a question": screens(`printf '\033[6n'`, 4, "cols=80&rows=24"),
		"there is more than is kept":        screens(`seq 20000`, 108894, "cols=80&rows=24"),
		"the client has another size":       screens("printf wide", 4, "cols=40&rows=24"),
	} {
		if !strings.HasPrefix(found[0], redrawn) {
			t.Errorf("although %s, the first client was sent %.100q", name, found[0])
		}
	}
}

func TestManyClientsSeeTheSameTerminal(t *testing.T) {
	h := start(t)
	begun := h.startSession("", m{"kind": "terminal", "argv": []string{"cat"}})
	one := h.attach(begun.ID, "cols=100&rows=40")
	one.expect(frameScreen)
	two := h.attach(begun.ID, "cols=90&rows=50")
	two.expect(frameScreen)
	if two.first.Attached != 2 || two.first.Cols != 90 || two.first.Rows != 40 {
		t.Errorf("%+v", two.first)
	}
	one.send(frameInput, "hello\n")
	for _, each := range []*attachment{one, two} {
		if text := each.until("hello\r\nhello\r\n"); text != "hello\r\nhello\r\n" {
			t.Errorf("%q", text)
		}
	}
	size := func(cols, rows int) {
		t.Helper()
		within(t, 60*time.Second, fmt.Sprint(cols, rows), func() bool {
			info := h.session("GET", "/v1/sessions/"+begun.ID, "", nil)
			return info.Cols == cols && info.Rows == rows
		})
	}
	one.send(frameResize, `{"cols":50,"rows":20}`)
	size(50, 20)
	one.conn.Close()
	size(90, 50)
	two.conn.Close()
	within(t, 60*time.Second, "no client is attached", func() bool {
		return h.session("GET", "/v1/sessions/"+begun.ID, "", nil).Attached == 0
	})
	size(90, 50) // as the last client left it
	late := h.attach(begun.ID, "cols=70&rows=10")
	if late.first.Cols != 70 || !strings.Contains(string(late.expect(frameScreen)), "hello") {
		t.Errorf("%+v", late.first)
	}
	late.send(frameSignal, `{"signal":"SIGINT"}`)
	if info, _ := late.result(); *info.Signal != "SIGINT" {
		t.Errorf("%+v", info)
	}
}

func TestSlowClientIsSentAScreenAndDoesNotBlockOthers(t *testing.T) {
	h := start(t)
	begun := h.terminal("stty raw; read go; yes 0123456789012345678901234567890123456789 | head -c 30000000; echo; echo last")
	slow, fast := h.attach(begun.ID, ""), h.attach(begun.ID, "")
	slow.expect(frameScreen)
	fast.expect(frameScreen)
	fast.send(frameInput, "\r\n")
	info, output := fast.result()
	if text := output[frameStdout]; !strings.HasSuffix(text, "last\n") || int64(len(text)) != info.Offset {
		t.Errorf("%d of %d bytes: ...%q", len(text), info.Offset, text[max(0, len(text)-100):])
	}
	s := h.agent.sessions.all[0]
	s.mu.Lock()
	held := 0
	for _, each := range s.clients {
		held += cap(each.pending)
	}
	s.mu.Unlock()
	if held > 4*clientQueue {
		t.Errorf("%d bytes are queued", held)
	}
	info, output = slow.result()
	if output[frameScreen] == "" || !strings.Contains(output[frameScreen]+output[frameStdout], "last") {
		t.Errorf("%d bytes, then %d bytes of screen", len(output[frameStdout]), len(output[frameScreen]))
	}
	if int64(len(output[frameStdout])) >= info.Offset {
		t.Errorf("the slow client has had everything: %d bytes", info.Offset)
	}
}

func TestIdentityDropsClientsAndKeepsSessions(t *testing.T) {
	h := start(t)
	begun := h.terminal("echo begun; sleep 1000")
	a := h.attach(begun.ID, "")
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer listener.Close()
	conn, from, _ := h.upgrade(fmt.Sprintf("/v1/connect?port=%d", listener.Addr().(*net.TCPAddr).Port), "stead-tcp", "")
	a.until("begun")
	h.request("POST", "/v1/identity", "", strings.NewReader("{}"))
	a.conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	if kind, _, err := readFrame(a.from); err != io.EOF {
		t.Errorf("%d %v", kind, err)
	}
	conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := from.ReadByte(); err == nil || os.IsTimeout(err) {
		t.Errorf("%v", err)
	}
	within(t, 60*time.Second, "no client is left", func() bool {
		return h.session("GET", "/v1/sessions/"+begun.ID, "", nil).Attached == 0
	})
	if text := h.attach(begun.ID, "").until("begun"); !strings.Contains(text, "begun") {
		t.Errorf("%q", text)
	}
}

func TestHostileFramesEndTheConnectionOnly(t *testing.T) {
	h := start(t)
	begun := h.terminal("sleep 1000")
	huge := binary.BigEndian.AppendUint32([]byte{frameInput, 0, 0, 0}, streamChunk+1)
	for _, frame := range [][]byte{huge, appendFrame(nil, 99, nil), appendFrame(nil, frameResize, []byte("{")),
		appendFrame(nil, frameResize, []byte(`{"cols":0,"rows":1}`)), appendFrame(nil, frameSignal, []byte(`{"signal":"x"}`))} {
		a := h.attach(begun.ID, "")
		a.expect(frameScreen)
		a.conn.Write(frame)
		a.conn.SetReadDeadline(time.Now().Add(20 * time.Second))
		if _, err := a.from.ReadByte(); err == nil || os.IsTimeout(err) {
			t.Errorf("%q: %v", frame, err)
		}
	}
	if info := h.session("GET", "/v1/sessions/"+begun.ID, "", nil); info.ExitedMs != nil {
		t.Errorf("%+v", info)
	}
}
