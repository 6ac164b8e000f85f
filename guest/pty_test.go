package main

import (
	"strings"
	"testing"
	"time"
)

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
