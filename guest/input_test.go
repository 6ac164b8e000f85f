package main

import (
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

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

func TestInputThatAProgramDoesNotReadEndsWithItsSender(t *testing.T) {
	h := start(t)
	begun := h.startSession("", m{"kind": "process", "argv": []string{"sleep", "100"}, "stdin": true})
	a := h.attach(begun.ID, "")
	for range 2 { // one more than the pipe holds
		a.send(frameInput, strings.Repeat("x", streamChunk))
	}
	h.agent.sessions.all[0].writerWaits(t)
	if h.session("GET", "/v1/sessions/"+begun.ID, "", nil).Attached != 1 {
		t.Error("not attached")
	}
	a.conn.Close()
	within(t, 60*time.Second, "the client is gone", func() bool {
		return h.session("GET", "/v1/sessions/"+begun.ID, "", nil).Attached == 0
	})
	if info := h.session("POST", "/v1/sessions/"+begun.ID+"/signal", "", strings.NewReader(`{"signal":"SIGTERM"}`)); info.ID != begun.ID {
		t.Errorf("%+v", info)
	}
	if end := h.ended(begun.ID); *end.Signal != "SIGTERM" || end.ExitCode != nil {
		t.Errorf("%+v", end)
	}
}

// writerWaits shows that the program's input is full: what a sender has left waits for the program to read.
func (s *session) writerWaits(t *testing.T) {
	t.Helper()
	within(t, 60*time.Second, "a writer waits", func() bool {
		var more int
		var err error
		s.inputTo.Control(func(fd uintptr) { more, err = syscall.Write(int(fd), []byte("x")) })
		return len(s.inputTurn) == 1 && more < 1 && err == syscall.EAGAIN
	})
}

func TestSignalsDoNotWaitBehindInput(t *testing.T) {
	h := start(t)
	lines := strings.Repeat("a line that is not read\n", streamChunk/24)
	for _, each := range []struct{ kind, script, signal string }{
		{"terminal", "echo begun; exec sleep 1000", "SIGINT"},
		{"terminal", "echo begun; exec sleep 1000", "SIGKILL"},
		{"terminal", "stty raw; echo begun; exec sleep 1000", "SIGINT"},
		{"terminal", "stty raw; trap '' INT; echo begun; exec sleep 1000", "SIGKILL"},
		{"process", "echo begun; exec sleep 1000", "SIGTERM"},
	} {
		begun := h.startSession("", m{"kind": each.kind, "argv": []string{"sh", "-c", each.script}, "stdin": true})
		a := h.attach(begun.ID, "")
		a.until("begun")
		for range 3 { // more than a pty or a pipe holds, and less than is queued beside it
			a.send(frameInput, lines)
		}
		s := h.agent.sessions.all[0]
		s.writerWaits(t)
		within(t, 60*time.Second, "the rest is queued", func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.clients[0].input.held() > streamChunk/2
		})
		a.send(frameSignal, `{"signal":"`+each.signal+`"}`)
		if info, _ := a.result(); info.Signal == nil || *info.Signal != each.signal {
			t.Errorf("%+v: %+v", each, info)
		}
		h.session("DELETE", "/v1/sessions/"+begun.ID, "", nil)
	}
}

func TestInterruptPassesAFullLineDiscipline(t *testing.T) {
	h := start(t)
	const script = "stty -echo; trap 'echo interrupted' INT; sh -c 'echo begun; exec sleep 1000'; stty -icanon min 0 time 0; cat; echo end"
	for _, each := range []struct {
		mode  string
		lines int // all, or more than the kernel takes
	}{{"", 380}, {"", 5000}, {"stty -icanon; ", 380}, {"stty -icanon; ", 5000}, {"stty noflsh; ", 5000}} {
		begun := h.terminal(each.mode + script)
		a := h.attach(begun.ID, "")
		a.until("begun")
		a.send(frameInput, strings.Repeat("typed ahead\n", each.lines))
		s := h.agent.sessions.all[len(h.agent.sessions.all)-1]
		within(t, 60*time.Second, "the line discipline is full", func() bool {
			var unread int
			s.inputTo.Control(func(fd uintptr) {
				slave, err := openSlave(int(fd), syscall.O_NONBLOCK)
				must(t, err)
				defer syscall.Close(slave)
				unread, err = unix.IoctlGetInt(slave, unix.TIOCINQ)
				must(t, err)
			})
			return unread > 4000
		})
		a.send(frameSignal, `{"signal":"SIGINT"}`)
		_, output := a.result()
		_, after, found := strings.Cut(output[frameStdout], "interrupted")
		if kept := strings.Contains(after, "typed ahead"); !found || kept != (each.mode == "stty noflsh; ") {
			t.Errorf("%+v: %.200q", each, after)
		}
	}
}

func TestInputIsTakenInOrderByAProgramThatReadsLate(t *testing.T) {
	h := start(t)
	begun := h.startSession("", m{"kind": "process", "argv": []string{"sh", "-c", "read line; sleep 0.2; cat | cksum"}, "stdin": true})
	a := h.attach(begun.ID, "")
	var lines strings.Builder
	for i := 0; lines.Len() < 3*inputQueued; i++ { // more than is queued
		fmt.Fprintln(&lines, i)
	}
	all := "go\n" + lines.String()
	for rest := all; rest != ""; {
		piece := rest[:min(len(rest), 10_000)]
		a.send(frameInput, piece)
		rest = rest[len(piece):]
	}
	a.send(frameCloseStdin, "")
	_, output := a.result()
	command := exec.Command("cksum")
	command.Stdin = strings.NewReader(all[3:])
	want, err := command.Output()
	must(t, err)
	if output[frameStdout] != string(want) {
		t.Errorf("%q, not %q", output[frameStdout], want)
	}
}
