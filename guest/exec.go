package main

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	killGrace       = 500 * time.Millisecond
	oomWait         = 300 * time.Millisecond
	defaultPath     = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	startedDelay    = 100 * time.Millisecond
	inlinePipeBytes = 64 << 10
	timeoutLimit    = 366 * 24 * 3600 * 1000
)

type execRequest struct {
	Encoding  string            `json:"encoding"`
	Argv      []string          `json:"argv"`
	Cwd       string            `json:"cwd"`
	Env       map[string]string `json:"env"`
	Stdin     string            `json:"stdin"`
	StdinB64  []byte            `json:"stdin_b64"`
	TimeoutMs int64             `json:"timeout_ms"`
	Terminal  string            `json:"terminal"`

	program string // what to execute when it is not Argv[0]
}

type execResult struct {
	ExitCode   *int      `json:"exit_code"`
	Signal     *string   `json:"signal"`
	TimedOut   bool      `json:"timed_out"`
	DurationUs int64     `json:"duration_us"`
	OOM        *oomEvent `json:"oom"`
}

func (r *execRequest) readFrom(in *jsonReader) {
	in.object(func(name string) {
		switch name {
		case "encoding":
			r.Encoding = in.text()
		case "argv":
			r.Argv = in.texts()
		case "cwd":
			r.Cwd = in.text()
		case "env":
			r.Env = in.textsByName()
		case "stdin":
			r.Stdin = in.text()
		case "stdin_b64":
			r.StdinB64 = in.base64()
		case "timeout_ms":
			r.TimeoutMs = in.integer()
		case "terminal":
			r.Terminal = in.text()
		default:
			in.skip()
		}
	})
}

func (r *execResult) appendTo(to []byte) []byte {
	to = appendName(append(to, '{'), "exit_code")
	if r.ExitCode == nil {
		to = append(to, "null"...)
	} else {
		to = strconv.AppendInt(to, int64(*r.ExitCode), 10)
	}
	to = appendName(to, "signal")
	if r.Signal == nil {
		to = append(to, "null"...)
	} else {
		to = appendText(to, *r.Signal)
	}
	to = strconv.AppendBool(appendName(to, "timed_out"), r.TimedOut)
	to = appendName(appendInteger(to, "duration_us", r.DurationUs), "oom")
	if r.OOM == nil {
		return append(to, "null}"...)
	}
	event, _ := json.Marshal(r.OOM)
	return append(append(to, event...), '}')
}

// executions are the commands that run now.
type executions struct {
	accounts  *accounts
	launcher  *launcher
	terminals *terminals
	oom       *oomLog

	mu     sync.Mutex
	prefix string
	count  uint64
	byID   map[string]*execution
	byPID  map[int]*execution
}

func newExecutions(accounts *accounts, launcher *launcher, terminals *terminals) *executions {
	e := &executions{
		accounts:  accounts,
		launcher:  launcher,
		terminals: terminals,
		// An id of an agent before this one must not name a command of ours.
		prefix: strconv.FormatInt(time.Now().UnixNano(), 36) + "-",
		byID:   map[string]*execution{},
		byPID:  map[int]*execution{},
	}
	e.oom = newOOMLog(e.isRunning)
	return e
}

func (e *executions) isRunning(pid int) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.byPID[pid] != nil
}

func (e *executions) alone() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.byID) == 1
}

func (e *executions) add(running *execution) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.count++
	running.id = e.prefix + strconv.FormatUint(e.count, 36)
	e.byID[running.id] = running
	e.byPID[running.pid] = running
}

func (e *executions) remove(running *execution) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.byID, running.id)
	if e.byPID[running.pid] == running {
		delete(e.byPID, running.pid)
	}
}

func (e *executions) find(id string) (*execution, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if running := e.byID[id]; running != nil {
		return running, nil
	}
	return nil, fail("not_found", "command %s is not running", printable(id))
}

// decodeLatin1 turns texts whose characters stand for bytes into those bytes: JSON cannot carry a name that is
// not UTF-8.
func (r *execRequest) decodeLatin1() error {
	valid := true
	decode := func(text string) string {
		decoded := make([]byte, 0, len(text))
		for _, character := range text {
			valid = valid && character < 0x100
			decoded = append(decoded, byte(character))
		}
		return string(decoded)
	}
	for i, argument := range r.Argv {
		r.Argv[i] = decode(argument)
	}
	r.Cwd = decode(r.Cwd)
	environment := make(map[string]string, len(r.Env))
	for name, value := range r.Env {
		environment[decode(name)] = decode(value)
	}
	r.Env = environment
	if !valid {
		return invalid("latin1 text has a character above U+00FF")
	}
	return nil
}

