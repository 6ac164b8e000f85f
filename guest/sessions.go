package main

import (
	"errors"
	"io"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"stead/guest/screen"
)

const (
	kindTerminal = "terminal"
	kindProcess  = "process"

	terminalsLimit = 128
	processesLimit = 256
	sizeLimit      = 1000 // columns and rows

	terminalKept = time.Minute    // how long an exited terminal is listed
	processKept  = 24 * time.Hour // an exited process too, unless room is needed
	closeWait    = 5 * time.Second
	outputLimit  = 1 << 20
)

// sessions is the table of terminals and background processes. It is empty and starts nothing until the first.
type sessions struct {
	accounts *accounts
	launcher *launcher
	machine  func() string // the VM's id, which a fork changes
	memory   sessionMemory

	mu      sync.Mutex
	all     []*session // oldest first; those being started are in it
	numbers map[string]int
	conns   map[*connection]bool // of clients of sessions and ports
}

type sessionRequest struct {
	ID        string            `json:"id"`
	Kind      string            `json:"kind"`
	Encoding  string            `json:"encoding"`
	Argv      []string          `json:"argv"`
	Cwd       string            `json:"cwd"`
	Env       map[string]string `json:"env"`
	Cols      int               `json:"cols"`
	Rows      int               `json:"rows"`
	Pty       bool              `json:"pty"`
	Stdin     bool              `json:"stdin"`
	TimeoutMs int64             `json:"timeout_ms"`

	program string
}

// viewer is the caller: the owner of the VM, who sees all sessions, or a Linux user.
type viewer struct {
	owner bool
	actor *user // nil is root
}

func (t *sessions) viewer(r *http.Request) (viewer, error) {
	name := r.Header.Get("X-Stead-User")
	actor, err := t.accounts.find(name)
	return viewer{name == "", actor}, err
}

func (v viewer) uid() uint32 {
	if v.actor == nil {
		return 0
	}
	return v.actor.uid
}

func (v viewer) sees(s *session) bool { return v.owner || v.uid() == s.owner }

// idRule describes ids of sessions and names of recorded terminals.
const idRule = "1 to 64 letters, digits, dots, dashes and underscores"

func isID(id string) bool {
	const allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
	return id != "" && len(id) <= 64 && strings.Trim(id, allowed) == ""
}

func (r *sessionRequest) check() error {
	if r.Kind != kindTerminal && r.Kind != kindProcess {
		return invalid("kind must be terminal or process")
	}
	if r.ID != "" && !isID(r.ID) {
		return invalid("id must be " + idRule)
	}
	if r.Cols == 0 && r.Rows == 0 {
		r.Cols, r.Rows = 80, 24
	}
	if err := checkSize(r.Cols, r.Rows); err != nil {
		return err
	}
	login := r.Kind == kindTerminal && len(r.Argv) == 0
	if login {
		r.Argv = []string{"-"}
	}
	home := r.Cwd == ""
	command := &execRequest{Encoding: r.Encoding, Argv: r.Argv, Cwd: r.Cwd, Env: r.Env, TimeoutMs: r.TimeoutMs}
	if err := command.check(); err != nil {
		return err
	}
	r.Cwd, r.Env = command.Cwd, command.Env
	if login {
		r.Argv = nil
	}
	if r.Kind == kindTerminal {
		r.Pty = true
		if home {
			r.Cwd = ""
		}
	}
	return nil
}

func checkSize(cols, rows int) error {
	if cols < 1 || rows < 1 || cols > sizeLimit || rows > sizeLimit {
		return invalid("a terminal has 1 to %d columns and rows, not %d x %d", sizeLimit, cols, rows)
	}
	return nil
}

// logIn fills in what a login gives: the environment, and for a terminal the home folder and the shell.
func (r *sessionRequest) logIn(accounts *accounts, actor *user) {
	r.Env = accounts.environment(actor, r.Env)
	if r.Kind != kindTerminal {
		return
	}
	account := accounts.environment(actor, nil)
	if r.Cwd == "" {
		r.Cwd = account["HOME"]
		if actor.canEnter(r.Cwd) != nil {
			r.Cwd = "/"
		}
	}
	if r.Argv == nil {
		r.program = account["SHELL"]
		// The dash tells a shell that it is a login shell.
		r.Argv = []string{"-" + r.program[strings.LastIndexByte(r.program, '/')+1:]}
	}
}

