package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// watcher collects what is told of one folder; the rest of the file system is everybody's.
type watcher struct {
	*testing.T
	folder string
	lines  *bufio.Scanner
	end    func()
}

func (h *harness) watch(user, folder string) *watcher {
	h.Helper()
	response := h.request("GET", "/v1/watch", user, nil)
	if response.StatusCode != http.StatusOK {
		h.Fatalf("watch: %d", response.StatusCode)
	}
	return &watcher{h.T, folder, bufio.NewScanner(response.Body), func() { response.Body.Close() }}
}

// until returns what was told, as "event name", up to the first line that is the last one awaited.
func (w *watcher) until(last string) []string {
	w.Helper()
	var told []string
	timer := time.AfterFunc(5*time.Second, w.end)
	defer timer.Stop()
	for w.lines.Scan() {
		var line struct {
			Event string `json:"event"`
			Path  []byte `json:"path_b64"`
		}
		must(w.T, json.Unmarshal(w.lines.Bytes(), &line))
		name, below := strings.CutPrefix(string(line.Path), w.folder+"/")
		if line.Event != "overflow" && !below {
			continue
		}
		told = append(told, line.Event+" "+name)
		if told[len(told)-1] == last {
			return told
		}
	}
	w.Fatalf("%q was not told, only %q", last, told)
	return nil
}

func touch(t *testing.T, path string) {
	t.Helper()
	must(t, os.WriteFile(path, nil, 0o644))
}

func TestWatchTellsEveryKindOfChange(t *testing.T) {
	h := start(t)
	folder := h.folder()
	w := h.watch("", folder)
	must(t, os.MkdirAll(folder+"/a/b", 0o755))
	touch(t, folder+"/a/b/new\n\xff")
	got := w.until("create a/b/new\n\xff")
	if !slices.Equal(got, []string{"create a", "create a/b", "create a/b/new\n\xff"}) {
		t.Errorf("%q", got)
	}
	must(t, os.WriteFile(folder+"/a/b/new\n\xff", []byte("content"), 0o644))
	w.until("change a/b/new\n\xff")
	must(t, os.Chmod(folder+"/a/b", 0o700))
	w.until("change a/b")
	must(t, os.Rename(folder+"/a/b/new\n\xff", folder+"/a/moved"))
	got = w.until("moved_to a/moved")
	if !slices.Equal(got, []string{"moved_from a/b/new\n\xff", "moved_to a/moved"}) {
		t.Errorf("%q", got)
	}
	must(t, os.Rename(folder+"/a", folder+"/c"))
	w.until("moved_to c")
	touch(t, folder+"/c/b/deep")
	w.until("create c/b/deep")
	must(t, os.Remove(folder+"/c/moved"))
	w.until("delete c/moved")
}

func TestWatchTellsWhatWasInADeletedTree(t *testing.T) {
	h := start(t)
	folder := h.folder()
	must(t, os.MkdirAll(folder+"/a/b/c", 0o755))
	touch(t, folder+"/a/b/c/file")
	w := h.watch("", folder)
	must(t, os.RemoveAll(folder+"/a"))
	got := w.until("delete a")
	if !slices.Equal(got, []string{"delete a/b/c/file", "delete a/b/c", "delete a/b", "delete a"}) {
		t.Errorf("%q", got)
	}
	// Made and removed between two looks, which the kernel may tell in one.
	must(t, os.MkdirAll(folder+"/a/b", 0o755))
	touch(t, folder+"/a/b/file")
	must(t, os.RemoveAll(folder+"/a"))
	touch(t, folder+"/end")
	got = w.until("create end")
	for _, wanted := range []string{"delete a", "delete a/b", "delete a/b/file"} {
		if !slices.Contains(got, wanted) {
			t.Errorf("no %q in %q", wanted, got)
		}
	}
	if slices.Index(got, "delete a") < slices.Index(got, "create a") {
		t.Errorf("%q", got)
	}
}

func TestWatchEndsWithWhatIsThere(t *testing.T) {
	h := start(t)
	folder := h.folder()
	w := h.watch("", folder)
	for range 100 {
		touch(t, folder+"/again")
		must(t, os.Remove(folder+"/again"))
	}
	touch(t, folder+"/first")
	got := w.until("create first")
	again := slices.DeleteFunc(got, func(line string) bool { return !strings.HasSuffix(line, " again") })
	// Equal changes of one burst are one line; how many bursts there are depends on the load of the machine.
	if len(again) > 100 || again[len(again)-1] != "delete again" {
		t.Errorf("%q", again)
	}
	for range 100 {
		touch(t, folder+"/again")
		must(t, os.Remove(folder+"/again"))
	}
	touch(t, folder+"/again")
	touch(t, folder+"/second")
	got = w.until("create second")
	again = slices.DeleteFunc(got, func(line string) bool { return !strings.HasSuffix(line, " again") })
	if again[len(again)-1] != "create again" {
		t.Errorf("%q", again)
	}
}

