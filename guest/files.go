package main

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// files are the calls on the machine's file system.
type files struct {
	accounts *accounts
}

// fileCall is one request on files, run with the rights of its user.
type fileCall struct {
	w     http.ResponseWriter
	r     *http.Request
	query url.Values
	user  *user
}

// answer makes a handler: the operation runs as the request's user, and either answers itself or fails.
func (f *files) answer(operation func(*fileCall) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		query, err := url.ParseQuery(r.URL.RawQuery)
		if err != nil {
			err = invalid("query is not percent-encoded: %v", err)
		}
		var actor *user
		if err == nil {
			actor, err = f.accounts.find(r.Header.Get("X-Stead-User"))
		}
		if err == nil {
			call := &fileCall{w, r, query, actor}
			err = actor.do(func() error { return operation(call) })
		}
		if err != nil {
			drain(r.Body)
			writeError(w, err)
		}
	}
}

func (c *fileCall) done() error {
	writeJSON(c.w, http.StatusOK, struct{}{})
	return nil
}

func (c *fileCall) path(name string) (string, error) {
	path := c.query.Get(name)
	if path == "" || path[0] != '/' || strings.IndexByte(path, 0) >= 0 {
		return "", invalid("%s must be an absolute path", name)
	}
	if trimmed := strings.TrimRight(path, "/"); trimmed != "" {
		return trimmed, nil
	}
	return "/", nil
}

func (c *fileCall) flag(name string, standard bool) (bool, error) {
	switch c.query.Get(name) {
	case "":
		return standard, nil
	case "1", "true":
		return true, nil
	case "0", "false":
		return false, nil
	}
	return false, invalid("%s must be 0 or 1", name)
}

// mode is -1 when the request has none.
func (c *fileCall) mode() (int, error) {
	text := c.query.Get("mode")
	if text == "" {
		return -1, nil
	}
	mode, err := strconv.ParseUint(text, 8, 32)
	if err != nil || mode > 0o7777 {
		return 0, invalid("mode must be octal, at most 7777")
	}
	return int(mode), nil
}

type fileStat struct {
	Name   []byte `json:"name_b64"`
	Type   string `json:"type"`
	Size   int64  `json:"size"`
	Mode   string `json:"mode"`
	UID    uint32 `json:"uid"`
	GID    uint32 `json:"gid"`
	User   string `json:"user"`
	Group  string `json:"group"`
	Mtime  int64  `json:"mtime_ns"`
	Target string `json:"target_b64,omitempty"`
}

func typeName(mode uint32) string {
	switch mode & syscall.S_IFMT {
	case syscall.S_IFREG:
		return "file"
	case syscall.S_IFDIR:
		return "directory"
	case syscall.S_IFLNK:
		return "symlink"
	case syscall.S_IFIFO:
		return "fifo"
	case syscall.S_IFSOCK:
		return "socket"
	}
	return "device"
}

func describe(path, name string, stat *syscall.Stat_t, names func(uid, gid uint32) (string, string)) fileStat {
	described := fileStat{
		Name: []byte(name), Type: typeName(stat.Mode), Size: stat.Size, Mode: fmt.Sprintf("%04o", stat.Mode&0o7777),
		UID: stat.Uid, GID: stat.Gid, Mtime: stat.Mtim.Nano(),
	}
	described.User, described.Group = names(stat.Uid, stat.Gid)
	if described.Type == "symlink" {
		if target, err := os.Readlink(path); err == nil {
			described.Target = base64.StdEncoding.EncodeToString([]byte(target))
		}
	}
	return described
}

func (f *files) stat(c *fileCall) error {
	path, err := c.path("path")
	if err != nil {
		return err
	}
	follow, err := c.flag("follow", true)
	if err != nil {
		return err
	}
	var stat syscall.Stat_t
	if follow {
		err = syscall.Stat(path, &stat)
	} else {
		err = syscall.Lstat(path, &stat)
	}
	if err != nil {
		return pathFailure(path, err)
	}
	writeJSON(c.w, http.StatusOK, describe(path, filepath.Base(path), &stat, f.accounts.names()))
	return nil
}

func (f *files) list(c *fileCall) error {
	path, err := c.path("path")
	if err != nil {
		return err
	}
	folder, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return pathFailure(path, err)
	}
	entries, err := folder.Readdirnames(-1)
	folder.Close()
	if err != nil {
		return pathFailure(path, err)
	}
	slices.Sort(entries)
	names := f.accounts.names()
	var answer bytes.Buffer
	answer.WriteString(`{"entries":[`)
	written := false
	for _, name := range entries {
		child := path + "/" + name
		var stat syscall.Stat_t
		if err := syscall.Lstat(child, &stat); err == syscall.ENOENT {
			continue // removed meanwhile
		} else if err != nil {
			return pathFailure(child, err)
		}
		encoded, err := json.Marshal(describe(child, name, &stat, names))
		if err != nil {
			return err
		}
		if written {
			answer.WriteByte(',')
		}
		written = true
		answer.Write(encoded)
	}
	answer.WriteString("]}")
	c.w.Header().Set("Content-Type", "application/json")
	c.w.Header().Set("Content-Length", strconv.Itoa(answer.Len()))
	c.w.Write(answer.Bytes())
	return nil
}

func (f *files) makeDirectory(c *fileCall) error {
	path, err := c.path("path")
	if err != nil {
		return err
	}
	parents, err := c.flag("parents", false)
	if err != nil {
		return err
	}
	mode, err := c.mode()
	if err != nil {
		return err
	}
	if parents {
		if err := makeParents(path); err != nil {
			return err
		}
	}
	err = syscall.Mkdir(path, 0o755)
	if err == syscall.EEXIST && parents {
		var stat syscall.Stat_t
		if syscall.Stat(path, &stat) == nil && stat.Mode&syscall.S_IFMT == syscall.S_IFDIR {
			return c.done()
		}
	}
	// The process's umask would take bits away, so the mode is set apart.
	if err == nil && mode >= 0 {
		err = syscall.Chmod(path, uint32(mode))
	}
	if err != nil {
		return pathFailure(path, err)
	}
	return c.done()
}

// makeParents makes the folders above a path, owned by the calling user.
func makeParents(path string) error {
	parent := path[:strings.LastIndexByte(path, '/')]
	if parent == "" {
		return nil
	}
	var stat syscall.Stat_t
	if syscall.Stat(parent, &stat) == nil {
		if stat.Mode&syscall.S_IFMT != syscall.S_IFDIR {
			return pathFailure(parent, syscall.ENOTDIR)
		}
		return nil
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return pathFailure(parent, err)
	}
	return nil
}

func (f *files) remove(c *fileCall) error {
	path, err := c.path("path")
	if err != nil {
		return err
	}
	recursive, err := c.flag("recursive", false)
	if err != nil {
		return err
	}
	if base := filepath.Base(path); base == "/" || base == "." || base == ".." {
		return invalid("%s cannot be removed", printable(path))
	}
	var stat syscall.Stat_t
	if err := syscall.Lstat(path, &stat); err != nil {
		return pathFailure(path, err)
	}
	switch {
	case stat.Mode&syscall.S_IFMT != syscall.S_IFDIR:
		err = syscall.Unlink(path)
	case recursive:
		err = os.RemoveAll(path)
	default:
		err = syscall.Rmdir(path)
	}
	if err != nil {
		return pathFailure(path, err)
	}
	return c.done()
}
