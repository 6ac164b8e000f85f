package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

func (h *harness) startSession(user string, request m) *sessionInfo {
	h.Helper()
	encoded, err := json.Marshal(request)
	must(h.T, err)
	started := h.session("POST", "/v1/sessions", user, bytes.NewReader(encoded))
	h.Cleanup(func() { h.request("DELETE", "/v1/sessions/"+started.ID, "", nil) })
	return started
}

func (h *harness) process(script string) *sessionInfo {
	h.Helper()
	return h.startSession("", m{"kind": "process", "argv": []string{"sh", "-c", script}})
}

func (h *harness) terminal(script string) *sessionInfo {
	h.Helper()
	return h.startSession("", m{"kind": "terminal", "argv": []string{"sh", "-c", script}})
}

func (h *harness) session(method, path, user string, body io.Reader) *sessionInfo {
	h.Helper()
	info := &sessionInfo{}
	must(h.T, json.Unmarshal(h.call(method, path, user, body), info))
	return info
}

func (h *harness) ids(kind, user string) string {
	h.Helper()
	var found struct{ Sessions []sessionInfo }
	must(h.T, json.Unmarshal(h.call("GET", at("sessions", "kind", kind), user, nil), &found))
	ids := []string{}
	for _, each := range found.Sessions {
		ids = append(ids, each.ID)
	}
	return strings.Join(ids, " ")
}

func (h *harness) ended(id string) *sessionInfo {
	h.Helper()
	info := h.session("GET", "/v1/sessions/"+id+"/wait?timeout_ms=20000", "", nil)
	if info.ExitedMs == nil {
		h.Fatalf("%s has not exited: %+v", id, info)
	}
	return info
}

// attachment is a client of a session, as the host is one.
type attachment struct {
	*testing.T
	conn  net.Conn
	from  *bufio.Reader
	first sessionInfo
}

func (h *harness) upgrade(path, protocol, user string) (net.Conn, *bufio.Reader, *http.Response) {
	h.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(h.url, "http://"))
	must(h.T, err)
	h.Cleanup(func() { conn.Close() })
	if user != "" {
		user = "X-Stead-User: " + user + "\r\n"
	}
	fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: agent\r\nConnection: Upgrade\r\nUpgrade: %s\r\n%s\r\n", path, protocol, user)
	from := bufio.NewReader(conn)
	response, err := http.ReadResponse(from, nil)
	must(h.T, err)
	return conn, from, response
}

func (h *harness) attach(id, query string) *attachment {
	h.Helper()
	conn, from, response := h.upgrade("/v1/sessions/"+id+"/attach?"+query, "stead-session", "")
	if response.StatusCode != http.StatusSwitchingProtocols {
		content, _ := io.ReadAll(response.Body)
		h.Fatalf("attach: %d %s", response.StatusCode, content)
	}
	a := &attachment{T: h.T, conn: conn, from: from}
	must(h.T, json.Unmarshal(a.expect(frameStarted), &a.first))
	return a
}

func (a *attachment) next() (byte, []byte) {
	a.Helper()
	a.conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	kind, payload, err := readFrame(a.from)
	must(a.T, err)
	return kind, payload
}

func (a *attachment) expect(kind byte) []byte {
	a.Helper()
	got, payload := a.next()
	if got != kind {
		a.Fatalf("frame of type %d, not %d: %.200q", got, kind, payload)
	}
	return payload
}

// until reads output until it contains a text.
func (a *attachment) until(text string) string {
	a.Helper()
	var seen []byte
	for !bytes.Contains(seen, []byte(text)) {
		kind, payload := a.next()
		if kind == frameResult {
			a.Fatalf("ended before %q: %q", text, seen)
		}
		seen = append(seen, payload...)
	}
	return string(seen)
}

// result reads to the end of the session; the output before it comes too.
func (a *attachment) result() (*sessionInfo, map[byte]string) {
	a.Helper()
	var seen [frameCut + 1][]byte
	for {
		kind, payload := a.next()
		if kind != frameResult {
			seen[kind] = append(seen[kind], payload...)
			continue
		}
		output := map[byte]string{}
		for kind, bytes := range seen {
			if len(bytes) > 0 {
				output[byte(kind)] = string(bytes)
			}
		}
		info := &sessionInfo{}
		must(a.T, json.Unmarshal(payload, info))
		if _, err := a.from.ReadByte(); err != io.EOF {
			a.Errorf("after the result: %v", err)
		}
		return info, output
	}
}

