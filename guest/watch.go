package main

import (
	"context"
	"encoding/base64"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// Changes that come this close together are told together, each once.
	burst      = 10 * time.Millisecond
	burstLimit = 4096
)

// untold are folders of the machine's own doings; below them nothing is anybody's work.
var untold = []string{"/var/lib/stead", "/var/log/journal"}

// watches are the callers who are told what changes. With none of them nothing runs.
type watches struct {
	accounts *accounts
	root     string // a folder of the file system that is watched

	mu      sync.Mutex
	current map[*watch]struct{}
}

func newWatches(accounts *accounts, root string) *watches {
	return &watches{accounts: accounts, root: root, current: map[*watch]struct{}{}}
}

func (s *watches) handleWatch(w http.ResponseWriter, r *http.Request) {
	actor, err := s.accounts.find(r.Header.Get("X-Stead-User"))
	var watching *watch
	if err == nil {
		watching, err = s.open(actor)
	}
	if err != nil {
		writeError(w, err)
		return
	}
	defer s.close(watching)
	defer context.AfterFunc(r.Context(), watching.notices.end)()
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.WriteHeader(http.StatusOK)
	out := http.NewResponseController(w)
	if out.Flush() != nil {
		return
	}
	// A caller who does not read holds this goroutine in a write, and the kernel's queue fills up.
	for {
		lines, err := watching.next()
		if err != nil {
			return
		}
		if _, err := w.Write(lines); err != nil || out.Flush() != nil {
			return
		}
	}
}

func (s *watches) open(actor *user) (*watch, error) {
	eyes, err := actor.openEyes()
	if err != nil {
		return nil, err
	}
	source, err := openNotices(s.root)
	if err != nil {
		eyes.close()
		return nil, err
	}
	watching := &watch{notices: source, eyes: eyes}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.current[watching] = struct{}{}
	return watching, nil
}

func (s *watches) close(watching *watch) {
	s.mu.Lock()
	delete(s.current, watching)
	s.mu.Unlock()
	watching.notices.close()
	watching.eyes.close()
}

// endAll is for a machine that was woken or forked: its watchers' connections are dead, which only a write would show.
func (s *watches) endAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for watching := range s.current {
		watching.notices.end()
	}
}

// watch turns the kernel's notices into lines for one caller.
type watch struct {
	notices *notices
	eyes    *eyes
	held    []notice
	lines   []byte

	// Found out for one burst, because all of it may be different for the next.
	paths map[string]string
	seen  map[string]bool
	// gone are the folders that were deleted, by handle. Their notices outlast them, sometimes until after
	// that of the deletion, for the kernel adds a deletion to the notice of a creation that it still has.
	gone map[string]notice
}

// next blocks until something has changed that the caller may see.
func (w *watch) next() ([]byte, error) {
	w.lines = w.lines[:0]
	for len(w.lines) == 0 {
		changes, err := w.notices.wait(w.held)
		if err != nil {
			return nil, err
		}
		time.Sleep(burst)
		changes, drained, err := w.notices.more(changes, burstLimit)
		if err != nil {
			return nil, err
		}
		w.tell(changes, drained)
	}
	return w.lines, nil
}

func (w *watch) tell(changes []notice, drained bool) {
	w.paths, w.seen = map[string]string{}, map[string]bool{}
	if w.gone == nil {
		w.gone = map[string]notice{}
	}
	type key struct {
		mask         uint64
		folder, name string
	}
	last := make(map[key]int, len(changes))
	for i, change := range changes {
		last[key{change.mask, change.folder, change.name}] = i
		if change.mask&unix.FAN_DELETE != 0 && change.mask&unix.FAN_ONDIR != 0 && change.target != "" {
			w.gone[change.target] = change
		}
	}
	var held []notice
	for i, change := range changes {
		// Of equal ones the last is told, so that the end of a story is its end.
		if last[key{change.mask, change.folder, change.name}] != i {
			continue
		}
		if change.mask&unix.FAN_Q_OVERFLOW != 0 {
			w.line("overflow", "")
			continue
		}
		if folder, found := w.path(change.folder); found {
			w.place(&change, folder)
		} else if !change.held || !drained {
			// The folder was deleted, and the notice of that, which says where it was, is still to come.
			change.held = true
			held = append(held, change)
		}
	}
	if len(held) > burstLimit/2 {
		w.line("overflow", "")
		held = nil
	}
	w.held = held
	if drained || len(w.gone) > burstLimit {
		w.gone = nil
	}
}