func (t *sessions) handleStart(w http.ResponseWriter, r *http.Request) {
	var request sessionRequest
	err := readJSON(w, r, &request)
	var asking viewer
	if err == nil {
		asking, err = t.viewer(r)
	}
	if err == nil {
		err = request.check()
	}
	var started *session
	if err == nil {
		started, err = t.start(&request, asking.actor)
	}
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusCreated, started.info())
}

func (t *sessions) start(request *sessionRequest, actor *user) (*session, error) {
	request.logIn(t.accounts, actor)
	s := &session{
		kind: request.Kind, user: "root", argv: shownArgv(request.Argv), pty: request.Pty, table: t,
		createdMs: time.Now().UnixMilli(), ended: make(chan struct{}), inputTurn: make(chan struct{}, 1),
	}
	s.cols, s.rows = fitting(request.Cols, request.Rows)
	if actor != nil {
		s.user, s.owner = actor.name, actor.uid
	}
	if s.kind == kindTerminal {
		s.screen = screen.New(s.cols, s.rows, scrollbackLines)
	}
	if err := t.enter(s, request.ID); err != nil {
		return nil, err
	}
	err := s.launch(t.launcher, request, actor)
	if failure := (*startFailure)(nil); errors.As(err, &failure) {
		// As a shell does it: a line of output and an exit code.
		end := "\n"
		if s.pty {
			end = "\r\n"
		}
		s.send(frameStderr, append(make([]byte, frameHeader), failure.message+end...), false)
		s.finish(&execResult{ExitCode: &failure.exitCode}, time.Now())
		err = nil
	}
	if err != nil {
		t.remove(s)
		return nil, err
	}
	if request.TimeoutMs > 0 && s.running != nil {
		s.limitTime(time.Duration(request.TimeoutMs) * time.Millisecond)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	s.listed = true
	return s, nil
}

// enter puts a new session into the table, if its id is free and there is room.
func (t *sessions) enter(s *session, id string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.forgetOldLocked()
	taken := func(id string) bool {
		return slices.ContainsFunc(t.all, func(other *session) bool { return other.id == id })
	}
	if id != "" && taken(id) {
		return fail("exists", "session %s exists", id)
	}
	if err := t.makeRoomLocked(s.kind); err != nil {
		return err
	}
	if t.numbers == nil {
		t.numbers = map[string]int{}
	}
	prefix := "pty-"
	if s.kind == kindProcess {
		prefix = "proc-"
	}
	for id == "" || taken(id) {
		t.numbers[prefix]++
		id = prefix + strconv.Itoa(t.numbers[prefix])
	}
	s.id = id
	t.all = append(t.all, s)
	return nil
}

func (t *sessions) makeRoomLocked(kind string) error {
	count := 0
	var oldest *session
	for _, each := range t.all {
		if each.kind == kind {
			count++
			if oldest == nil && each.isOver() {
				oldest = each
			}
		}
	}
	limit := terminalsLimit
	if kind == kindProcess {
		limit = processesLimit
	}
	if count < limit {
		return nil
	}
	if kind == kindProcess && oldest != nil {
		t.removeLocked(oldest)
		return nil
	}
	failure := fail("session_cap", "the VM has %d sessions of kind %s, the most it may have", count, kind)
	failure.Limit = limit
	return failure
}

// forgetOldLocked removes sessions that exited long enough ago, and terminals that exited before a fork.
func (t *sessions) forgetOldLocked() {
	for _, each := range slices.Clone(t.all) {
		kept := terminalKept
		if each.kind == kindProcess {
			kept = processKept
		}
		if !each.isOver() {
			continue
		}
		inherited := each.kind == kindTerminal && each.exitedIn != t.machine()
		if inherited || time.Since(each.exitedAt) >= kept {
			t.removeLocked(each)
		}
	}
}

// exited frees what an exited terminal holds in time, also without further calls.
func (t *sessions) exited(s *session) {
	if s.kind == kindTerminal {
		time.AfterFunc(terminalKept, func() {
			t.mu.Lock()
			defer t.mu.Unlock()
			t.forgetOldLocked()
		})
	}
}

func (t *sessions) remove(s *session) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.removeLocked(s)
}

func (t *sessions) removeLocked(s *session) {
	t.all = slices.DeleteFunc(t.all, func(other *session) bool { return other == s })
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.removed {
		s.removed = true
		t.memory.held.Add(-s.held)
		t.memory.tune()
	}
}

