package main

import (
	"errors"
	"log"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

const startDeadline = 2 * time.Second

// launcher starts commands: the one place that forks.
type launcher struct {
	null   int      // /dev/null
	groups *cgroups // where commands live; nil when they could not be made

	mu       sync.Mutex
	oomScore *os.File
	ownScore string
}

func newLauncher(groups *cgroups) (*launcher, error) {
	null, err := syscall.Open("/dev/null", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if err := ignoreChildSignal(); err != nil {
		return nil, err
	}
	l := &launcher{null: null, groups: groups}
	if file, err := os.OpenFile("/proc/self/oom_score_adj", os.O_RDWR, 0); err == nil {
		content := make([]byte, 16)
		n, _ := file.Read(content)
		if l.ownScore = strings.TrimSpace(string(content[:n])); l.ownScore != "0" && n > 0 {
			l.oomScore = file
		} else {
			file.Close()
		}
	}
	return l, nil
}

// ignoreChildSignal keeps the end of a command from interrupting the agent, whose runtime would only return from
// the signal: commands are waited for by their pidfd. The default differs from "ignore", which would reap them.
func ignoreChildSignal() error {
	action := struct{ handler, flags, restorer, mask uintptr }{}
	_, _, number := syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(syscall.SIGCHLD), uintptr(unsafe.Pointer(&action)), 0, unsafe.Sizeof(action.mask), 0, 0)
	if number != 0 {
		return number
	}
	return nil
}

// pipes are the file descriptors a command needs; ours are non-blocking, the command's are not.
type pipes struct {
	child   [3]int
	stdin   int
	out     [2]int
	session bool // the command leads a session of its own, not only a process group
	tty     bool // child[0] is its controlling terminal
}

func (p *pipes) closeChild(null int) {
	for i, fd := range p.child {
		if fd >= 0 && fd != null {
			syscall.Close(fd)
		}
		p.child[i] = -1
	}
}

func (p *pipes) closeAll(null int) {
	p.closeChild(null)
	for _, fd := range []int{p.stdin, p.out[0], p.out[1]} {
		if fd >= 0 {
			syscall.Close(fd)
		}
	}
}

func (l *launcher) openPipes(withStdin bool) (*pipes, error) {
	p := &pipes{child: [3]int{l.null, -1, -1}, stdin: -1, out: [2]int{-1, -1}}
	var pair [2]int
	for i := range p.out {
		if err := syscall.Pipe2(pair[:], syscall.O_CLOEXEC); err != nil {
			p.closeAll(l.null)
			return nil, err
		}
		p.out[i], p.child[i+1] = pair[0], pair[1]
		syscall.SetNonblock(pair[0], true)
	}
	if withStdin {
		if err := syscall.Pipe2(pair[:], syscall.O_CLOEXEC); err != nil {
			p.closeAll(l.null)
			return nil, err
		}
		p.child[0], p.stdin = pair[0], pair[1]
		syscall.SetNonblock(pair[1], true)
	}
	return p, nil
}

func (l *launcher) launch(request *execRequest, actor *user) (*execution, error) {
	withStdin := request.Stdin == "stream" || len(request.StdinB64) > 0
	p, err := l.openPipes(withStdin)
	if err != nil {
		return nil, overloaded("cannot open pipes for the command: %v", err)
	}
	pid, pidfd, err := l.start(request, actor, p)
	if err != nil {
		p.closeAll(l.null)
		return nil, err
	}
	p.closeChild(l.null)
	syscall.SetNonblock(pidfd, true) // or the runtime would not poll it
	running := &execution{pid: pid, pidfd: os.NewFile(uintptr(pidfd), "pidfd")}
	// Neither can fail: the descriptors are open pipes.
	running.stdout, _ = newStream(p.out[0])
	running.stderr, _ = newStream(p.out[1])
	if withStdin {
		running.stdin = os.NewFile(uintptr(p.stdin), "stdin")
	}
	if len(request.StdinB64) > 0 {
		running.feed(request.StdinB64)
	}
	return running, nil
}

// feed writes inline input; what fits into the pipe needs no goroutine.
func (x *execution) feed(input []byte) {
	x.stdinTaken = true
	if len(input) <= inlinePipeBytes {
		x.stdin.Write(input)
		x.closeStdin()
		return
	}
	go func() {
		x.stdin.Write(input)
		x.closeStdin()
	}()
}

func (l *launcher) start(request *execRequest, actor *user, p *pipes) (pid, pidfd int, err error) {
	path, given := request.Env["PATH"]
	if !given {
		path = defaultPath
	}
	environment := make([]string, 0, len(request.Env))
	for name, value := range request.Env {
		environment = append(environment, name+"="+value)
	}
	system := &syscall.SysProcAttr{Setpgid: !p.session, Setsid: p.session, Setctty: p.tty, PidFD: &pidfd}
	if actor != nil {
		system.Credential = &syscall.Credential{Uid: actor.uid, Gid: actor.gid, Groups: actor.groups}
	}
	attributes := &syscall.ProcAttr{
		Dir: request.Cwd, Env: environment, Sys: system,
		Files: []uintptr{uintptr(p.child[0]), uintptr(p.child[1]), uintptr(p.child[2])},
	}
	if request.Cwd == "/" {
		attributes.Dir = "" // where the agent is
	}
	program := request.Argv[0]
	if request.program != "" {
		program = request.program
	}
	if strings.IndexByte(program, '/') >= 0 {
		pid, err = l.fork(program, request.Argv, attributes)
		return pid, pidfd, explain(program, request.Cwd, actor, err)
	}
	err = syscall.ENOENT
	for _, folder := range strings.Split(path, ":") {
		if folder == "" {
			folder = "."
		}
		candidate := folder + "/" + program
		if folder[0] != '/' {
			candidate = request.Cwd + "/" + candidate
		}
		var stat syscall.Stat_t
		if syscall.Stat(candidate, &stat) != nil || stat.Mode&syscall.S_IFMT != syscall.S_IFREG {
			continue
		}
		if stat.Mode&0o111 == 0 {
			err = syscall.EACCES
			continue
		}
		if pid, err = l.fork(candidate, request.Argv, attributes); err != syscall.EACCES {
			break
		}
	}
	return pid, pidfd, explain(program, request.Cwd, actor, err)
}

// fork retries for startDeadline while the VM is out of processes or memory.
func (l *launcher) fork(program string, argv []string, attributes *syscall.ProcAttr) (pid int, err error) {
	var deadline time.Time
	for pause := 20 * time.Millisecond; ; pause *= 2 {
		pid, err = l.forkOnce(program, argv, attributes)
		if err != syscall.EAGAIN && err != syscall.ENOMEM {
			return pid, err
		}
		now := time.Now()
		if deadline.IsZero() {
			deadline = now.Add(startDeadline)
		}
		if now.Add(pause).After(deadline) {
			return 0, overloaded("the VM cannot start another process: %v", err)
		}
		time.Sleep(pause)
	}
}

func (l *launcher) forkOnce(program string, argv []string, attributes *syscall.ProcAttr) (pid int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.oomScore != nil {
		// A child inherits the score at fork, and the agent's own would protect it from the OOM killer.
		l.oomScore.WriteAt([]byte("0"), 0)
		defer l.oomScore.WriteAt([]byte(l.ownScore), 0)
	}
	if l.groups != nil {
		attributes.Sys.UseCgroupFD, attributes.Sys.CgroupFD = true, l.groups.choose()
	}
	pid, _, err = syscall.StartProcess(program, argv, attributes)
	if err == nil || l.groups == nil || (err != syscall.ENODEV && err != syscall.EBUSY && err != syscall.EOPNOTSUPP) {
		return pid, err
	}
	log.Printf("command cgroup unusable, running commands without limits: %v", err)
	l.groups, attributes.Sys.UseCgroupFD = nil, false
	pid, _, err = syscall.StartProcess(program, argv, attributes)
	return pid, err
}

// startFailure is a program that could not be executed, with the exit code that a shell gives for it.
type startFailure struct {
	exitCode int
	message  string
}

func (f *startFailure) Error() string { return f.message }

const (
	exitNotExecutable = 126
	exitNotFound      = 127
)

// explain tells a missing working directory, which is an error of the request, from a program that cannot be
// executed: fork reports one number for both.
func explain(program, cwd string, actor *user, err error) error {
	if err == nil {
		return nil
	}
	var number syscall.Errno
	if !errors.As(err, &number) {
		return err
	}
	if folder := actor.canEnter(cwd); folder != nil {
		return pathFailure(cwd, folder)
	}
	failure := &startFailure{exitNotExecutable, "stead: " + printable(program) + ": " + number.Error()}
	switch number {
	case syscall.ENOENT, syscall.ENOTDIR, syscall.ELOOP, syscall.ENAMETOOLONG:
		failure.exitCode = exitNotFound
	}
	if number == syscall.ENOENT && strings.IndexByte(program, '/') < 0 {
		failure.message = "stead: " + printable(program) + ": command not found"
	}
	return failure
}
