package main

import (
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// execution is one running command: its process, its pipes and who ended it.
type execution struct {
	id     string
	pid    int
	pidfd  *os.File
	stdout *stream
	stderr *stream

	mu         sync.Mutex
	stdin      *os.File
	stdinTaken bool
	killed     bool
	timedOut   bool
	graceOver  bool // after timedOut: SIGKILL was sent
	collected  bool // the exit status is known, the process may be a zombie still
	reaped     bool
}

// kill signals the process group. Until the command is reaped its pid, and so its group's id, is not reused.
func (x *execution) kill(signal syscall.Signal) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.reaped {
		x.killed = x.killed || signal == syscall.SIGKILL
		syscall.Kill(-x.pid, signal)
	}
}

func (x *execution) killedByUs() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.killed
}

// timeOut asks the group to end, and makes it end a little later. The command may be gone by then while
// others of its group are not, so the second signal comes in any case and the reaping waits for it.
func (x *execution) timeOut() {
	x.mu.Lock()
	if x.reaped {
		x.mu.Unlock()
		return
	}
	x.timedOut = true
	syscall.Kill(-x.pid, syscall.SIGTERM)
	x.mu.Unlock()
	time.AfterFunc(killGrace, func() {
		x.kill(syscall.SIGKILL)
		x.mu.Lock()
		defer x.mu.Unlock()
		x.graceOver = true
		x.reap()
	})
}

// reap frees the pid once its status has been read and its group is no longer signalled.
func (x *execution) reap() {
	if x.collected && !x.reaped && (!x.timedOut || x.graceOver) {
		x.reaped = true
		waitFor(x.pid, unix.WEXITED)
	}
}

// wait returns when the command's own process has ended.
func (x *execution) wait() *execResult {
	defer x.pidfd.Close()
	var status exitStatus
	conn, err := x.pidfd.SyscallConn()
	if err == nil {
		// A pidfd becomes readable when its process ends: no thread sits in waitid meanwhile.
		err = conn.Read(func(uintptr) bool {
			status, err = waitFor(x.pid, unix.WEXITED|unix.WNOWAIT|unix.WNOHANG)
			return err != nil || status.ended()
		})
	}
	if err != nil || !status.ended() {
		status, _ = waitFor(x.pid, unix.WEXITED|unix.WNOWAIT)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.collected = true
	x.reap()
	result := &execResult{TimedOut: x.timedOut}
	if status.exited() {
		code := int(status.value)
		result.ExitCode = &code
	} else {
		name := signalName(syscall.Signal(status.value))
		result.Signal = &name
	}
	return result
}

func (x *execution) takeStdin() (*os.File, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.stdinTaken {
		return nil, fail("busy", "standard input of this command is in use or closed")
	}
	if x.stdin == nil {
		return nil, invalid("this command was started without stdin: stream")
	}
	x.stdinTaken = true
	return x.stdin, nil
}

func (x *execution) closeStdin() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.stdin != nil {
		x.stdinTaken = true
		x.stdin.Close()
	}
}

// exitStatus is siginfo_t with the fields that waitid fills in for a child, which unix.Siginfo does not name.
type exitStatus struct {
	signal, errno, code, _ int32
	pid                    int32
	uid                    uint32
	value                  int32
	_                      [100]byte
}

func (s *exitStatus) ended() bool  { return s.pid != 0 }
func (s *exitStatus) exited() bool { return s.code == 1 } // CLD_EXITED

func waitFor(pid, flags int) (status exitStatus, err error) {
	for {
		err = unix.Waitid(unix.P_PID, pid, (*unix.Siginfo)(unsafe.Pointer(&status)), flags, nil)
		if err != syscall.EINTR {
			return status, err
		}
	}
}

var signalNames = [...]string{1: "SIGHUP", "SIGINT", "SIGQUIT", "SIGILL", "SIGTRAP", "SIGABRT", "SIGBUS", "SIGFPE",
	"SIGKILL", "SIGUSR1", "SIGSEGV", "SIGUSR2", "SIGPIPE", "SIGALRM", "SIGTERM", "SIGSTKFLT", "SIGCHLD", "SIGCONT",
	"SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG", "SIGXCPU", "SIGXFSZ", "SIGVTALRM", "SIGPROF", "SIGWINCH",
	"SIGIO", "SIGPWR", "SIGSYS"}

func signalName(signal syscall.Signal) string {
	if int(signal) < len(signalNames) && signal > 0 {
		return signalNames[signal]
	}
	return "SIG" + strconv.Itoa(int(signal))
}
