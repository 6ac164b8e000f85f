package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
)

// raw is a connection to the agent on which a test writes what it likes.
type raw struct {
	*testing.T
	net.Conn
	answers *bufio.Reader
}

func (h *harness) dial() *raw {
	h.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(h.url, "http://"))
	must(h.T, err)
	h.Cleanup(func() { conn.Close() })
	return &raw{h.T, conn, bufio.NewReader(conn)}
}

func (r *raw) write(text string) {
	r.Helper()
	_, err := r.Write([]byte(text))
	must(r.T, err)
}

func (r *raw) answer() (*http.Response, []byte) {
	r.Helper()
	response, err := http.ReadResponse(r.answers, nil)
	must(r.T, err)
	body, err := io.ReadAll(response.Body)
	must(r.T, err)
	return response, body
}

func (r *raw) checkHealth() {
	r.Helper()
	response, body := r.answer()
	var told health
	if err := json.Unmarshal(body, &told); err != nil || response.StatusCode != 200 || told.Protocol != protocol || response.ContentLength != int64(len(body)) {
		r.Errorf("%d %s %v", response.StatusCode, body, err)
	}
}

const healthCall = "GET /v1/health HTTP/1.1\r\nHost: agent\r\n\r\n"

func execCall(shell string) string {
	body, _ := json.Marshal(execRequest{Argv: []string{"/bin/sh", "-c", shell}})
	return "POST /v1/exec HTTP/1.1\r\nHost: agent\r\ncontent-length:" + strconv.Itoa(len(body)) + "\r\n\r\n" + string(body)
}

func TestPlainCallsFollowEachOtherOnOneConnection(t *testing.T) {
	r := start(t).dial()
	r.write(healthCall + execCall("exit 2") + healthCall)
	r.checkHealth()
	response, body := r.answer()
	if response.ContentLength != int64(len(body)) || !bytes.Contains(body, []byte(`"exit_code":2`)) {
		t.Errorf("%+v %q", response, body)
	}
	r.checkHealth()
	call := execCall("echo two; exit 3")
	for i := range len(call) {
		r.write(call[i : i+1])
	}
	if _, body := r.answer(); !bytes.Contains(body, []byte("two\n")) || !bytes.Contains(body, []byte(`"exit_code":3`)) {
		t.Errorf("%q", body)
	}
}

func TestLongPlainAnswersComeInChunks(t *testing.T) {
	const size = 300_000
	r := start(t).dial()
	for range 2 {
		r.write(execCall("head -c " + strconv.Itoa(size) + " /dev/zero; echo end >&2"))
		response, body := r.answer()
		if len(response.TransferEncoding) != 1 || bytes.Count(body, []byte{0}) < size || !bytes.Contains(body, []byte("end\n")) ||
			!bytes.Contains(body, []byte(`"exit_code":0`)) {
			t.Fatalf("%d bytes %+v", len(body), response)
		}
	}
	r.askHealth()
}

func (r *raw) askHealth() {
	r.Helper()
	r.write(healthCall)
	r.checkHealth()
}

func TestUnusualRequestsPassToTheOtherServer(t *testing.T) {
	h := start(t)
	for name, call := range map[string]string{
		"another call":   "GET /v1/oom HTTP/1.1\r\nHost: agent\r\n\r\n",
		"another header": "GET /v1/health HTTP/1.1\r\nHost: agent\r\nX-Other: 1\r\n\r\n",
		"chunks": "POST /v1/exec HTTP/1.1\r\nHost: agent\r\nTransfer-Encoding: chunked\r\n\r\n" +
			"19\r\n" + `{"argv":["/bin/echo","1"]}`[:25] + "\r\n1\r\n}\r\n0\r\n\r\n",
		"a long head": "GET /v1/health HTTP/1.1\r\nHost: agent\r\nUser-Agent: " + strings.Repeat("x", headLimit) + "\r\n\r\n",
	} {
		r := h.dial()
		r.askHealth()
		r.write(call)
		if response, body := r.answer(); response.StatusCode != 200 {
			t.Errorf("%s: %d %s", name, response.StatusCode, body)
		}
		r.askHealth()
	}
	for name, call := range map[string]string{
		"too much":    "POST /v1/exec HTTP/1.1\r\nHost: agent\r\nContent-Length: 9000000\r\n\r\n" + strings.Repeat(" ", 9_000_000),
		"no number":   "POST /v1/exec HTTP/1.1\r\nHost: agent\r\nContent-Length: -1\r\n\r\n",
		"two lengths": "POST /v1/exec HTTP/1.1\r\nHost: agent\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n12",
		"no JSON":     "POST /v1/exec HTTP/1.1\r\nHost: agent\r\nContent-Length: 2\r\n\r\n{]",
		"no user":     "POST /v1/exec HTTP/1.1\r\nHost: agent\r\nX-Stead-User: nobodyhere\r\nContent-Length: 22\r\n\r\n" + `{"argv":["/bin/true"]}`,
	} {
		r := h.dial()
		r.write(call)
		if response, body := r.answer(); response.StatusCode < 400 || response.StatusCode >= 500 {
			t.Errorf("%s: %d %s", name, response.StatusCode, body)
		}
	}
}

func TestConnectionsThatEndEarlyAreClosed(t *testing.T) {
	h := start(t)
	for _, begun := range []string{"", "GET /v1/he", "POST /v1/exec HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"} {
		r := h.dial()
		r.askHealth()
		r.write(begun)
		must(t, r.Conn.(*net.TCPConn).CloseWrite())
		rest, err := io.ReadAll(r.answers)
		if err != nil || begun == "" && len(rest) > 0 || strings.Contains(string(rest), "200 OK") {
			t.Errorf("%q: %q %v", begun, rest, err)
		}
	}
}