// path finds where a folder is, or was when it was deleted.
func (w *watch) path(handle string) (string, bool) {
	path, known := w.paths[handle]
	if !known {
		var found bool
		if path, found = w.notices.path(handle); !found {
			path = ""
			if end, deleted := w.gone[handle]; deleted {
				if parent, found := w.path(end.folder); found {
					path = join(parent, end.name)
				}
			}
		}
		w.paths[handle] = path
	}
	return path, path != ""
}

func join(folder, name string) string {
	if name == "." {
		return folder
	}
	return strings.TrimSuffix(folder, "/") + "/" + name
}

// place tells of a change in a folder, unless it is none of the caller's business.
func (w *watch) place(change *notice, folder string) {
	if strings.HasPrefix(change.name, ".stead-") {
		return // the agent's own, on its way to another name
	}
	for _, own := range untold {
		if rest, below := strings.CutPrefix(folder, own); below && (rest == "" || rest[0] == '/') {
			return
		}
	}
	visible, known := w.seen[folder]
	if !known {
		visible = w.eyes.see(folder)
		w.seen[folder] = visible
	}
	if !visible {
		return
	}
	path := join(folder, change.name)
	const came, went = unix.FAN_CREATE | unix.FAN_MOVED_TO, unix.FAN_DELETE | unix.FAN_MOVED_FROM
	var stat syscall.Stat_t
	exists := true
	if change.mask&came == 0 || change.mask&went != 0 {
		exists = syscall.Lstat(path, &stat) == nil
	}
	// One notice may stand for several changes, in no order: what was last shows in what is there.
	if exists {
		w.went(change.mask, path)
	}
	if change.mask&unix.FAN_CREATE != 0 {
		w.line("create", path)
	}
	if change.mask&unix.FAN_MOVED_TO != 0 {
		w.line("moved_to", path)
	}
	// A file may be written after it was deleted, by programs that have it open. Such a change has no path.
	if change.mask&(unix.FAN_MODIFY|unix.FAN_ATTRIB) != 0 && exists {
		w.line("change", path)
	}
	if !exists {
		w.went(change.mask, path)
	}
}

func (w *watch) went(mask uint64, path string) {
	if mask&unix.FAN_MOVED_FROM != 0 {
		w.line("moved_from", path)
	}
	if mask&unix.FAN_DELETE != 0 {
		w.line("delete", path)
	}
}

func (w *watch) line(event, path string) {
	w.lines = append(w.lines, `{"event":"`...)
	w.lines = append(w.lines, event...)
	if path != "" {
		w.lines = append(w.lines, `","path_b64":"`...)
		w.lines = base64.StdEncoding.AppendEncode(w.lines, []byte(path))
	}
	w.lines = append(w.lines, "\"}\n"...)
}

// eyes say which folders a user may list, by their paths; nil sees everything.
type eyes struct {
	asked    chan string
	answered chan bool
}

// openEyes has a thread that acts as the user until the eyes are closed.
func (u *user) openEyes() (*eyes, error) {
	if u == nil {
		return nil, nil
	}
	e := &eyes{make(chan string), make(chan bool)}
	ready := make(chan error, 2)
	go func() {
		ready <- u.do(func() error {
			ready <- nil
			for folder := range e.asked {
				e.answered <- mayList(folder)
			}
			return nil
		})
	}()
	return e, <-ready
}

func (e *eyes) see(folder string) bool {
	if e == nil {
		return true
	}
	e.asked <- folder
	return <-e.answered
}

func (e *eyes) close() {
	if e != nil {
		close(e.asked)
	}
}

// mayList asks for the rights of this thread, where access(2) would ask for those of the process.
func mayList(folder string) bool {
	return unix.Faccessat2(unix.AT_FDCWD, folder, unix.R_OK|unix.X_OK, unix.AT_EACCESS) == nil
}
