package main

import (
	"bytes"
	"errors"
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
		log.Printf("kills by the kernel's OOM killer will not be reported: /dev/kmsg: %v", err)
		return
	}
	syscall.Seek(fd, 0, 2)
	kmsg := os.NewFile(uintptr(fd), "/dev/kmsg")
	defer kmsg.Close()
	record := make([]byte, 8192)
	for {
		n, err := kmsg.Read(record)
		if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.EINVAL) {
			continue // records were overwritten before we read them, or one was too long
		}
		if err != nil {
			log.Printf("kills by the kernel's OOM killer are no longer reported: %v", err)
			return
		}
		if event := parseOOM(record[:n]); event != nil {
			event.owner = l.ownerOf(event.PID)
			l.add(event)
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

// find gives the kill that hit a command since it started. A kill whose owner is unknown is taken
// only by a command that itself looks killed.
func (l *oomLog) find(pid int, since time.Time, killed bool, wait time.Duration) *oomEvent {
	var deadline <-chan time.Time
	for {
		l.mu.Lock()
		changed := l.changed
		for i := len(l.events) - 1; i >= 0; i-- {
			event := l.events[i]
			if event.seen.Before(since) {
				break
			}
			if event.PID == pid || event.owner == pid || (killed && event.owner == ownerUnknown) {
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
