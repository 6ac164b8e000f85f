package main

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"
)

const (
	terminalsKept = 64
	// Two parts of this size are kept of what was printed: the newest and the one before it.
	terminalPart = 1 << 20
)

// terminals are named records of what commands printed. They are on disk, because they have to outlast the agent
// and there may be more of them than its memory holds.
type terminals struct {
	accounts *accounts
	folder   string

	mu     sync.Mutex
	active map[string]*terminal // those that something may still print to
}

// terminal is one record: a folder with what is known of it, and what was printed as lines of JSON.
type terminal struct {
	terminalInfo
	all   *terminals
	users int // guarded by all.mu

	mu     sync.Mutex
	output *os.File
	size   int64
	broken bool
}

type terminalInfo struct {
	Name      string `json:"name"`
	Owner     uint32 `json:"owner"`
	CreatedMs int64  `json:"created_ms"`
}

func newTerminals(accounts *accounts, root string) *terminals {
	return &terminals{accounts: accounts, folder: root + "/var/lib/stead/terminals", active: map[string]*terminal{}}
}

func checkTerminalName(name string) error {
	if !isID(name) || name[0] == '.' {
		return invalid("terminal name must be " + idRule + ", not starting with a dot")
	}
	return nil
}

func (i *terminalInfo) belongsTo(actor *user) bool {
	return actor == nil || actor.uid == i.Owner
}

// record opens a terminal for the two streams of a command; each is released when it ends.
func (t *terminals) record(name string, actor *user) (*terminal, error) {
	if err := checkTerminalName(name); err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	found := t.active[name]
	if found == nil {
		var err error
		if found, err = t.open(name, actor); err != nil {
			return nil, err
		}
	}
	if !found.belongsTo(actor) {
		return nil, fail("permission_denied", "terminal %s belongs to another user", name)
	}
	t.active[name] = found
	found.users += 2
	return found, nil
}

func (x *terminal) release() {
	x.all.mu.Lock()
	defer x.all.mu.Unlock()
	if x.users--; x.users > 0 {
		return
	}
	delete(x.all.active, x.Name)
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.output != nil {
		x.output.Close()
		x.output = nil
	}
}

func (t *terminals) open(name string, actor *user) (*terminal, error) {
	opened := &terminal{all: t}
	info, err := t.read(name)
	if err == nil {
		opened.terminalInfo = info
		return opened, nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	if err := t.makeRoom(); err != nil {
		return nil, err
	}
	opened.terminalInfo = terminalInfo{Name: name, CreatedMs: time.Now().UnixMilli()}
	if actor != nil {
		opened.Owner = actor.uid
	}
	if err := os.MkdirAll(t.path(name, ""), 0o700); err != nil {
		return nil, err
	}
	encoded, _ := json.Marshal(opened.terminalInfo)
	_, err = replaceFile(t.path(name, "terminal.json"), string(encoded), 0o600)
	return opened, err
}

func (t *terminals) path(name, file string) string {
	return filepath.Join(t.folder, name, file)
}

func (t *terminals) read(name string) (info terminalInfo, err error) {
	content, err := os.ReadFile(t.path(name, "terminal.json"))
	if err == nil {
		err = json.Unmarshal(content, &info)
	}
	return info, err
}

// makeRoom forgets the oldest terminal that nothing prints to, if there are as many as may be.
func (t *terminals) makeRoom() error {
	all := t.all()
	if len(all) < terminalsKept {
		return nil
	}
	for _, info := range all {
		if t.active[info.Name] == nil {
			return os.RemoveAll(t.path(info.Name, ""))
		}
	}
	return fail("busy", "too many terminals in use (%d, the maximum)", len(all))
}

// all lists the terminals, the oldest first.
func (t *terminals) all() []terminalInfo {
	folders, _ := os.ReadDir(t.folder)
	found := make([]terminalInfo, 0, len(folders))
	for _, folder := range folders {
		if info, err := t.read(folder.Name()); err == nil && info.Name == folder.Name() {
			found = append(found, info)
		}
	}
	slices.SortStableFunc(found, func(a, b terminalInfo) int { return int(a.CreatedMs - b.CreatedMs) })
	return found
}

func (t *terminals) handleList(w http.ResponseWriter, r *http.Request) {
	actor, err := t.accounts.find(r.Header.Get("X-Stead-User"))
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, struct {
		Terminals []terminalEntry `json:"terminals"`
	}{t.list(actor)})
}

