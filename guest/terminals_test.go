package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

func (h *harness) terminals(user string) (list []terminalEntry) {
	h.Helper()
	var answer struct{ Terminals []terminalEntry }
	must(h.T, json.Unmarshal(h.call("GET", "/v1/terminals", user, nil), &answer))
	return answer.Terminals
}

// printed is what a terminal recorded, and of which streams it was, in order.
func (h *harness) printed(name, user string) (text, streams string) {
	h.Helper()
	for line := range bytes.Lines(h.call("GET", "/v1/terminals/"+name, user, nil)) {
		var piece struct {
			AtMs   int64 `json:"at_ms"`
			Stream string
			Data   []byte `json:"data_b64"`
		}
		must(h.T, json.Unmarshal(line, &piece))
		if age := time.Since(time.UnixMilli(piece.AtMs)); age < 0 || age > time.Minute {
			h.Errorf("recorded %v ago", age)
		}
		text += string(piece.Data)
		streams += piece.Stream[3:4]
	}
	return text, streams
}

func (h *harness) inTerminal(name, user, script string) *commandEnd {
	h.Helper()
	return h.run(user, m{"argv": []string{"/bin/sh", "-c", script}, "terminal": name})
}

func TestTerminalRecordsWhatCommandsPrint(t *testing.T) {
	h := start(t)
	if list := h.terminals(""); len(list) != 0 {
		t.Fatalf("%+v", list)
	}
	end := h.inTerminal("main", "", "echo one; sleep 0.1; echo two >&2; exit 4")
	if string(end.stdout) != "one\n" || string(end.stderr) != "two\n" || end.code() != 4 {
		t.Errorf("%+v", end)
	}
	h.inTerminal("main", "", "printf 'three\\377'")
	h.shell("echo elsewhere")
	if text, streams := h.printed("main", ""); text != "one\ntwo\nthree\xff" || streams != "oeo" {
		t.Errorf("%q %q", text, streams)
	}
	list := h.terminals("")
	if len(list) != 1 || list[0].Name != "main" || list[0].User != "root" || list[0].Running || time.Since(time.UnixMilli(list[0].CreatedMs)) > time.Minute {
		t.Errorf("%+v", list)
	}
}

func TestTerminalGoesOnWhileSomethingPrints(t *testing.T) {
	h := start(t)
	// The command ends at once, what it left behind prints on.
	end := h.inTerminal("server", "", "(sleep 0.3; echo late; sleep 0.2; echo later) & echo begun")
	if string(end.stdout) != "begun\n" {
		t.Errorf("%q", end.stdout)
	}
	if list := h.terminals(""); len(list) != 1 || !list[0].Running {
		t.Errorf("%+v", list)
	}
	within(t, 60*time.Second, "it ends", func() bool { return !h.terminals("")[0].Running })
	if text, _ := h.printed("server", ""); text != "begun\nlate\nlater\n" {
		t.Errorf("%q", text)
	}
	// A caller that goes away does not end the record.
	run := h.begin(m{"argv": []string{"/bin/sh", "-c", "sleep 0.3; echo alone"}, "terminal": "server"}, "")
	run.body.Close()
	within(t, 60*time.Second, "the last line is there", func() bool {
		text, _ := h.printed("server", "")
		return strings.HasSuffix(text, "alone\n")
	})
}

func TestTerminalBelongsToItsUser(t *testing.T) {
	h := start(t)
	h.inTerminal("hers", "alice", "id -u")
	h.inTerminal("roots", "", "id -u")
	if list := h.terminals("alice"); len(list) != 1 || list[0].Name != "hers" || list[0].User != "alice" {
		t.Errorf("%+v", list)
	}
	if list := h.terminals(""); len(list) != 2 {
		t.Errorf("%+v", list)
	}
	if text, _ := h.printed("hers", "alice"); text != "54321\n" {
		t.Errorf("%q", text)
	}
	h.refused("not_found", "GET", "/v1/terminals/roots", "alice", nil)
	h.refused("not_found", "GET", "/v1/terminals/nobodys", "alice", nil)
	h.refused("user_not_found", "GET", "/v1/terminals", "mallory", nil)
	h.refused("permission_denied", "POST", "/v1/exec", "alice", strings.NewReader(`{"argv":["true"],"terminal":"roots"}`))
	h.inTerminal("hers", "", "id -u")
	if text, _ := h.printed("hers", "alice"); text != "54321\n0\n" {
		t.Errorf("%q", text)
	}
	for _, name := range []string{"..", ".hidden", "a/b", "a b", strings.Repeat("a", 65)} {
		body, _ := json.Marshal(m{"argv": []string{"true"}, "terminal": name})
		h.refused("invalid_request", "POST", "/v1/exec", "", bytes.NewReader(body))
	}
}

func TestTerminalKeepsTheEndOfALongOutput(t *testing.T) {
	h := start(t)
	h.inTerminal("long", "", "seq 1 800000")
	text, _ := h.printed("long", "")
	if len(text) < 700<<10 || len(text) > 1700<<10 || !strings.HasSuffix(text, "\n799999\n800000\n") {
		t.Errorf("%d bytes, ending in %q", len(text), text[max(0, len(text)-20):])
	}
	var size int64
	for _, part := range []string{"output", "output.old"} {
		stat, err := os.Stat(h.agent.terminals.path("long", part))
		must(t, err)
		size += stat.Size()
	}
	if size > 2*terminalPart+200<<10 {
		t.Errorf("%d bytes on disk", size)
	}
}

func TestTerminalsAreNotMoreThanMayBe(t *testing.T) {
	h := start(t)
	busy := h.begin(m{"argv": []string{"sleep", "60"}, "terminal": "t-0"}, "")
	for i := 1; i < terminalsKept+2; i++ {
		h.inTerminal(fmt.Sprintf("t-%d", i), "", "echo")
	}
	names := ""
	list := h.terminals("")
	for _, entry := range list {
		names += " " + entry.Name
	}
	if len(list) != terminalsKept || !strings.HasPrefix(names, " t-0 t-3 ") || !strings.HasSuffix(names, fmt.Sprintf(" t-%d", terminalsKept+1)) {
		t.Errorf("%s", names)
	}
	h.call("DELETE", "/v1/exec/"+busy.ID, "", nil)
}

func TestTerminalOnAFullDiskDoesNotFailTheCommand(t *testing.T) {
	if !inNamespaces(t) {
		return
	}
	h := start(t)
	folder := h.agent.terminals.folder
	must(t, os.MkdirAll(folder, 0o700))
	must(t, syscall.Mount("none", folder, "tmpfs", 0, "size=64k"))
	defer syscall.Unmount(folder, syscall.MNT_DETACH)
	if end := h.inTerminal("full", "", "echo begin; sleep 0.1; seq 1 100000"); end.code() != 0 || len(end.stdout) != 588901 {
		t.Errorf("%d bytes, exit code %d", len(end.stdout), end.code())
	}
	if text, _ := h.printed("full", ""); !strings.HasPrefix(text, "begin\n") {
		t.Errorf("%d bytes", len(text))
	}
}
