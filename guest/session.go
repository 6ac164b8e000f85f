package main

import (
	"bytes"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"stead/guest/screen"
)

const (
	scrollbackLines = 10_000
	argvShown       = 2 << 10
	// Output before the first client that is kept as it was printed.
	firstOutput = 64 << 10
)

// session is a terminal or a background process. It belongs to the agent and not to a connection, so it is
// part of the memory that suspend, snapshot and fork save.
type session struct {
	id        string
	kind      string
	user      string
	owner     uint32
	argv      []string
	pty       bool
	createdMs int64
	table     *sessions
	listed    bool       // started; guarded by the table's lock
	running   *execution // nil when the program could not be executed

	input       *os.File // the pty's master or the pipe of standard input; nil without
	inputTo     syscall.RawConn
	inputTurn   chan struct{} // one writer at a time; taken while the program reads no input
	inputClosed atomic.Bool

	mu         sync.Mutex
	cols, rows int
	clients    []*client
	screen     *screen.Screen // terminals
	printed    []byte         // terminals: all output so far, until the first client or firstOutput bytes
	redrawn    bool           // terminals: clients are sent a redrawn screen, since printed is not all
	log        outputLog      // processes
	offset     int64          // bytes of output so far
	held       int64          // bytes held, as accounted in the table
	removed    bool
	exitedMs   int64
	exitedAt   time.Time
	exitedIn   string        // the id that the VM had
	result     *execResult   // after the exit and all output
	ended      chan struct{} // closed with the result
	room       chan struct{} // told when a client has taken something; nil until one had to be waited for
	timeLimit  *time.Timer
}

// sessionInfo is a session as the host sees it.
type sessionInfo struct {
	ID        string   `json:"id"`
	Kind      string   `json:"kind"`
	User      string   `json:"user"`
	PID       int      `json:"pid"`
	Argv      []string `json:"argv"`
	Pty       bool     `json:"pty"`
	Cols      int      `json:"cols"`
	Rows      int      `json:"rows"`
	Title     string   `json:"title"`
	CreatedMs int64    `json:"created_ms"`
	ExitedMs  *int64   `json:"exited_ms"`
	ExitCode  *int     `json:"exit_code"`
	Signal    *string  `json:"signal"`
	TimedOut  bool     `json:"timed_out"`
	Attached  int      `json:"attached"`
	Offset    int64    `json:"offset"`
	Start     int64    `json:"start"`
}

func (s *session) info() *sessionInfo {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.infoLocked()
}

func (s *session) infoLocked() *sessionInfo {
	info := &sessionInfo{
		ID: s.id, Kind: s.kind, User: s.user, Argv: s.argv, Pty: s.pty, Cols: s.cols, Rows: s.rows,
		CreatedMs: s.createdMs, Attached: len(s.clients), Offset: s.offset, Start: s.log.start,
	}
	if s.running != nil {
		info.PID = s.running.pid
	}
	if s.screen != nil {
		info.Title, info.Start = s.screen.Title(), s.offset
	}
	if s.result != nil {
		info.ExitedMs, info.ExitCode, info.Signal, info.TimedOut = &s.exitedMs, s.result.ExitCode, s.result.Signal, s.result.TimedOut
	}
	return info
}

// shownArgv is what a list says of the arguments: not all of very long ones.
func shownArgv(argv []string) []string {
	shown, left := make([]string, 0, min(len(argv), 64)), argvShown
	for _, argument := range argv {
		if len(argument) > left || len(shown) == 64 {
			return append(shown, strings.ToValidUTF8(argument[:min(left, len(argument))], "\ufffd")+"...")
		}
		left -= len(argument)
		shown = append(shown, argument)
	}
	return shown
}

// launch starts the program of a session.
func (s *session) launch(launcher *launcher, request *sessionRequest, actor *user) error {
	command := &execRequest{Argv: request.Argv, Cwd: request.Cwd, Env: request.Env, program: request.program}
	if s.pty {
		return s.launchOnPty(launcher, command, actor)
	}
	p, err := launcher.openPipes(request.Stdin)
	if err != nil {
		return overloaded("cannot open pipes for the process: %v", err)
	}
	p.session = true
	pid, pidfd, err := launcher.start(command, actor, p)
	if err != nil {
		p.closeAll(launcher.null)
		return err
	}
	p.closeChild(launcher.null)
	if request.Stdin {
		s.setInput(os.NewFile(uintptr(p.stdin), "stdin"))
	}
	s.follow(pid, pidfd, p.out[:]...)
	return nil
}

