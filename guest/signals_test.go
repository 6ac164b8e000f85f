package main

import (
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"
)

func TestSignalsReachTheWholeGroup(t *testing.T) {
	h := start(t)
	begun := h.process("trap 'echo trapped; exit 7' TERM; sleep 1000 & echo $!; while :; do wait; done")
	a := h.attach(begun.ID, "")
	var child int
	fmt.Sscan(a.until("\n"), &child)
	within(t, 60*time.Second, "the child runs its program", func() bool {
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", child))
		return string(name) == "sleep\n"
	})
	a.send(frameSignal, `{"signal":"SIGTERM"}`)
	info, output := a.result()
	if output[frameStdout] != "trapped\n" || *info.ExitCode != 7 {
		t.Errorf("%+v %q", info, output)
	}
	within(t, 60*time.Second, "the child ends", func() bool { return syscall.Kill(child, 0) != nil || isZombie(child) })
}

func TestClosingKillsOtherGroupsOfTheSession(t *testing.T) {
	h := start(t)
	for _, kind := range []string{"terminal", "process"} {
		file := t.TempDir() + "/child"
		begun := h.startSession("", m{"kind": kind, "argv": []string{"sh", "-c",
			"trap '' HUP; perl -e 'setpgrp(0, 0); exec qw(sleep 1000)' & echo $! >" + file + "; wait"}})
		a := h.attach(begun.ID, "")
		child := 0
		within(t, 60*time.Second, "the child has a group of its own", func() bool {
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