func (a *attachment) send(kind byte, payload string) {
	a.Helper()
	_, err := a.conn.Write(appendFrame(nil, kind, []byte(payload)))
	must(a.T, err)
}

func TestProcessKeepsItsOutputAndExitCode(t *testing.T) {
	h := start(t)
	begun := h.process("printf out; printf err >&2; exit 3")
	if begun.ID != "proc-1" || begun.User != "root" || begun.Pty || begun.PID < 2 || !slices.Equal(begun.Argv[:2], []string{"sh", "-c"}) {
		t.Errorf("%+v", begun)
	}
	end := h.ended("proc-1")
	if *end.ExitCode != 3 || end.Signal != nil || end.Offset != 6 || end.Start != 0 {
		t.Errorf("%+v", end)
	}
	info, output := h.attach("proc-1", "").result()
	if output[frameStdout] != "out" || output[frameStderr] != "err" || *info.ExitCode != 3 {
		t.Errorf("%+v %q", info, output)
	}
	_, output = h.attach("proc-1", "offset=3").result()
	if text := output[frameStdout] + output[frameStderr]; text != "err" && text != "out" {
		t.Errorf("%q", output)
	}
	if _, output = h.attach("proc-1", "offset=99").result(); len(output) != 0 {
		t.Errorf("%q", output)
	}
	h.refused("not_found", "GET", "/v1/sessions/proc-2", "", nil)
	if h.session("DELETE", "/v1/sessions/proc-1", "", nil).ID != "proc-1" || h.ids("process", "") != "" {
		t.Error("deleted session is listed")
	}
	h.refused("not_found", "GET", "/v1/sessions/proc-1", "", nil)
}

func TestProcessThatCannotBeExecutedExitsAsAShellSays(t *testing.T) {
	h := start(t)
	for _, kind := range []string{"process", "terminal"} {
		begun := h.startSession("", m{"kind": kind, "argv": []string{"no-such-program"}})
		info, output := h.attach(begun.ID, "").result()
		all := output[frameStderr] + output[frameScreen]
		if info.PID != 0 || *info.ExitCode != 127 || !strings.Contains(all, "command not found") {
			t.Errorf("%+v %q", info, output)
		}
	}
	h.refused("not_found", "POST", "/v1/sessions", "", strings.NewReader(`{"kind":"process","argv":["true"],"cwd":"/nope"}`))
}

func TestSessionRequestsAreChecked(t *testing.T) {
	h := start(t)
	for _, body := range []string{
		`{}`, `{"kind":"process"}`, `{"kind":"process","argv":[]}`, `{"kind":"what","argv":["a"]}`,
		`{"kind":"terminal","id":"a b"}`, `{"kind":"terminal","id":"` + strings.Repeat("x", 65) + `"}`,
		`{"kind":"terminal","cols":0,"rows":5}`, `{"kind":"terminal","cols":1001,"rows":5}`,
		`{"kind":"process","argv":["true"],"env":{"A=":"b"}}`, `{"kind":"process","argv":["true"],"timeout_ms":-1}`,
		`{"kind":"process","argv":["true"],"cwd":"relative"}`,
	} {
		h.refused("invalid_request", "POST", "/v1/sessions", "", strings.NewReader(body))
	}
	h.refused("user_not_found", "POST", "/v1/sessions", "nobody-such", strings.NewReader(`{"kind":"terminal"}`))
	if h.ids("", "") != "" {
		t.Error("a refused session is listed")
	}
	id := h.process("sleep 100").ID
	for _, path := range []string{"/wait?timeout_ms=x", "/output?offset=-1", "/output?limit=9999999", "/attach?cols=1001", "/attach"} {
		h.refused("invalid_request", "GET", "/v1/sessions/"+id+path, "", nil)
	}
	h.refused("invalid_request", "POST", "/v1/sessions/"+id+"/signal", "", strings.NewReader(`{"signal":"SIGNONE"}`))
	h.refused("invalid_request", "POST", "/v1/sessions/"+id+"/input", "", strings.NewReader("x"))
}