func (s *session) launchOnPty(launcher *launcher, command *execRequest, actor *user) error {
	master, slave, err := openPty(s.cols, s.rows, actor)
	if err != nil {
		return overloaded("cannot open a terminal: %v", err)
	}
	defer syscall.Close(slave)
	p := &pipes{child: [3]int{slave, slave, slave}, session: true, tty: true}
	pid, pidfd, err := launcher.start(command, actor, p)
	if err != nil {
		syscall.Close(master)
		return err
	}
	s.follow(pid, pidfd, master)
	return nil
}

// follow reads what the program prints, and waits for its end.
func (s *session) follow(pid, pidfd int, outputs ...int) {
	syscall.SetNonblock(pidfd, true) // or the runtime would not poll it
	s.running = &execution{pid: pid, pidfd: os.NewFile(uintptr(pidfd), "pidfd")}
	var reading sync.WaitGroup
	streams := make([]*stream, len(outputs))
	for i, fd := range outputs {
		streams[i], _ = newStream(fd) // cannot fail: the descriptor is open
		streams[i].tty = s.pty
		reading.Add(1)
	}
	if s.pty {
		s.setInput(streams[0].file)
	}
	for i, each := range streams {
		go each.forward(s, frameStdout+byte(i), &reading)
	}
	go func() {
		result := s.running.wait()
		exited := time.Now()
		for _, each := range streams {
			each.end()
		}
		reading.Wait()
		s.finish(result, exited)
	}()
}

// send takes a piece of output: to the clients first, then into the screen or the log.
func (s *session) send(kind byte, frame []byte, _ bool) {
	putHeader(kind, frame)
	data := frame[frameHeader:]
	s.mu.Lock()
	s.waitForRoomLocked(len(frame))
	s.offset += int64(len(data))
	var replies []byte
	if s.screen == nil {
		s.log.append(kind, data)
		s.pushLocked(frame)
	} else {
		s.pushLocked(frame)
		s.screen.Write(data)
		replies = s.screen.Replies()
		if len(s.clients) > 0 {
			replies = nil // the clients' terminals answer
		}
		s.keepPrintedLocked(data, len(replies) > 0)
	}
	s.accountLocked()
	s.mu.Unlock()
	if len(replies) > 0 {
		s.typed(replies)
	}
	s.table.memory.balance(s.table)
}

// keepPrintedLocked keeps the output for the first client. A question that was answered must not reach a terminal
// that answers it again.
func (s *session) keepPrintedLocked(data []byte, answered bool) {
	if s.redrawn {
		return
	}
	if answered || len(s.printed)+len(data) > firstOutput {
		s.printed, s.redrawn = nil, true
		return
	}
	s.printed = append(s.printed, data...)
}

func (s *session) pushLocked(frame []byte) {
	for _, each := range s.clients {
		each.push(frame)
	}
}

// waitForRoomLocked lets the program wait for clients that are slower than it is but do read. One that does not
// make room in time is not waited for again until it has caught up; output is left out for it.
func (s *session) waitForRoomLocked(size int) {
	full := func(c *client) bool { return c.isFullLocked(size) }
	if !slices.ContainsFunc(s.clients, full) {
		return
	}
	if s.room == nil {
		s.room = make(chan struct{}, 1)
	}
	patience := time.NewTimer(clientPatience)
	defer patience.Stop()
	for slices.ContainsFunc(s.clients, full) {
		s.mu.Unlock()
		select {
		case <-s.room:
			s.mu.Lock()
		case <-patience.C:
			s.mu.Lock()
			for _, each := range s.clients {
				each.slow = each.slow || full(each)
			}
		}
	}
}

func (s *session) rest(byte) io.Writer { return io.Discard }
func (s *session) release()            {}

