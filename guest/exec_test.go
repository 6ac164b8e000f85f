package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

type m = map[string]any

func within(t *testing.T, limit time.Duration, what string, happened func() bool) {
	t.Helper()
	for deadline := time.Now().Add(limit); !happened(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", limit, what)
		}
	}
}

func TestCommandPrintsAndExits(t *testing.T) {
	h := start(t)
	end := h.shell("printf out; printf err >&2; exit 3")
	if string(end.stdout) != "out" || string(end.stderr) != "err" || end.code() != 3 || end.Signal != nil || end.TimedOut {
		t.Fatalf("%+v", end)
	}
	if end.DurationUs <= 0 {
		t.Errorf("took %d us", end.DurationUs)
	}
	if end := h.shell("kill -SEGV $$"); end.ExitCode != nil || end.signal() != "SIGSEGV" {
		t.Fatalf("%+v", end)
	}
}

func TestCommandHasOnlyTheEnvironmentItWasGiven(t *testing.T) {
	h := start(t)
	if end := h.run("", m{"argv": []string{"env"}}); string(end.stdout) != "PATH="+defaultPath+"\n" {
		t.Errorf("%q", end.stdout)
	}
	folder := t.TempDir()
	must(t, os.WriteFile(folder+"/tool", []byte("#!/bin/sh\necho $K from $0 in $(pwd)"), 0o755))
	end := h.run("", m{"argv": []string{"tool"}, "cwd": folder, "env": m{"PATH": "/nope:" + folder + ":/bin", "K": "v w"}})
	if want := "v w from " + folder + "/tool in " + folder + "\n"; string(end.stdout) != want {
		t.Errorf("%q, not %q", end.stdout, want)
	}
	if end := h.run("", m{"argv": []string{"./tool"}, "cwd": folder}); end.code() != 0 {
		t.Errorf("%+v", end)
	}
}

func TestCommandRunsAsUserWithItsGroups(t *testing.T) {
	h := start(t)
	for _, user := range []string{"alice", "54321"} {
		end := h.run(user, m{"argv": []string{"sh", "-c", "id -u; id -g; id -G"}})
		if string(end.stdout) != "54321\n54321\n54321 54322\n" {
			t.Errorf("%q %q", end.stdout, end.stderr)
		}
	}
	h.refused("user_not_found", "POST", "/v1/exec", "nobody-such", strings.NewReader(`{"argv":["true"]}`))
	h.refused("user_not_found", "POST", "/v1/exec", "4711", strings.NewReader(`{"argv":["true"]}`))
}

func TestCommandThatCannotStart(t *testing.T) {
	h := start(t)
	folder := t.TempDir()
	must(t, os.WriteFile(folder+"/plain", []byte("x"), 0o644))
	must(t, os.WriteFile(folder+"/noformat", []byte("x"), 0o755))
	must(t, os.Mkdir(folder+"/locked", 0o700))
	for body, code := range map[string]string{
		`{"argv":["no-such-program"]}`:                   "not_found",
		`{"argv":["/no/such"]}`:                          "not_found",
		`{"argv":["` + folder + `/plain"]}`:              "permission_denied",
		`{"argv":["` + folder + `/noformat"]}`:           "invalid_request",
		`{"argv":["true"],"cwd":"` + folder + `/nope"}`:  "not_found",
		`{"argv":["true"],"cwd":"` + folder + `/plain"}`: "not_directory",
		`{"argv":[]}`:                                      "invalid_request",
		`{"argv":["a\u0000b"]}`:                            "invalid_request",
		`{"argv":["true"],"env":{"A=B":"c"}}`:              "invalid_request",
		`{"argv":["true"],"stdin":"what"}`:                 "invalid_request",
		`{"argv":["true"],"timeout_ms":-1}`:                "invalid_request",
		`{"argv":["true"],"stdin":"inline","stdin_b64":1}`: "invalid_request",
		`nonsense`: "invalid_request",
		`{"argv":["` + strings.Repeat("x", jsonLimit) + `"]}`: "invalid_request",
	} {
		h.refused(code, "POST", "/v1/exec", "", strings.NewReader(body))
	}
	h.refused("permission_denied", "POST", "/v1/exec", "alice", strings.NewReader(`{"argv":["true"],"cwd":"`+folder+`/locked"}`))
	h.refused("not_found", "DELETE", "/v1/exec/nope", "", nil)
	h.refused("not_found", "POST", "/v1/exec/nope/stdin", "", strings.NewReader("x"))
}