func TestSessionsBelongToTheirUsers(t *testing.T) {
	h := start(t)
	h.startSession("alice", m{"kind": "process", "id": "hers", "argv": []string{"sleep", "100"}})
	h.startSession("", m{"kind": "process", "id": "owners", "argv": []string{"sleep", "100"}})
	if got := h.ids("process", ""); got != "hers owners" {
		t.Errorf("owner sees %s", got)
	}
	if got := h.ids("process", "alice"); got != "hers" {
		t.Errorf("alice sees %s", got)
	}
	if got := h.ids("process", "root"); got != "owners" {
		t.Errorf("root sees %s", got)
	}
	if info := h.session("GET", "/v1/sessions/hers", "alice", nil); info.User != "alice" {
		t.Errorf("%+v", info)
	}
	for _, call := range []string{"GET /v1/sessions/owners", "DELETE /v1/sessions/owners", "GET /v1/sessions/owners/wait",
		"GET /v1/sessions/owners/output", "GET /v1/sessions/owners/attach", "POST /v1/sessions/owners/input"} {
		method, path, _ := strings.Cut(call, " ")
		h.refused("permission_denied", method, path, "alice", nil)
	}
	h.refused("permission_denied", "POST", "/v1/sessions/owners/signal", "alice", strings.NewReader(`{"signal":"SIGKILL"}`))
	h.refused("exists", "POST", "/v1/sessions", "alice", strings.NewReader(`{"kind":"terminal","id":"owners"}`))
	_, output := h.attach(h.startSession("alice", m{"kind": "process", "argv": []string{"id", "-u"}}).ID, "").result()
	if output[frameStdout] != "54321\n" {
		t.Errorf("%q", output)
	}
}

func TestInputIsFedAndClosed(t *testing.T) {
	h := start(t)
	begun := h.startSession("", m{"kind": "process", "argv": []string{"sh", "-c", "cat; echo end"}, "stdin": true})
	big := strings.Repeat("0123456789abcdef", 20_000) // more than a pipe holds, less than the log
	h.call("POST", "/v1/sessions/"+begun.ID+"/input", "", strings.NewReader(big))
	a := h.attach(begun.ID, "")
	a.send(frameInput, "typed\n")
	a.send(frameCloseStdin, "")
	info, output := a.result()
	if want := big + "typed\nend\n"; output[frameStdout] != want || *info.ExitCode != 0 {
		t.Errorf("%d bytes: ...%q", len(output[frameStdout]), output[frameStdout][max(0, len(output[frameStdout])-100):])
	}
	h.refused("invalid_request", "POST", "/v1/sessions/"+begun.ID+"/input", "", strings.NewReader("late"))
	begun = h.startSession("", m{"kind": "process", "argv": []string{"cat"}, "stdin": true})
	h.call("POST", "/v1/sessions/"+begun.ID+"/input?close=1", "", strings.NewReader("all"))
	if end := h.ended(begun.ID); *end.ExitCode != 0 || end.Offset != 3 {
		t.Errorf("%+v", end)
	}
}

func TestInputOfAProgramThatDoesNotReadHoldsNobody(t *testing.T) {
	h := start(t)
	begun := h.startSession("", m{"kind": "process", "argv": []string{"sleep", "100"}, "stdin": true})
	a := h.attach(begun.ID, "")
	for range 2 { // one more than the pipe holds
		a.send(frameInput, strings.Repeat("x", streamChunk))
	}
	s := h.agent.sessions.all[0]
	within(t, 5*time.Second, "a writer waits", func() bool {
		if s.inputMu.TryLock() {
			s.inputMu.Unlock()
			return false
		}
		return true
	})
	if h.session("GET", "/v1/sessions/"+begun.ID, "", nil).Attached != 1 {
		t.Error("not attached")
	}
	a.conn.Close()
	within(t, 10*time.Second, "the client is gone", func() bool {
		return h.session("GET", "/v1/sessions/"+begun.ID, "", nil).Attached == 0
	})
	if info := h.session("POST", "/v1/sessions/"+begun.ID+"/signal", "", strings.NewReader(`{"signal":"SIGTERM"}`)); info.ID != begun.ID {
		t.Errorf("%+v", info)
	}
	if end := h.ended(begun.ID); *end.Signal != "SIGTERM" || end.ExitCode != nil {
		t.Errorf("%+v", end)
	}
}

