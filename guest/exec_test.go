package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
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

func TestCommandHasTheEnvironmentOfItsAccount(t *testing.T) {
	h := start(t)
	environment := func(user string, given m) string {
		t.Helper()
		lines := strings.Split(strings.TrimSpace(string(h.run(user, m{"argv": []string{"env"}, "env": given}).stdout)), "\n")
		slices.Sort(lines)
		return strings.Join(lines, " ")
	}
	root := "HOME=/root LANG=C.UTF-8 LOGNAME=root PATH=/root/.local/bin:" + defaultPath + " SHELL=/bin/sh USER=root"
	alice := "HOME=/home/alice LANG=C.UTF-8 LOGNAME=alice PATH=/home/alice/.local/bin:" + defaultPath + " SHELL=/bin/sh USER=alice"
	for user, want := range map[string]string{"": root, "root": root, "0": root, "alice": alice, "54321": alice} {
		if got := environment(user, nil); got != want {
			t.Errorf("%s: %s", user, got)
		}
	}
	file := h.agent.executions.accounts.root + "/etc/environment"
	must(t, os.WriteFile(file, []byte("LANG=de_DE.UTF-8\nexport EXTRA=\"a b\"\nHOME=/nowhere\nPATH=/bin:/usr/bin\n"), 0o644))
	if got := environment("alice", nil); got != "EXTRA=a b HOME=/home/alice LANG=de_DE.UTF-8 LOGNAME=alice PATH=/bin:/usr/bin SHELL=/bin/sh USER=alice" {
		t.Errorf("%s", got)
	}
	given := m{"EXTRA": "mine", "HOME": "/h", "PATH": "/usr/bin", "USER": "u", "LOGNAME": "l", "SHELL": "s", "LANG": "C"}
	if got := environment("", given); got != "EXTRA=mine HOME=/h LANG=C LOGNAME=l PATH=/usr/bin SHELL=s USER=u" {
		t.Errorf("the caller's environment wins: %s", got)
	}
	must(t, os.Mkdir(filepath.Dir(file)+"/default", 0o755))
	must(t, os.WriteFile(filepath.Dir(file)+"/default/locale", []byte("LANG=fr_FR.UTF-8\n"), 0o644))
	if got := environment("", m{"PATH": "/usr/bin"}); !strings.Contains(got, "EXTRA=a b ") || !strings.Contains(got, " LANG=fr_FR.UTF-8 ") {
		t.Errorf("%s", got)
	}
	must(t, os.Remove(file))
	must(t, os.Remove(filepath.Dir(file)+"/default/locale"))
	if got := environment("", nil); got != root {
		t.Errorf("%s", got)
	}
}

func TestEnvironmentFileSyntax(t *testing.T) {
	file := t.TempDir() + "/environment"
	must(t, os.WriteFile(file, []byte("# comment\n\n  A=1  \nexport B='two words'\nC=\"x\" # why\nK=v # why\nD=\n"+
		"not a line\nE-F=1\n=1\nGONE\nG=a=b\nH=\"it's\"\nI=un\"quoted\nJ=last"), 0o644))
	var got []string
	for _, each := range readEnvironment(file) {
		if each.unset {
			got = append(got, "-"+each.name)
		} else {
			got = append(got, each.name+"="+each.value)
		}
	}
	want := []string{"A=1", "B=two words", "C=x\" ", "K=v ", "D=", "-GONE", "G=a=b", "H=it's", "I=un\"quoted", "J=last"}
	if !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if found := readEnvironment(file + ".missing"); found != nil {
		t.Errorf("%v", found)
	}
}

func TestProgramIsFoundOnTheGivenPath(t *testing.T) {
	h := start(t)
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
	must(t, os.WriteFile(folder+"/orphan", []byte("#!/no/interpreter\n"), 0o755))
	for _, each := range []struct {
		program, message string
		code             int
	}{
		{"no-such-program", "command not found", 127},
		{"/no/such", "no such file or directory", 127},
		{folder + "/plain/below", "not a directory", 127},
		{folder + "/orphan", "no such file or directory", 127},
		{folder + "/plain", "permission denied", 126},
		{folder, "permission denied", 126},
		{folder + "/noformat", "exec format error", 126},
	} {
		end := h.run("", m{"argv": []string{each.program, "argument"}, "terminal": "failed", "stdin": "stream"})
		if want := "stead: " + each.program + ": " + each.message + "\n"; end.code() != each.code || string(end.stderr) != want || len(end.stdout) > 0 {
			t.Errorf("%s: %d %q", each.program, end.code(), end.stderr)
		}
	}
	for _, terminal := range h.agent.terminals.list(nil) {
		if terminal.Name != "failed" || terminal.Running {
			t.Errorf("%+v", terminal)
		}
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
	within(t, 60*time.Second, "the child prints without a broken pipe", func() bool {
		content, _ := os.ReadFile(mark)
		return string(content) == "0\n"
	})
	// On a busy host the child may be later than the drain waits for it.
	within(t, 60*time.Second, "what a child prints soon after the command is part of its output", func() bool {
		return string(h.shell(`(sleep 0.02; echo late) & echo early`).stdout) == "early\nlate\n"
	})
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
	within(t, 60*time.Second, "the stubborn child is killed", func() bool { return syscall.Kill(child, 0) == syscall.ESRCH || isZombie(child) })
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
	within(t, 60*time.Second, "the command goes on without its caller", func() bool {
		_, err := os.Stat(mark)
		return err == nil
	})
	within(t, 60*time.Second, "no command is left", func() bool { return !h.agent.executions.isRunning(run.PID) })
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
	within(t, 60*time.Second, "every descriptor is closed again", func() bool { return openFiles(t) <= before })
}

func openFiles(t *testing.T) int {
	entries, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(entries)
}

func TestEndsOfCommandsRaiseNoSignal(t *testing.T) {
	h := start(t)
	status, err := os.ReadFile("/proc/self/status")
	must(t, err)
	_, caught, _ := strings.Cut(string(status), "SigCgt:\t")
	caught, _, _ = strings.Cut(caught, "\n")
	signals, err := strconv.ParseUint(caught, 16, 64)
	if err != nil || signals&(1<<(syscall.SIGTERM-1)) == 0 || signals&(1<<(syscall.SIGCHLD-1)) != 0 {
		t.Errorf("signals that are caught: %q %v", caught, err)
	}
	if end := h.shell("exit 7"); end.ExitCode == nil || *end.ExitCode != 7 {
		t.Errorf("%+v", end)
	}
}