func (r *execRequest) check() error {
	switch r.Encoding {
	case "", "utf-8":
	case "latin1":
		if err := r.decodeLatin1(); err != nil {
			return err
		}
	default:
		return invalid("encoding must be utf-8 or latin1")
	}
	if len(r.Argv) == 0 || r.Argv[0] == "" {
		return invalid("argv is empty")
	}
	for _, argument := range r.Argv {
		if strings.IndexByte(argument, 0) >= 0 {
			return invalid("argv contains a NUL byte")
		}
	}
	for name, value := range r.Env {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.IndexByte(value, 0) >= 0 {
			return invalid("env has an invalid entry %s: names need at least one character and no =, values no NUL byte", printable(name))
		}
	}
	switch r.Stdin {
	case "", "none", "inline", "stream":
	default:
		return invalid("stdin must be none, inline or stream")
	}
	if len(r.StdinB64) > 0 && r.Stdin != "inline" {
		return invalid("stdin_b64 needs stdin inline")
	}
	if r.TimeoutMs < 0 || r.TimeoutMs > timeoutLimit {
		return invalid("timeout_ms must be between 0 and %d", timeoutLimit)
	}
	if r.Cwd == "" {
		r.Cwd = "/"
	}
	if r.Cwd[0] != '/' || strings.IndexByte(r.Cwd, 0) >= 0 {
		return invalid("cwd must be an absolute path")
	}
	return nil
}

func (e *executions) handleExec(w http.ResponseWriter, r *http.Request) {
	arrived := time.Now()
	var request execRequest
	if err := readLean(w, r, &request); err != nil {
		writeError(w, err)
		return
	}
	actor, err := e.accounts.find(r.Header.Get("X-Stead-User"))
	if err == nil {
		err = request.check()
	}
	if err != nil {
		writeError(w, err)
		return
	}
	request.Env = e.accounts.environment(actor, request.Env)
	var record *terminal
	if request.Terminal != "" {
		if record, err = e.terminals.record(request.Terminal, actor); err != nil {
			writeError(w, err)
			return
		}
	}
	running, err := e.launcher.launch(&request, actor)
	if failure := (*startFailure)(nil); errors.As(err, &failure) {
		e.answerNotStarted(w, failure, record, arrived)
		return
	}
	if err != nil {
		if record != nil {
			record.release()
			record.release()
		}
		writeError(w, err)
		return
	}
	e.add(running)
	w.Header().Set("Content-Type", "application/octet-stream")
	frames := &frameWriter{out: w, record: record}
	// A short command is answered in one packet; a caller that has to feed or may cancel it learns the id in time.
	frames.sendStarted(running.id, running.pid, request.Stdin == "stream")
	announce := time.AfterFunc(startedDelay, frames.flush)
	defer frames.close()
	defer announce.Stop()

	if request.TimeoutMs > 0 {
		left := time.Duration(request.TimeoutMs)*time.Millisecond - time.Since(arrived)
		timer := time.AfterFunc(left, running.timeOut)
		defer timer.Stop()
	}
	var streams sync.WaitGroup
	streams.Add(2)
	go running.stdout.forward(frames, frameStdout, &streams)
	go running.stderr.forward(frames, frameStderr, &streams)

	result := running.wait()
	running.stdout.end()
	running.stderr.end()
	running.closeStdin()
	streams.Wait()
	killed := result.Signal != nil && *result.Signal == "SIGKILL" || result.ExitCode != nil && *result.ExitCode == 137
	killed = killed && !running.killedByUs()
	wait := time.Duration(0)
	if killed {
		wait = oomWait
	}
	e.oom.catchUp()
	// A command that did not fail has lost a child only if no other command runs that could have.
	suspect := killed || result.ExitCode != nil && *result.ExitCode != 0 || e.alone()
	result.OOM = e.oom.find(running.pid, arrived, suspect, wait)
	e.remove(running)

	result.DurationUs = time.Since(arrived).Microseconds()
	frames.sendResult(result)
}

// answerNotStarted reports a program that could not be executed as a shell does: an exit code and a line on
// standard error, so that callers handle an argument list and a shell line alike.
func (e *executions) answerNotStarted(w http.ResponseWriter, failure *startFailure, record *terminal, arrived time.Time) {
	w.Header().Set("Content-Type", "application/octet-stream")
	frames := &frameWriter{out: w, record: record}
	defer frames.close()
	e.mu.Lock()
	e.count++
	id := e.prefix + strconv.FormatUint(e.count, 36)
	e.mu.Unlock()
	frames.sendStarted(id, 0, false)
	frames.send(frameStderr, append(make([]byte, frameHeader, 128), failure.message+"\n"...), false)
	if record != nil {
		record.release()
		record.release()
	}
	frames.sendResult(&execResult{ExitCode: &failure.exitCode, DurationUs: time.Since(arrived).Microseconds()})
}

func (e *executions) handleStdin(w http.ResponseWriter, r *http.Request) {
	running, err := e.find(r.PathValue("id"))
	if err != nil {
		drain(r.Body)
		writeError(w, err)
		return
	}
	pipe, err := running.takeStdin()
	if err != nil {
		drain(r.Body)
		writeError(w, err)
		return
	}
	buffer := takeBuffer()
	defer giveBuffer(buffer)
	// A command may close its input early or end: the rest is dropped, as a shell's pipe would.
	if _, err := io.CopyBuffer(writeOnly{pipe}, r.Body, *buffer); err != nil {
		io.CopyBuffer(io.Discard, readOnly{r.Body}, *buffer)
	}
	running.closeStdin()
	w.WriteHeader(http.StatusNoContent)
}

func (e *executions) handleKill(w http.ResponseWriter, r *http.Request) {
	running, err := e.find(r.PathValue("id"))
	if err != nil {
		writeError(w, err)
		return
	}
	running.kill(syscall.SIGKILL)
	w.WriteHeader(http.StatusNoContent)
}