// signal sends a signal to the process group of the program.
func (s *session) signal(number syscall.Signal) {
	switch {
	case s.running == nil:
	case s.kind == kindTerminal && number == syscall.SIGINT:
		s.interrupt()
	case s.kind == kindTerminal && number == syscall.SIGKILL:
		s.kill()
	default:
		s.running.kill(number)
	}
}

// kill ends every process of the session, also those in other process groups and those left after the exit.
func (s *session) kill() {
	if s.running == nil {
		return
	}
	over := s.isOver()
	s.running.kill(syscall.SIGKILL)
	for range 8 {
		groups, leader := groupsOf(s.running.pid)
		if over && leader || len(groups) == 0 {
			return // a leader after the end is that of another session, which got the id
		}
		for group := range groups {
			syscall.Kill(-group, syscall.SIGKILL)
		}
		time.Sleep(time.Millisecond)
	}
}

// groupsOf finds the process groups of a session that have living processes, and whether its leader is one.
func groupsOf(session int) (groups map[int]bool, leader bool) {
	groups = map[int]bool{}
	folder, err := os.Open("/proc")
	if err != nil {
		return groups, false
	}
	defer folder.Close()
	names, _ := folder.Readdirnames(-1)
	wanted := strconv.Itoa(session)
	for _, name := range names {
		if name[0] < '1' || name[0] > '9' {
			continue
		}
		content, _ := os.ReadFile("/proc/" + name + "/stat")
		// After the program's name, which may hold anything: state, parent, group, session.
		fields := strings.Fields(string(content[bytes.LastIndexByte(content, ')')+1:]))
		if len(fields) < 4 || fields[0] == "Z" || fields[0] == "X" || fields[3] != wanted {
			continue
		}
		if group, err := strconv.Atoi(fields[2]); err == nil && group > 1 {
			groups[group] = true
			leader = leader || name == wanted
		}
	}
	return groups, leader
}

func (s *session) isOver() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// finish reports the end to all clients and waiting calls, after all output.
func (s *session) finish(result *execResult, at time.Time) {
	s.closeInput()
	s.mu.Lock()
	s.result, s.exitedMs, s.exitedAt, s.exitedIn = result, at.UnixMilli(), at, s.table.machine()
	close(s.ended)
	if s.timeLimit != nil {
		s.timeLimit.Stop()
	}
	for _, each := range s.clients {
		each.startSending()
	}
	s.mu.Unlock()
	s.table.exited(s)
}

func (s *session) limitTime(limit time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.result == nil {
		s.timeLimit = time.AfterFunc(limit, s.running.timeOut)
	}
}

// fitting is the nearest size that a screen can have.
func fitting(cols, rows int) (int, int) {
	return min(max(cols, screen.MinCols), screen.MaxCols), min(max(rows, screen.MinRows), screen.MaxRows)
}

// resizeLocked gives a terminal the size of its smallest client; true if that is another size.
func (s *session) resizeLocked() bool {
	cols, rows := 0, 0
	for _, each := range s.clients {
		if each.cols > 0 && (cols == 0 || each.cols < cols) {
			cols = each.cols
		}
		if each.rows > 0 && (rows == 0 || each.rows < rows) {
			rows = each.rows
		}
	}
	if cols == 0 || rows == 0 || !s.pty {
		return false
	}
	cols, rows = fitting(cols, rows)
	if cols == s.cols && rows == s.rows {
		return false
	}
	s.cols, s.rows = cols, rows
	if s.screen != nil {
		s.screen.Resize(cols, rows)
	}
	if s.input != nil {
		s.inputTo.Control(func(fd uintptr) { setWindowSize(int(fd), cols, rows) })
	}
	return true
}

func (s *session) accountLocked() {
	if s.removed {
		return
	}
	held := int64(s.log.size)
	if s.screen != nil {
		held = int64(s.screen.Held()+cap(s.printed)) + int64(s.cols*s.rows)*cellBytes
	}
	for _, each := range s.clients {
		held += int64(cap(each.pending) + each.input.held())
	}
	s.table.memory.held.Add(held - s.held)
	s.held = held
}

// trim gives up a quarter of the output held, the oldest.
func (s *session) trim() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.screen != nil {
		s.screen.Trim(s.screen.Held() * 3 / 4)
	} else {
		s.log.trim(s.log.size / 4)
	}
	s.accountLocked()
}
