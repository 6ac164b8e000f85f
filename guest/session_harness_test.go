package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
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