func TestBackgroundChildNeitherHoldsTheCallNorLosesItsPipe(t *testing.T) {
	h := start(t)
	mark := t.TempDir() + "/mark"
	began := time.Now()
	end := h.shell(`echo front; (sleep 0.4; echo back; echo $? > ` + mark + `) &`)
	if took := time.Since(began); string(end.stdout) != "front\n" || took > 300*time.Millisecond {
		t.Fatalf("%q after %v", end.stdout, took)
	}
	within(t, 3*time.Second, "the child prints without a broken pipe", func() bool {
		content, _ := os.ReadFile(mark)
		return string(content) == "0\n"
	})
	if end := h.shell(`(sleep 0.02; echo late) & echo early`); string(end.stdout) != "early\nlate\n" {
		t.Errorf("%q", end.stdout)
	}
	began = time.Now()
	end = h.shell(`timeout 3 yes & echo front`)
	if took := time.Since(began); took > 2500*time.Millisecond || !bytes.Contains(end.stdout, []byte("front\n")) {
		t.Errorf("a child that never falls silent held the call for %v", took)
	}
}

func TestTimeoutEndsTheWholeGroup(t *testing.T) {
	h := start(t)
	end := h.run("", m{"argv": []string{"sh", "-c", "echo begun; sleep 9"}, "timeout_ms": 100})
	if string(end.stdout) != "begun\n" || !end.TimedOut || end.signal() != "SIGTERM" {
		t.Errorf("%+v", end)
	}
	began := time.Now()
	end = h.run("", m{"argv": []string{"sh", "-c", "trap 'echo asked' TERM; sleep 9 & wait; sleep 9"}, "timeout_ms": 100})
	if took := time.Since(began); string(end.stdout) != "asked\n" || !end.TimedOut || end.signal() != "SIGKILL" || took > 2*time.Second {
		t.Errorf("%+v after %v", end, took)
	}
	if end.OOM != nil {
		t.Errorf("taken for a kill by the kernel: %+v", end.OOM)
	}
	// The command obeys, its child does not: the child dies all the same.
	end = h.run("", m{"argv": []string{"bash", "-c", "(trap '' TERM; echo $BASHPID; exec sleep 9) & wait"}, "timeout_ms": 150})
	child, err := strconv.Atoi(strings.TrimSpace(string(end.stdout)))
	must(t, err)
	within(t, 3*time.Second, "the stubborn child is killed", func() bool { return syscall.Kill(child, 0) == syscall.ESRCH || isZombie(child) })
	if end := h.run("", m{"argv": []string{"sleep", "0.05"}, "timeout_ms": 5000}); end.TimedOut || end.code() != 0 {
		t.Errorf("%+v", end)
	}
}

func isZombie(pid int) bool {
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return bytes.Contains(stat, []byte(") Z "))
}