func TestSignalsReachTheWholeGroup(t *testing.T) {
	h := start(t)
	begun := h.process("trap 'echo trapped; exit 7' TERM; sleep 1000 & echo $!; while :; do wait; done")
	a := h.attach(begun.ID, "")
	var child int
	fmt.Sscan(a.until("\n"), &child)
	within(t, 20*time.Second, "the child runs its program", func() bool {
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", child))
		return string(name) == "sleep\n"
	})
	a.send(frameSignal, `{"signal":"SIGTERM"}`)
	info, output := a.result()
	if output[frameStdout] != "trapped\n" || *info.ExitCode != 7 {
		t.Errorf("%+v %q", info, output)
	}
	within(t, 5*time.Second, "the child ends", func() bool { return syscall.Kill(child, 0) != nil || isZombie(child) })
}

func TestClosingKillsOtherGroupsOfTheSession(t *testing.T) {
	h := start(t)
	for _, kind := range []string{"terminal", "process"} {
		file := t.TempDir() + "/child"
		begun := h.startSession("", m{"kind": kind, "argv": []string{"sh", "-c",
			"trap '' HUP; perl -e 'setpgrp(0, 0); exec qw(sleep 1000)' & echo $! >" + file + "; wait"}})
		a := h.attach(begun.ID, "")
		child := 0
		within(t, 20*time.Second, "the child has a group of its own", func() bool {
			content, _ := os.ReadFile(file)
			fmt.Sscan(string(content), &child)
			group, _ := syscall.Getpgid(child)
			return child > 0 && group == child
		})
		if info := h.session("DELETE", "/v1/sessions/"+begun.ID, "", nil); *info.Signal != "SIGKILL" {
			t.Errorf("%+v", info)
		}
		if syscall.Kill(child, 0) == nil && !isZombie(child) {
			t.Errorf("%s: child %d lives", kind, child)
		}
		if info, _ := a.result(); *info.Signal != "SIGKILL" {
			t.Errorf("%+v", info)
		}
	}
}

func TestProcessTimesOut(t *testing.T) {
	h := start(t)
	begun := h.startSession("", m{"kind": "process", "argv": []string{"sleep", "1000"}, "timeout_ms": 50})
	if end := h.ended(begun.ID); !end.TimedOut || *end.Signal != "SIGTERM" {
		t.Errorf("%+v", end)
	}
}

func TestWaitReturnsWhenTheTimeIsUp(t *testing.T) {
	h := start(t)
	begun := h.process("sleep 1000")
	if info := h.session("GET", "/v1/sessions/"+begun.ID+"/wait?timeout_ms=10", "", nil); info.ExitedMs != nil {
		t.Errorf("%+v", info)
	}
}

func readPage(t *testing.T, page []byte) (info sessionInfo, text, cut string) {
	t.Helper()
	from := bytes.NewReader(page)
	kind, payload, err := readFrame(from)
	must(t, err)
	if kind != frameStarted || json.Unmarshal(payload, &info) != nil {
		t.Fatalf("%d %q", kind, payload)
	}
	for from.Len() > 0 {
		kind, payload, err := readFrame(from)
		must(t, err)
		if kind == frameCut {
			cut = string(payload)
		} else {
			text += string(payload)
		}
	}
	return info, text, cut
}

func TestOutputBeyondTheLogIsCut(t *testing.T) {
	h := start(t)
	begun := h.process("i=0; while [ $i -lt 30000 ]; do printf '%0100d\\n' $i; i=$((i+1)); done")
	end := h.ended(begun.ID)
	if end.Offset != 30000*101 || end.Start <= 0 || end.Offset-end.Start > logLimit || end.Offset-end.Start < logLimit/2 {
		t.Fatalf("%+v", end)
	}
	info, text, cut := readPage(t, h.call("GET", "/v1/sessions/"+begun.ID+"/output?limit=1000", "", nil))
	if want := fmt.Sprintf(`{"from":0,"to":%d}`, end.Start); cut != want || info.Start != end.Start {
		t.Errorf("%s, not %s", cut, want)
	}
	if line := end.Start / 101; len(text) != 1000 || !strings.Contains(text, fmt.Sprintf("%0100d\n", line+1)) {
		t.Errorf("%q", text)
	}
	_, text, cut = readPage(t, h.call("GET", fmt.Sprintf("/v1/sessions/%s/output?offset=%d", begun.ID, end.Offset-101), "", nil))
	if text != fmt.Sprintf("%0100d\n", 29999) || cut != "" {
		t.Errorf("%q %q", text, cut)
	}
	_, output := h.attach(begun.ID, "offset=5").result()
	if int64(len(output[frameStdout])) != end.Offset-end.Start || output[frameCut] != fmt.Sprintf(`{"from":5,"to":%d}`, end.Start) {
		t.Errorf("%d bytes, cut %s", len(output[frameStdout]), output[frameCut])
	}
}

