package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
)

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