// find is for calls that name a session.
func (t *sessions) find(r *http.Request) (*session, error) {
	asking, err := t.viewer(r)
	if err != nil {
		return nil, err
	}
	id := r.PathValue("id")
	t.mu.Lock()
	defer t.mu.Unlock()
	t.forgetOldLocked()
	for _, each := range t.all {
		if each.id != id || !each.listed {
			continue
		}
		if !asking.sees(each) {
			return nil, fail("permission_denied", "session %s belongs to another user", id)
		}
		return each, nil
	}
	return nil, fail("not_found", "session %s does not exist", printable(id))
}

// answer makes a handler of a call that names a session.
func (t *sessions) answer(call func(s *session, w http.ResponseWriter, r *http.Request) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		s, err := t.find(r)
		if err == nil {
			err = call(s, w, r)
		}
		if err != nil {
			drain(r.Body)
			writeError(w, err)
		}
	}
}

func (t *sessions) handleList(w http.ResponseWriter, r *http.Request) {
	asking, err := t.viewer(r)
	if err != nil {
		writeError(w, err)
		return
	}
	kind := r.URL.Query().Get("kind")
	t.mu.Lock()
	t.forgetOldLocked()
	all := slices.DeleteFunc(slices.Clone(t.all), func(s *session) bool { return !s.listed })
	t.mu.Unlock()
	found := []*sessionInfo{}
	for _, each := range all {
		if asking.sees(each) && (kind == "" || kind == each.kind) {
			found = append(found, each.info())
		}
	}
	writeJSON(w, http.StatusOK, struct {
		Sessions []*sessionInfo `json:"sessions"`
	}{found})
}

func (t *sessions) get(s *session, w http.ResponseWriter, _ *http.Request) error {
	writeJSON(w, http.StatusOK, s.info())
	return nil
}

func (t *sessions) close(s *session, w http.ResponseWriter, _ *http.Request) error {
	s.kill()
	select {
	case <-s.ended:
	case <-time.After(closeWait):
	}
	t.remove(s)
	writeJSON(w, http.StatusOK, s.info())
	return nil
}

func (t *sessions) signal(s *session, w http.ResponseWriter, r *http.Request) error {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, streamChunk))
	if err != nil {
		return err
	}
	if err := s.signalNamed(body); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, s.info())
	return nil
}

func (t *sessions) wait(s *session, w http.ResponseWriter, r *http.Request) error {
	limit, err := number(r, "timeout_ms", timeoutLimit, timeoutLimit)
	if err != nil {
		return err
	}
	timer := time.NewTimer(time.Duration(limit) * time.Millisecond)
	defer timer.Stop()
	select {
	case <-s.ended:
	case <-timer.C:
	case <-r.Context().Done():
	}
	return t.get(s, w, r)
}

func (t *sessions) feed(s *session, w http.ResponseWriter, r *http.Request) error {
	isThere := func() bool { return r.Context().Err() == nil }
	buffer := streamBuffers.Get().(*[]byte)
	defer streamBuffers.Put(buffer)
	for {
		n, err := r.Body.Read(*buffer)
		if n > 0 || err == io.EOF {
			if failed := s.write((*buffer)[:n], isThere); failed == errNoInput {
				return failed
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return invalid("request body ended early: %v", err)
		}
	}
	if r.URL.Query().Get("close") == "1" {
		s.endInput(isThere)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// output is what is held of a process's output from an offset on. It does not wait.
func (t *sessions) output(s *session, w http.ResponseWriter, r *http.Request) error {
	if s.screen != nil {
		return invalid("session %s is a terminal: attach to it", s.id)
	}
	offset, err := number(r, "offset", 0, math.MaxInt64)
	if err != nil {
		return err
	}
	limit, err := number(r, "limit", outputLimit, outputLimit)
	if err != nil {
		return err
	}
	s.mu.Lock()
	answer := appendFrame(nil, frameStarted, encoded(s.infoLocked()))
	answer, offset = s.cutLocked(answer, offset)
	answer, _ = s.log.read(answer, offset, int(limit))
	s.mu.Unlock()
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Write(answer)
	return nil
}

// number is a parameter of a call.
func number(r *http.Request, name string, otherwise, most int64) (int64, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return otherwise, nil
	}
	value, err := strconv.ParseInt(text, 10, 64)
	if err != nil || value < 0 || value > most {
		return 0, invalid("%s must be a number from 0 to %d", name, most)
	}
	return value, nil
}