func TestLogHoldsTheNewestOutputOfBothStreams(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var log outputLog
	var all []byte
	for range 3000 {
		piece := make([]byte, random.IntN(1200))
		for i := range piece {
			piece[i] = byte(random.Uint32())
		}
		log.append(frameStdout+byte(random.IntN(2)), piece)
		all = append(all, piece...)
		if log.size > logLimit {
			t.Fatalf("%d bytes", log.size)
		}
	}
	if held := int64(len(all)) - log.start; held < logLimit/4 {
		t.Errorf("only %d bytes are held", held)
	}
	for range 100 {
		offset := log.start + random.Int64N(int64(len(all))-log.start)
		limit := random.IntN(5000)
		frames, next := log.read(nil, offset, limit)
		var got []byte
		for from := bytes.NewReader(frames); from.Len() > 0; {
			_, payload, err := readFrame(from)
			must(t, err)
			got = append(got, payload...)
		}
		if want := all[offset:min(offset+int64(limit), int64(len(all)))]; !bytes.Equal(got, want) || next != offset+int64(len(got)) {
			t.Fatalf("%d bytes from %d, not %d", len(got), offset, len(want))
		}
	}
	log = outputLog{}
	for i := range 1 << 18 { // a program that changes the stream with every byte
		log.append(frameStdout+byte(i%2), []byte{1})
	}
	if log.size > logLimit || len(log.segments) > logLimit/segmentCost {
		t.Errorf("%d bytes, %d segments", log.size, len(log.segments))
	}
}

func TestTerminalRunsALoginShell(t *testing.T) {
	h := start(t)
	a := h.attach(h.startSession("", m{"kind": "terminal", "cols": 100, "rows": 30}).ID, "")
	a.expect(frameScreen)
	a.send(frameInput, "echo $0 $PWD ${TERM-none} $USER; stty size; tty; exit 5\n")
	info, output := a.result()
	text := output[frameStdout]
	if !strings.Contains(text, "-sh /root none root\r\n30 100\r\n/dev/pts/") || *info.ExitCode != 5 {
		t.Errorf("%+v %q", info, text)
	}
	if info.ID != "pty-1" || !info.Pty || info.Kind != "terminal" || info.Argv[0] != "-sh" || info.Offset != int64(len(text)) || info.Start != info.Offset {
		t.Errorf("%+v", info)
	}
	info, output = h.attach("pty-1", "").result() // an exited terminal shows its screen for a while
	if *info.ExitCode != 5 || !strings.Contains(output[frameScreen], "/dev/pts/") {
		t.Errorf("%+v %q", info, output)
	}
	h.agent.sessions.all[0].exitedAt = time.Now().Add(-2 * terminalKept)
	h.refused("not_found", "GET", "/v1/sessions/pty-1", "", nil)
}

func TestTerminalOfAUserIsTheirs(t *testing.T) {
	h := start(t)
	begun := h.startSession("alice", m{"kind": "terminal", "env": m{"TERM": "xterm"}, "argv": []string{"sh", "-c",
		"stat -c %u $(tty); echo $TERM $HOME; : >/dev/tty && echo writable"}})
	info, output := h.attach(begun.ID, "").result()
	if text := output[frameScreen] + output[frameStdout]; !strings.Contains(text, "54321\r\nxterm /home/alice\r\nwritable\r\n") {
		t.Errorf("%+v %q", info, output)
	}
}

