package main

import (
	"encoding/json"
	"testing"
	"time"
)

func TestOOMLines(t *testing.T) {
	line := "3,982,93842913,-;Out of memory: Killed process 1234 (py (3) x) total-vm:2000kB, anon-rss:812345kB, file-rss:5kB, shmem-rss:10kB, UID:0 pgtables:900kB oom_score_adj:0\n SUBSYSTEM=x\n"
	event := parseOOM([]byte(line))
	if event == nil || event.PID != 1234 || event.Process != "py (3) x" || event.RSSKiB != 812360 || event.Scope != "machine" {
		t.Fatalf("%+v", event)
	}
	event = parseOOM([]byte("3,1,2,-;Memory cgroup out of memory: Killed process 9 (sh) total-vm:1kB, anon-rss:2kB, file-rss:3kB, shmem-rss:0kB, UID:7 pgtables:4kB oom_score_adj:0\n"))
	if event == nil || event.PID != 9 || event.RSSKiB != 5 || event.Scope != "cgroup" {
		t.Fatalf("%+v", event)
	}
	for _, other := range []string{
		"12,1,2,-;Out of memory: Killed process 9 (forged) total-vm:1kB, anon-rss:2kB", // written by a program
		"3,1,2,-;Out of memory: Killed process x (sh) total-vm:1kB",
		"3,1,2,-;Out of memory: Killed process 9 (sh",
		"3,1,2,-;eth0: Killed process 9 (sh) total-vm:1kB",
		"6,1,2,-;hello", "", ";",
	} {
		if event := parseOOM([]byte(other)); event != nil {
			t.Errorf("%q: %+v", other, event)
		}
	}
}

func TestCommandCarriesItsOOMKill(t *testing.T) {
	h := start(t)
	log := h.agent.executions.oom
	// A child of the command is killed: the shell goes on, the kill is reported all the same.
	run := h.begin(m{"argv": []string{"bash", "-c", "sleep 0.5 & wait; exit 0"}}, "")
	other := h.begin(m{"argv": []string{"sleep", "0.6"}}, "")
	log.add(&oomEvent{PID: 1 << 22, Process: "python3", Scope: "machine", owner: log.ownerOf(run.PID)})
	if end, err := run.end(); err != nil || end.OOM == nil || end.OOM.Process != "python3" {
		t.Errorf("%+v %v", end, err)
	}
	if end, err := other.end(); err != nil || end.OOM != nil {
		t.Errorf("another command's kill: %+v %v", end, err)
	}
	// The kernel's line comes after the process is gone.
	run = h.begin(m{"argv": []string{"sh", "-c", "kill -9 $$"}}, "")
	time.AfterFunc(100*time.Millisecond, func() { log.add(&oomEvent{PID: run.PID, Process: "sh", owner: ownerUnknown}) })
	if end, err := run.end(); err != nil || end.OOM == nil || end.OOM.PID != run.PID {
		t.Errorf("%+v %v", end, err)
	}
	if end := h.shell("kill -9 $$"); end.OOM != nil {
		t.Errorf("an old kill: %+v", end.OOM)
	}
	for range 100 {
		log.add(&oomEvent{PID: 1})
	}
	var answer struct{ Events []oomEvent }
	must(t, json.Unmarshal(h.call("GET", "/v1/oom", "", nil), &answer))
	if len(answer.Events) != oomKept {
		t.Errorf("%d events are kept", len(answer.Events))
	}
}