func TestInput(t *testing.T) {
	h := start(t)
	if end := h.run("", m{"argv": []string{"cat"}}); len(end.stdout) != 0 || end.code() != 0 {
		t.Errorf("%+v", end)
	}
	for _, size := range []int{0, 1, inlinePipeBytes, 3 << 20} {
		input := bytes.Repeat([]byte("abcdefg\n"), size/8+1)[:size]
		end := h.run("", m{"argv": []string{"cat"}, "stdin": "inline", "stdin_b64": input})
		if !bytes.Equal(end.stdout, input) {
			t.Errorf("%d bytes became %d", size, len(end.stdout))
		}
		if end := h.run("", m{"argv": []string{"true"}, "stdin": "inline", "stdin_b64": input}); end.code() != 0 {
			t.Errorf("%+v", end)
		}
	}
	run := h.begin(m{"argv": []string{"sha256sum"}, "stdin": "stream"}, "")
	input := bytes.Repeat([]byte("0123456789abcdef"), 1<<18)
	h.call("POST", "/v1/exec/"+run.ID+"/stdin", "", io.MultiReader(bytes.NewReader(input[:100]), bytes.NewReader(input[100:])))
	end, err := run.end()
	must(t, err)
	if want := fmt.Sprintf("%x  -\n", sha256.Sum256(input)); string(end.stdout) != want {
		t.Errorf("%q", end.stdout)
	}
	// Ended commands and closed inputs swallow what is still sent.
	run = h.begin(m{"argv": []string{"sh", "-c", "exec <&-; sleep 0.3"}, "stdin": "stream"}, "")
	h.call("POST", "/v1/exec/"+run.ID+"/stdin", "", bytes.NewReader(input))
	if end, err := run.end(); err != nil || end.code() != 0 {
		t.Errorf("%+v %v", end, err)
	}
	run = h.begin(m{"argv": []string{"sleep", "0.2"}}, "")
	h.refused("invalid_request", "POST", "/v1/exec/"+run.ID+"/stdin", "", strings.NewReader("x"))
	run.end()
}

func TestKillAndLostConnection(t *testing.T) {
	h := start(t)
	run := h.begin(m{"argv": []string{"sh", "-c", "sleep 9 & wait"}}, "")
	h.call("DELETE", "/v1/exec/"+run.ID, "", nil)
	if end, err := run.end(); err != nil || end.signal() != "SIGKILL" || end.OOM != nil {
		t.Errorf("%+v %v", end, err)
	}
	mark := t.TempDir() + "/mark"
	run = h.begin(m{"argv": []string{"sh", "-c", "i=0; while [ $i -lt 400 ]; do echo 0123456789012345678901234567890123456789; i=$((i+1)); done; sleep 0.1; echo done > " + mark}}, "")
	run.body.Close()
	within(t, 5*time.Second, "the command goes on without its caller", func() bool {
		_, err := os.Stat(mark)
		return err == nil
	})
	within(t, 2*time.Second, "no command is left", func() bool { return !h.agent.executions.isRunning(run.PID) })
}

func TestLargeOutputArrivesWhole(t *testing.T) {
	h := start(t)
	run := h.begin(m{"argv": []string{"sh", "-c", "head -c 8000000 /dev/zero | tr '\\0' x; printf last >&2"}}, "")
	time.Sleep(400 * time.Millisecond) // the caller is slow: the drain's time is long over when it begins to read
	end, err := run.end()
	must(t, err)
	if len(end.stdout) != 8000000 || bytes.Trim(end.stdout, "x") != nil && len(bytes.Trim(end.stdout, "x")) > 0 || string(end.stderr) != "last" {
		t.Errorf("%d bytes, %q", len(end.stdout), end.stderr)
	}
}

func TestManyCommandsAtOnce(t *testing.T) {
	h := start(t)
	before := openFiles(t)
	var all sync.WaitGroup
	for i := range 64 {
		all.Go(func() {
			end := h.run("", m{"argv": []string{"sh", "-c", fmt.Sprintf("echo %d; sleep 0.2; exit %d", i, i)}})
			if end.code() != i || string(end.stdout) != fmt.Sprintf("%d\n", i) {
				t.Errorf("%d: %+v", i, end)
			}
		})
	}
	all.Wait()
	http.DefaultClient.CloseIdleConnections()
	within(t, 3*time.Second, "every descriptor is closed again", func() bool { return openFiles(t) <= before })
}

func openFiles(t *testing.T) int {
	entries, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(entries)
}
