package main

import (
	"fmt"
	"io"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

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
	within(t, 60*time.Second, "the program exits", func() bool {
		return h.session("GET", "/v1/sessions/"+over.ID, "", nil).ExitCode != nil
	})
	fork := "anothermachine"
	h.agent.identity.machine.Store(&fork)
	h.refused("not_found", "GET", "/v1/sessions/"+over.ID, "", nil)
	h.session("GET", "/v1/sessions/"+live.ID, "", nil)
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
	within(t, 60*time.Second, "goroutines end", func() bool { return runtime.NumGoroutine() <= before+5 })
}
