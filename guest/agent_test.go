package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

const (
	aliceUID   = 54321
	aliceGroup = 54322
)

// harness is a whole agent behind a real socket, with accounts of its own.
type harness struct {
	*testing.T
	agent *agent
	url   string
}

func start(t *testing.T) *harness {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("the agent is root in its machine")
	}
	etc := filepath.Join(t.TempDir(), "etc")
	must(t, os.Mkdir(etc, 0o755))
	must(t, os.WriteFile(etc+"/passwd", []byte("root:x:0:0::/root:/bin/sh\nalice:x:54321:54321::/home/alice:/bin/sh\n"), 0o644))
	must(t, os.WriteFile(etc+"/group", []byte("root:x:0:\nalice:x:54321:\nteam:x:54322:bob,alice\n"), 0o644))
	launcher, err := newLauncher(nil)
	must(t, err)
	users := &accounts{root: filepath.Dir(etc)}
	terminals := newTerminals(users, t.TempDir())
	identity := newIdentity(t.TempDir())
	a := &agent{
		identity: identity, executions: newExecutions(users, launcher, terminals),
		files: &files{accounts: users}, terminals: terminals, watches: newWatches(users, t.TempDir()),
		sessions: &sessions{accounts: users, launcher: launcher, machine: identity.machineID},
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	go serve(listener, a.handler())
	t.Cleanup(func() {
		listener.Close()
		http.DefaultClient.CloseIdleConnections()
	})
	return &harness{t, a, "http://" + listener.Addr().String()}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// folder is an empty folder that alice owns.
func (h *harness) folder() string {
	folder := h.TempDir()
	must(h.T, os.Chmod(filepath.Dir(folder), 0o755))
	must(h.T, os.Chown(folder, aliceUID, aliceUID))
	return folder
}

func (h *harness) request(method, path, user string, body io.Reader) *http.Response {
	h.Helper()
	request, err := http.NewRequest(method, h.url+path, body)
	must(h.T, err)
	if user != "" {
		request.Header.Set("X-Stead-User", user)
	}
	response, err := http.DefaultClient.Do(request)
	must(h.T, err)
	h.Cleanup(func() { response.Body.Close() })
	return response
}

// call expects a status below 300 and returns the body.
func (h *harness) call(method, path, user string, body io.Reader) []byte {
	h.Helper()
	response := h.request(method, path, user, body)
	content, err := io.ReadAll(response.Body)
	must(h.T, err)
	if response.StatusCode >= 300 {
		h.Fatalf("%s %s: %d %s", method, path, response.StatusCode, content)
	}
	return content
}

// refused expects an error with this code.
func (h *harness) refused(code, method, path, user string, body io.Reader) {
	h.Helper()
	response := h.request(method, path, user, body)
	var failure apiError
	content, _ := io.ReadAll(response.Body)
	json.Unmarshal(content, &failure)
	if failure.Code != code || response.StatusCode < 400 {
		h.Errorf("%s %s: wanted %s, got %d %s", method, path, code, response.StatusCode, content)
	}
}

// at is a call's address with its parameters in pairs.
func at(call string, pairs ...string) string {
	values := url.Values{}
	for i := 0; i < len(pairs); i += 2 {
		values.Set(pairs[i], pairs[i+1])
	}
	return "/v1/" + call + "?" + values.Encode()
}

// commandRun is a command being run: its started frame has been read.
type commandRun struct {
	h    *harness
	body io.ReadCloser
	ID   string `json:"id"`
	PID  int    `json:"pid"`
}

type commandEnd struct {
	stdout, stderr []byte
	execResult
}

func readFrame(from io.Reader) (byte, []byte, error) {
	var header [frameHeader]byte
	if _, err := io.ReadFull(from, header[:]); err != nil {
		return 0, nil, err
	}
	payload := make([]byte, binary.BigEndian.Uint32(header[4:]))
	_, err := io.ReadFull(from, payload)
	return header[0], payload, err
}

func (h *harness) begin(request any, user string) *commandRun {
	h.Helper()
	encoded, err := json.Marshal(request)
	must(h.T, err)
	response := h.request("POST", "/v1/exec", user, bytes.NewReader(encoded))
	if response.StatusCode != http.StatusOK {
		content, _ := io.ReadAll(response.Body)
		h.Fatalf("exec %s: %d %s", encoded, response.StatusCode, content)
	}
	run := &commandRun{h: h, body: response.Body}
	kind, payload, err := readFrame(response.Body)
	must(h.T, err)
	must(h.T, json.Unmarshal(payload, run))
	if kind != frameStarted || run.ID == "" {
		h.Fatalf("first frame is %d %s", kind, payload)
	}
	return run
}

func (r *commandRun) end() (*commandEnd, error) {
	end := &commandEnd{}
	for {
		kind, payload, err := readFrame(r.body)
		if err != nil {
			return nil, err
		}
		switch kind {
		case frameStdout:
			end.stdout = append(end.stdout, payload...)
		case frameStderr:
			end.stderr = append(end.stderr, payload...)
		case frameResult:
			if _, err := r.body.Read(make([]byte, 1)); err != io.EOF {
				return nil, errors.New("something follows the result")
			}
			return end, json.Unmarshal(payload, &end.execResult)
		default:
			return nil, fmt.Errorf("frame of type %d", kind)
		}
	}
}

func (h *harness) run(user string, request any) *commandEnd {
	h.Helper()
	end, err := h.begin(request, user).end()
	must(h.T, err)
	return end
}

func (h *harness) shell(script string) *commandEnd {
	h.Helper()
	return h.run("", execRequest{Argv: []string{"/bin/sh", "-c", script}})
}

func (e *commandEnd) code() int {
	if e.ExitCode == nil {
		return -1
	}
	return *e.ExitCode
}

func (e *commandEnd) signal() string {
	if e.Signal == nil {
		return ""
	}
	return *e.Signal
}

// inNamespaces runs the test again in a process with its own hostname, network and mounts, and reports
// whether this is that process.
func inNamespaces(t *testing.T) bool {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("namespaces need root")
	}
	if os.Getenv("STEAD_TEST_NAMESPACES") == t.Name() {
		must(t, syscall.Mount("", "/", "", syscall.MS_PRIVATE|syscall.MS_REC, ""))
		kernel, err := openNetlink()
		must(t, err)
		defer kernel.close()
		must(t, kernel.changeLink(1, true, nil)) // lo
		return true
	}
	command := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=15s")
	command.Env = append(os.Environ(), "STEAD_TEST_NAMESPACES="+t.Name())
	command.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS | syscall.CLONE_NEWNS}
	if output, err := command.CombinedOutput(); err != nil || !strings.Contains(string(output), "--- PASS") {
		t.Fatalf("%v\n%s", err, output)
	}
	return false
}
