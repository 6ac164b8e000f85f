package main

import (
	"bytes"
	"log"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const oomKept = 64

type oomEvent struct {
	AtMs    int64  `json:"at_ms"`
	PID     int    `json:"pid"`
	Process string `json:"process"`
	RSSKiB  int64  `json:"rss_kib"`
	Scope   string `json:"scope"`
	Message string `json:"message"`

	seen time.Time
	// owner is the command whose process was killed: its pid, ownerNone, or ownerUnknown when the process
	// was gone before it could be looked at.
	owner int
}

const (
	ownerNone    = -1
	ownerUnknown = 0
)

// oomLog follows the kernel's log for kills by the OOM killer.
type oomLog struct {
	running func(pid int) bool

	reading sync.Mutex
	kmsg    syscall.RawConn // nil when there is no log to follow
	record  []byte

	mu      sync.Mutex
	events  []*oomEvent
	changed chan struct{}
}

func newOOMLog(running func(pid int) bool) *oomLog {
	return &oomLog{running: running, changed: make(chan struct{})}
}

func (l *oomLog) follow() {
	fd, err := syscall.Open("/dev/kmsg", syscall.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		log.Printf("OOM kills are not reported: /dev/kmsg: %v", err)
		return
	}
	syscall.Seek(fd, 0, 2)
	conn, err := os.NewFile(uintptr(fd), "/dev/kmsg").SyscallConn()
	if err != nil {
		log.Printf("OOM kills are not reported: /dev/kmsg: %v", err)
		return
	}
	l.reading.Lock()
	l.kmsg, l.record = conn, make([]byte, 8192)
	l.reading.Unlock()
	err = conn.Read(func(fd uintptr) bool {
		l.drain(fd)
		return false // wait for more
	})
	log.Printf("OOM kills are no longer reported: %v", err)
}

// catchUp reads what the kernel has logged until now: a kill is logged before its process can be waited for,
// but the one who follows the log may not have come round to it.
func (l *oomLog) catchUp() {
	l.reading.Lock()
	conn := l.kmsg
	l.reading.Unlock()
	if conn != nil {
		conn.Control(l.drain)
	}
}

func (l *oomLog) drain(fd uintptr) {
	l.reading.Lock()
	defer l.reading.Unlock()
	for {
		n, err := syscall.Read(int(fd), l.record)
		switch err {
		case nil:
			if event := parseOOM(l.record[:n]); event != nil {
				event.owner = l.ownerOf(event.PID)
				l.add(event)
			}
		case syscall.EINTR, syscall.EPIPE, syscall.EINVAL:
			// Records were overwritten before we read them, or one was too long.
		default:
			return
		}
	}
}

func (l *oomLog) add(event *oomEvent) {
	event.seen = time.Now()
	event.AtMs = event.seen.UnixMilli()
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.events) == oomKept {
		l.events = append(l.events[:0], l.events[1:]...)
	}
	l.events = append(l.events, event)
	close(l.changed)
	l.changed = make(chan struct{})
}

// find gives the kill that hit a command since it started. A kill whose owner is unknown, because its process
// was waited for before it could be looked at, is taken only by a suspect.
func (l *oomLog) find(pid int, since time.Time, suspect bool, wait time.Duration) *oomEvent {
	var deadline <-chan time.Time
	for {
		l.mu.Lock()
		changed := l.changed
		for i := len(l.events) - 1; i >= 0; i-- {
			event := l.events[i]
			if event.seen.Before(since) {
				break
			}
			if event.PID == pid || event.owner == pid || (suspect && event.owner == ownerUnknown) {
				l.mu.Unlock()
				return event
			}
		}
		l.mu.Unlock()
		if wait == 0 {
			return nil
		}
		if deadline == nil {
			timer := time.NewTimer(wait)
			defer timer.Stop()
			deadline = timer.C
		}
		select {
		case <-changed:
		case <-deadline:
			wait = 0
		}
	}
}

func (l *oomLog) handleList(w http.ResponseWriter, _ *http.Request) {
	l.mu.Lock()
	events := append([]*oomEvent{}, l.events...)
	l.mu.Unlock()
	writeJSON(w, http.StatusOK, map[string]any{"events": events})
}

// ownerOf finds the command a dying process belongs to by its process group, else by its ancestors.
func (l *oomLog) ownerOf(pid int) int {
	if l.running(pid) {
		return pid
	}
	for depth := 0; pid > 1 && depth < 64; depth++ {
		stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		if err != nil {
			if depth == 0 {
				return ownerUnknown
			}
			return ownerNone
		}
		fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		if len(fields) < 3 {
			return ownerNone
		}
		parent, _ := strconv.Atoi(string(fields[1]))
		group, _ := strconv.Atoi(string(fields[2]))
		if l.running(group) {
			return group
		}
		pid = parent
	}
	return ownerNone
}

// parseOOM reads one record of /dev/kmsg: "priority,sequence,time,flags;text\n key=value...".
func parseOOM(record []byte) *oomEvent {
	prefix, text, found := strings.Cut(string(record), ";")
	if !found || !strings.Contains(text, "Killed process ") {
		return nil
	}
	// Programs may write to /dev/kmsg too, but only the kernel has facility 0.
	priority, _, _ := strings.Cut(prefix, ",")
	if number, err := strconv.Atoi(priority); err != nil || number > 7 {
		return nil
	}
	text, _, _ = strings.Cut(text, "\n")
	event := &oomEvent{Message: text}
	switch {
	case strings.HasPrefix(text, "Out of memory"):
		event.Scope = "machine"
	case strings.HasPrefix(text, "Memory cgroup out of memory"):
		event.Scope = "cgroup"
	default:
		return nil
	}
	_, text, _ = strings.Cut(text, ": Killed process ")
	pid, text, _ := strings.Cut(text, " (")
	// A process may have any name, brackets included.
	end := strings.LastIndex(text, ") total-vm:")
	var err error
	if event.PID, err = strconv.Atoi(pid); err != nil || end < 0 {
		return nil
	}
	event.Process = text[:end]
	for _, part := range strings.Split(text[end:], ", ") {
		if name, value, found := strings.Cut(part, ":"); found && strings.HasSuffix(name, "-rss") {
			value, _, _ = strings.Cut(value, "kB")
			kib, _ := strconv.ParseInt(value, 10, 64)
			event.RSSKiB += kib
		}
	}
	return event
}