type terminalEntry struct {
	Name      string `json:"name"`
	User      string `json:"user"`
	Running   bool   `json:"running"`
	CreatedMs int64  `json:"created_ms"`
}

func (t *terminals) list(actor *user) []terminalEntry {
	entries := []terminalEntry{}
	names := t.accounts.names()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, info := range t.all() {
		if info.belongsTo(actor) {
			owner, _ := names(info.Owner, 0)
			entries = append(entries, terminalEntry{info.Name, owner, t.active[info.Name] != nil, info.CreatedMs})
		}
	}
	return entries
}

func (t *terminals) handleOutput(w http.ResponseWriter, r *http.Request) {
	actor, err := t.accounts.find(r.Header.Get("X-Stead-User"))
	name := r.PathValue("name")
	if err == nil {
		err = checkTerminalName(name)
	}
	var parts []*io.SectionReader
	if err == nil {
		var closeAll func()
		parts, closeAll, err = t.parts(name, actor)
		defer closeAll()
	}
	if err != nil {
		writeError(w, err)
		return
	}
	length := int64(0)
	for _, part := range parts {
		length += part.Size()
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Content-Length", strconv.FormatInt(length, 10))
	for _, part := range parts {
		io.Copy(w, part)
	}
}

// parts opens what was printed to a terminal until now.
func (t *terminals) parts(name string, actor *user) (parts []*io.SectionReader, closeAll func(), err error) {
	var files []*os.File
	closeAll = func() {
		for _, file := range files {
			file.Close()
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	info, err := t.read(name)
	if errors.Is(err, os.ErrNotExist) || err == nil && !info.belongsTo(actor) {
		return nil, closeAll, fail("not_found", "terminal %s does not exist", name)
	}
	if err != nil {
		return nil, closeAll, err
	}
	if used := t.active[name]; used != nil {
		used.mu.Lock()
		defer used.mu.Unlock()
	}
	for _, part := range []string{"output.old", "output"} {
		file, err := os.Open(t.path(name, part))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, closeAll, err
		}
		files = append(files, file)
		stat, err := file.Stat()
		if err != nil {
			return nil, closeAll, err
		}
		parts = append(parts, io.NewSectionReader(file, 0, stat.Size()))
	}
	return parts, closeAll, nil
}

// write records a piece of output. A record that cannot be written is no reason for the command to fail.
func (x *terminal) write(kind byte, data []byte) {
	stream := "stdout"
	if kind == frameStderr {
		stream = "stderr"
	}
	line := make([]byte, 0, 80+base64.StdEncoding.EncodedLen(len(data)))
	line = append(line, `{"at_ms":`...)
	line = strconv.AppendInt(line, time.Now().UnixMilli(), 10)
	line = append(line, `,"stream":"`+stream+`","data_b64":"`...)
	line = base64.StdEncoding.AppendEncode(line, data)
	line = append(line, "\"}\n"...)
	x.mu.Lock()
	defer x.mu.Unlock()
	err := x.turn(int64(len(line)))
	if err == nil {
		var written int
		if written, err = x.output.Write(line); err != nil {
			// Half a line would make the next one unreadable.
			x.output.Truncate(x.size)
		} else {
			x.size += int64(written)
		}
	}
	if err != nil && !x.broken {
		log.Printf("terminal %s: %v", x.Name, err)
	}
	x.broken = err != nil
}

// turn makes sure that there is a file with room for that much more.
func (x *terminal) turn(more int64) (err error) {
	path := x.all.path(x.Name, "output")
	if x.output != nil && x.size+more > terminalPart {
		x.output.Close()
		x.output = nil
		if err := os.Rename(path, path+".old"); err != nil {
			return err
		}
	}
	if x.output != nil {
		return nil
	}
	if x.output, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600); err != nil {
		x.output = nil
		return err
	}
	x.size, err = x.output.Seek(0, io.SeekEnd)
	return err
}