func TestWatchCoalescesABurst(t *testing.T) {
	h := start(t)
	folder := h.folder()
	touch(t, folder+"/log")
	w := h.watch("", folder)
	file, err := os.OpenFile(folder+"/log", os.O_WRONLY, 0)
	must(t, err)
	defer file.Close()
	began := time.Now()
	for range 2000 {
		file.Write([]byte("line\n"))
	}
	most := int(time.Since(began)/burst) + 5
	touch(t, folder+"/end")
	if got := w.until("create end"); len(got) > most {
		t.Errorf("%d lines, not at most %d", len(got), most)
	}
	// What is written to a file that has no name any more is no change of any file.
	must(t, os.Remove(folder+"/log"))
	w.until("delete log")
	file.Write([]byte("line\n"))
	touch(t, folder+"/end2")
	if got := w.until("create end2"); slices.Contains(got, "change log") {
		t.Errorf("%q", got)
	}
}

func TestWatchOfAUserTellsOnlyWhatItMayList(t *testing.T) {
	h := start(t)
	folder := h.folder()
	for name, mode := range map[string]os.FileMode{"open": 0o755, "closed": 0o700, "listed": 0o744, "entered": 0o711} {
		must(t, os.Mkdir(folder+"/"+name, mode))
		must(t, os.Mkdir(folder+"/"+name+"/inner", 0o755))
	}
	must(t, os.Mkdir(folder+"/team", 0o750))
	must(t, os.Chown(folder+"/team", 0, aliceGroup))
	w := h.watch("alice", folder)
	for _, name := range []string{"closed", "listed", "entered", "closed/inner", "listed/inner", "entered/inner", "open", "open/inner", "team"} {
		touch(t, folder+"/"+name+"/file")
	}
	got := w.until("create team/file")
	wanted := []string{"create entered/inner/file", "create open/file", "create open/inner/file", "create team/file"}
	if !slices.Equal(got, wanted) {
		t.Errorf("%q", got)
	}
	// The permissions of a folder that is gone are no longer known.
	must(t, os.RemoveAll(folder+"/closed"))
	if got := w.until("delete closed"); len(got) != 1 {
		t.Errorf("%q", got)
	}
	h.refused("user_not_found", "GET", "/v1/watch", "mallory", nil)
}

func TestWatchDoesNotTellOfTheAgentsOwnFiles(t *testing.T) {
	h := start(t)
	folder := h.folder()
	untold = append(untold, folder+"/own")
	defer func() { untold = untold[:len(untold)-1] }()
	must(t, os.MkdirAll(folder+"/own/deep", 0o755))
	must(t, os.MkdirAll(folder+"/owner", 0o755))
	w := h.watch("", folder)
	touch(t, folder+"/own/deep/file")
	touch(t, folder+"/own/file")
	touch(t, folder+"/owner/file")
	h.call("PUT", at("file", "path", folder+"/written"), "", strings.NewReader("content"))
	got := w.until("moved_to written")
	if !slices.Equal(got, []string{"create owner/file", "moved_to written"}) {
		t.Errorf("%q", got)
	}
}

func TestWatchersDoNotDisturbEachOther(t *testing.T) {
	h := start(t)
	folder := h.folder()
	first, second := h.watch("", folder), h.watch("alice", folder)
	touch(t, folder+"/one")
	first.until("create one")
	second.until("create one")
	first.end()
	within(t, time.Second, "one watch is left", func() bool { return h.watching() == 1 })
	touch(t, folder+"/two")
	second.until("create two")
	// The machine became another one: no client can be listening any more.
	h.request("POST", "/v1/identity", "", strings.NewReader("{}"))
	for second.lines.Scan() {
	}
	within(t, time.Second, "no watch is left", func() bool { return h.watching() == 0 })
}

func (h *harness) watching() int {
	h.agent.watches.mu.Lock()
	defer h.agent.watches.mu.Unlock()
	return len(h.agent.watches.current)
}

func TestWatchLeavesNothingOpen(t *testing.T) {
	h := start(t)
	folder := h.folder()
	count := func() (descriptors int) {
		links, _ := filepath.Glob("/proc/self/fd/*")
		for _, link := range links {
			if target, _ := os.Readlink(link); strings.Contains(target, "fanotify") || strings.HasPrefix(target, h.agent.watches.root) {
				descriptors++
			}
		}
		return descriptors
	}
	for i := range 10 {
		w := h.watch("alice", folder)
		touch(t, fmt.Sprintf("%s/%d", folder, i))
		w.until(fmt.Sprintf("create %d", i))
		w.end()
	}
	within(t, time.Second, "all are closed", func() bool { return count() == 0 })
}

func TestWatchOfASlowReaderSaysThatItLostChanges(t *testing.T) {
	h := start(t)
	folder := h.folder()
	w := h.watch("", folder)
	name := folder + "/" + strings.Repeat("x", 200)
	for i := range 36000 {
		fd, err := syscall.Open(fmt.Sprintf("%s%d", name, i), syscall.O_CREAT|syscall.O_EXCL, 0o644)
		must(t, err)
		syscall.Close(fd)
	}
	got := w.until("overflow ")
	t.Logf("%d lines before the loss", len(got))
	touch(t, folder+"/end")
	w.until("create end")
}