func TestTerminalKeepsAllOutputOfAProgramThatEndsAtOnce(t *testing.T) {
	h := start(t)
	for range 20 {
		a := h.attach(h.terminal("i=0; while [ $i -lt 300 ]; do echo 0123456789012345678901234567890123456789; i=$((i+1)); done; echo last").ID, "")
		info, output := a.result()
		if text := output[frameScreen] + output[frameStdout]; !strings.Contains(text, "last\r\n") || info.Offset != 300*42+6 {
			t.Fatalf("%d bytes, ...%q", info.Offset, text[max(0, len(text)-100):])
		}
	}
}

func TestTheFirstClientOfATerminalIsSentItsOutputAsPrinted(t *testing.T) {
	const redrawn = "\x18\x1bc"
	h := start(t)
	screens := func(command string, printed int64, query string) []string {
		t.Helper()
		begun := h.startSession("", m{"kind": "terminal", "argv": []string{"sh", "-c", command + "; exec cat"}})
		within(t, 5*time.Second, "output", func() bool {
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
		within(t, 5*time.Second, fmt.Sprint(cols, rows), func() bool {
			info := h.session("GET", "/v1/sessions/"+begun.ID, "", nil)
			return info.Cols == cols && info.Rows == rows
		})
	}
	one.send(frameResize, `{"cols":50,"rows":20}`)
	size(50, 20)
	one.conn.Close()
	size(90, 50)
	two.conn.Close()
	within(t, 5*time.Second, "nobody is attached", func() bool {
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

func TestSlowClientIsSentAScreenAndHoldsNobody(t *testing.T) {
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

func TestSlowClientOfAProcessIsToldOfTheCut(t *testing.T) {
	h := start(t)
	begun := h.process("yes 0123456789012345678901234567890123456789 | head -c 30000000")
	a := h.attach(begun.ID, "")
	end := h.ended(begun.ID) // does not wait for the client, who has read nothing
	var position, cut int64
	for {
		kind, payload := a.next()
		if kind == frameResult {
			break
		}
		if kind == frameCut {
			var told struct{ From, To int64 }
			must(t, json.Unmarshal(payload, &told))
			if told.From != position || told.To <= told.From {
				t.Fatalf("at %d: %s", position, payload)
			}
			position, cut = told.To, cut+told.To-told.From
			continue
		}
		line := "0123456789012345678901234567890123456789\n"
		if at := int(position % 41); !strings.HasPrefix(line[at:]+strings.Repeat(line, len(payload)/41+1), string(payload)) {
			t.Fatalf("at %d: %.100q", position, payload)
		}
		position += int64(len(payload))
	}
	if position != end.Offset || cut == 0 {
		t.Errorf("%d of %d bytes, %d cut", position, end.Offset, cut)
	}
}

func TestMemoryOfAllSessionsIsBounded(t *testing.T) {
	h := start(t)
	table := h.agent.sessions
	for i := range 110 {
		const script = "yes 0123456789012345678901234567890123456789012345678901234567890123456789 | head -c 1500000"
		if i%2 == 0 {
			h.process(script)
		} else {
			h.terminal(script)
		}
	}
	within(t, 60*time.Second, "all end", func() bool {
		return !slices.ContainsFunc(table.all, func(s *session) bool { return !s.isOver() })
	})
	if held := table.memory.held.Load(); held > sessionsHeld || held < sessionsHeld/2 {
		t.Errorf("%d bytes are held", held)
	}
	for _, each := range slices.Clone(table.all) {
		table.remove(each)
	}
	if held := table.memory.held.Load(); held != 0 {
		t.Errorf("%d bytes are held by no session", held)
	}
}

func TestSessionCaps(t *testing.T) {
	h := start(t)
	h.startSession("", m{"kind": "process", "id": "oldest", "argv": []string{"true"}})
	h.ended("oldest")
	for i := 1; i < processesLimit; i++ {
		h.agent.sessions.all = append(h.agent.sessions.all, &session{kind: kindProcess, id: fmt.Sprint("p", i), listed: true, ended: make(chan struct{})})
	}
	h.process("true") // takes the place of the exited one
	h.refused("not_found", "GET", "/v1/sessions/oldest", "", nil)
	for i := range terminalsLimit {
		h.agent.sessions.all = append(h.agent.sessions.all, &session{kind: kindTerminal, id: fmt.Sprint("t", i), listed: true, ended: make(chan struct{})})
	}
	response := h.request("POST", "/v1/sessions", "", strings.NewReader(`{"kind":"terminal"}`))
	content, _ := io.ReadAll(response.Body)
	if response.StatusCode != 429 || !strings.Contains(string(content), `"code":"session_cap"`) || !strings.Contains(string(content), `"limit":128`) {
		t.Errorf("%d %s", response.StatusCode, content)
	}
	h.agent.sessions.all = nil
}

func TestAForkInheritsLiveTerminalsOnly(t *testing.T) {
	h := start(t)
	live, over := h.terminal("sleep 1000"), h.terminal("exit 3")
	within(t, 20*time.Second, "the program exits", func() bool {
		return h.session("GET", "/v1/sessions/"+over.ID, "", nil).ExitCode != nil
	})
	fork := "anothermachine"
	h.agent.identity.machine.Store(&fork)
	h.refused("not_found", "GET", "/v1/sessions/"+over.ID, "", nil)
	h.session("GET", "/v1/sessions/"+live.ID, "", nil)
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
	within(t, 5*time.Second, "no client is left", func() bool {
		return h.session("GET", "/v1/sessions/"+begun.ID, "", nil).Attached == 0
	})
	if text := h.attach(begun.ID, "").until("begun"); !strings.Contains(text, "begun") {
		t.Errorf("%q", text)
	}
}

func TestPortIsConnected(t *testing.T) {
	h := start(t)
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		listener, err := net.Listen("tcp", address)
		must(t, err)
		defer listener.Close()
		go func() {
			for {
				conn, err := listener.Accept()
				if err != nil {
					return
				}
				all, _ := io.ReadAll(conn) // to the half-close
				fmt.Fprintf(conn, "%d bytes", len(all))
				conn.Close()
			}
		}()
		conn, from, response := h.upgrade(fmt.Sprintf("/v1/connect?port=%d", listener.Addr().(*net.TCPAddr).Port), "stead-tcp", "")
		if response.StatusCode != 101 || response.Header.Get("Upgrade") != "stead-tcp" {
			t.Fatalf("%+v", response)
		}
		conn.Write(make([]byte, 3_000_000))
		conn.(*net.TCPConn).CloseWrite()
		if answer, err := io.ReadAll(from); err != nil || string(answer) != "3000000 bytes" {
			t.Errorf("%q %v", answer, err)
		}
		port := listener.Addr().(*net.TCPAddr).Port
		listener.Close()
		h.refused("connection_refused", "GET", at("connect", "port", fmt.Sprint(port)), "", nil)
	}
	h.refused("invalid_request", "GET", "/v1/connect?port=0", "", nil)
	h.refused("invalid_request", "GET", "/v1/connect?port=65536", "", nil)
	within(t, 5*time.Second, "no connection is left", func() bool {
		h.agent.sessions.mu.Lock()
		defer h.agent.sessions.mu.Unlock()
		return len(h.agent.sessions.conns) == 0
	})
}

func TestPortThatBreaksBreaksTheConnection(t *testing.T) {
	h := start(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer listener.Close()
	go func() {
		conn, err := listener.Accept()
		if err == nil {
			conn.Read(make([]byte, 1))
			conn.(*net.TCPConn).SetLinger(0)
			conn.Close()
		}
	}()
	conn, from, _ := h.upgrade(fmt.Sprintf("/v1/connect?port=%d", listener.Addr().(*net.TCPAddr).Port), "stead-tcp", "")
	conn.Write([]byte("x"))
	conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := io.ReadAll(from); err == nil || os.IsTimeout(err) {
		t.Errorf("the reset is not passed on: %v", err)
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

func TestSessionsLeaveNothingRunning(t *testing.T) {
	h := start(t)
	before := runtime.NumGoroutine()
	for range 20 {
		a := h.attach(h.terminal("read line; echo done").ID, "")
		a.expect(frameScreen)
		a.send(frameInput, "x\n")
		a.result()
		a.conn.Close()
	}
	http.DefaultClient.CloseIdleConnections()
	within(t, 10*time.Second, "goroutines end", func() bool { return runtime.NumGoroutine() <= before+5 })
}
