package main

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

const strangeName = "a b\nc\xff\xfe+%&\"é"

func ownerOf(t *testing.T, path string) (uint32, uint32, uint32) {
	t.Helper()
	var stat syscall.Stat_t
	must(t, syscall.Lstat(path, &stat))
	return stat.Uid, stat.Gid, stat.Mode & 0o7777
}

func onlyThere(t *testing.T, folder string, names ...string) {
	t.Helper()
	entries, err := os.ReadDir(folder)
	must(t, err)
	var found []string
	for _, entry := range entries {
		found = append(found, entry.Name())
	}
	if fmt.Sprint(found) != fmt.Sprint(names) {
		t.Errorf("%s has %q, not %q", folder, found, names)
	}
}

func TestFileIsWrittenAndRead(t *testing.T) {
	h := start(t)
	path := t.TempDir() + "/new/folders/" + strangeName
	content := make([]byte, 3<<20)
	rand.Read(content)
	if answer := h.call("PUT", at("file", "path", path), "", bytes.NewReader(content)); string(answer) != `{"size":3145728}` {
		t.Errorf("%s", answer)
	}
	if _, _, mode := ownerOf(t, path); mode != 0o644 {
		t.Errorf("mode %o", mode)
	}
	if read := h.call("GET", at("file", "path", path), "", nil); !bytes.Equal(read, content) {
		t.Errorf("%d bytes came back", len(read))
	}
	must(t, os.Chmod(path, 0o751))
	must(t, os.Chown(path, aliceUID, aliceGroup))
	h.call("PUT", at("file", "path", path), "", strings.NewReader("short"))
	if uid, gid, mode := ownerOf(t, path); uid != aliceUID || gid != aliceGroup || mode != 0o751 {
		t.Errorf("%d:%d %o", uid, gid, mode)
	}
	h.call("PUT", at("file", "path", path, "mode", "4755", "owner", "alice", "group", "team"), "", strings.NewReader("tiny"))
	if uid, gid, mode := ownerOf(t, path); uid != aliceUID || gid != aliceGroup || mode != 0o4755 {
		t.Errorf("%d:%d %o", uid, gid, mode)
	}
	long := filepath.Dir(path) + "/" + strings.Repeat("n", 255)
	h.call("PUT", at("file", "path", long), "", strings.NewReader("x"))
	onlyThere(t, filepath.Dir(path), strangeName, filepath.Base(long))
	if version := h.call("GET", at("file", "path", "/proc/version"), "", nil); !bytes.HasPrefix(version, []byte("Linux")) {
		t.Errorf("%q", version)
	}
}

func TestFileRanges(t *testing.T) {
	h := start(t)
	folder := t.TempDir()
	for _, size := range []int{10, 500_000} {
		path := fmt.Sprint(folder, "/", size)
		content := make([]byte, size)
		rand.Read(content)
		must(t, os.WriteFile(path, content, 0o644))
		for _, c := range []struct {
			asked    string
			status   int
			from, to int
		}{
			{"bytes=2-5", 206, 2, 6}, {"bytes=4-", 206, 4, size}, {"bytes=-3", 206, size - 3, size},
			{fmt.Sprintf("bytes=5-%d", size*9), 206, 5, size}, {fmt.Sprintf("bytes=%d-", size), 416, 0, 0}, {"bytes=x", 200, 0, size},
		} {
			request, _ := http.NewRequest("GET", h.url+at("file", "path", path), nil)
			request.Header.Set("Range", c.asked)
			response, err := http.DefaultClient.Do(request)
			must(t, err)
			body, _ := io.ReadAll(response.Body)
			response.Body.Close()
			if response.StatusCode != c.status || (c.status != 416 && !bytes.Equal(body, content[c.from:c.to])) {
				t.Errorf("%s of %d: %d with %d bytes", c.asked, size, response.StatusCode, len(body))
			}
		}
	}
}

func TestUploadThatFailsLeavesTheTargetAlone(t *testing.T) {
	h := start(t)
	folder := t.TempDir()
	must(t, os.WriteFile(folder+"/kept", []byte("old"), 0o644))
	for _, head := range []string{"Content-Length: 1000\r\n\r\nhalf", "Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(h.url, "http://"))
		must(t, err)
		fmt.Fprintf(conn, "PUT %s HTTP/1.1\r\nHost: x\r\n%s", at("file", "path", folder+"/kept"), head)
		within(t, 60*time.Second, "the temporary file appears", func() bool {
			entries, _ := os.ReadDir(folder)
			return len(entries) == 2
		})
		conn.Close()
		within(t, 60*time.Second, "the temporary file is removed", func() bool {
			entries, _ := os.ReadDir(folder)
			return len(entries) == 1
		})
	}
	if content, _ := os.ReadFile(folder + "/kept"); string(content) != "old" {
		t.Errorf("%q", content)
	}
	h.refused("is_directory", "PUT", at("file", "path", folder), "", bytes.NewReader(make([]byte, 4<<20)))
	h.refused("not_directory", "PUT", at("file", "path", folder+"/kept/below"), "", strings.NewReader("x"))
	h.refused("invalid_request", "PUT", at("file", "path", "/dev/null"), "", strings.NewReader("x"))
	h.refused("invalid_request", "PUT", at("file", "path", "relative"), "", strings.NewReader("x"))
	h.refused("invalid_request", "PUT", at("file", "path", folder+"/f", "mode", "9"), "", strings.NewReader("x"))
	h.refused("user_not_found", "PUT", at("file", "path", folder+"/f", "owner", "nobody-such"), "", strings.NewReader("x"))
	h.refused("invalid_request", "PUT", at("file", "path", folder+"/"+strings.Repeat("n", 256)), "", strings.NewReader("x"))
	onlyThere(t, folder, "kept")
}

func TestNoSpaceIsSaid(t *testing.T) {
	if !inNamespaces(t) {
		return
	}
	h := start(t)
	folder := t.TempDir()
	must(t, syscall.Mount("tmpfs", folder, "tmpfs", 0, "size=1m"))
	defer syscall.Unmount(folder, 0)
	h.refused("no_space", "PUT", at("file", "path", folder+"/big"), "", bytes.NewReader(make([]byte, 4<<20)))
	onlyThere(t, folder)
	// Another file system at hand: a move across copies, keeps everything and removes the source.
	source := t.TempDir() + "/tree"
	must(t, os.MkdirAll(source+"/sub", 0o750))
	must(t, os.WriteFile(source+"/sub/"+strangeName, []byte("x"), 0o640))
	must(t, os.Symlink("nowhere", source+"/link"))
	must(t, os.WriteFile(folder+"/taken", nil, 0o644))
	h.refused("exists", "POST", at("move", "from", source, "to", folder+"/taken"), "", nil)
	h.call("POST", at("move", "from", source, "to", folder+"/moved"), "", nil)
	onlyThere(t, folder, "moved", "taken")
	onlyThere(t, folder+"/moved", "link", "sub")
	onlyThere(t, filepath.Dir(source))
	if _, _, mode := ownerOf(t, folder+"/moved/sub/"+strangeName); mode != 0o640 {
		t.Errorf("%o", mode)
	}
}

func TestLinksAreFollowedOnWrite(t *testing.T) {
	h := start(t)
	folder := t.TempDir()
	must(t, os.Mkdir(folder+"/real", 0o755))
	must(t, os.Symlink("real/../real/file", folder+"/link"))
	must(t, os.Symlink(folder+"/link", folder+"/again"))
	must(t, os.Symlink("loop", folder+"/loop"))
	h.call("PUT", at("file", "path", folder+"/again"), "", strings.NewReader("through"))
	if content, _ := os.ReadFile(folder + "/real/file"); string(content) != "through" {
		t.Errorf("%q", content)
	}
	if target, _ := os.Readlink(folder + "/link"); target != "real/../real/file" {
		t.Errorf("the link became %q", target)
	}
	h.refused("invalid_request", "PUT", at("file", "path", folder+"/loop"), "", strings.NewReader("x"))
}

func TestFilesAsUser(t *testing.T) {
	h := start(t)
	own, private := h.folder(), t.TempDir()
	must(t, os.Chmod(private, 0o700))
	must(t, os.WriteFile(private+"/secret", []byte("s"), 0o644))
	must(t, os.WriteFile(own+"/of-root", []byte("s"), 0o644))
	must(t, os.WriteFile(own+"/of-team", []byte("team"), 0o640))
	must(t, os.Chown(own+"/of-team", 0, aliceGroup))
	h.call("PUT", at("file", "path", own+"/a/b", "owner", "root"), "alice", strings.NewReader("mine"))
	for _, path := range []string{own + "/a", own + "/a/b"} {
		if uid, gid, _ := ownerOf(t, path); uid != aliceUID || gid != aliceUID {
			t.Errorf("%s belongs to %d:%d", path, uid, gid)
		}
	}
	if content := h.call("GET", at("file", "path", own+"/of-team"), "alice", nil); string(content) != "team" {
		t.Errorf("%q", content)
	}
	for _, refused := range []struct{ method, call string }{
		{"GET", at("file", "path", private+"/secret")}, {"GET", at("stat", "path", private+"/secret")},
		{"GET", at("directory", "path", private)}, {"GET", at("archive", "path", private)},
		{"PUT", at("file", "path", private+"/new")}, {"PUT", at("file", "path", own+"/of-root")},
		{"POST", at("directory", "path", private+"/new")}, {"DELETE", at("path", "path", private+"/secret")},
		{"POST", at("move", "from", own+"/a", "to", private+"/a")}, {"PUT", at("archive", "path", private+"/x")},
	} {
		h.refused("permission_denied", refused.method, refused.call, "alice", strings.NewReader("x"))
	}
	h.refused("user_not_found", "GET", at("stat", "path", "/"), "bob", nil)
	// No thread of the agent keeps a user's rights.
	for range 50 {
		h.call("GET", at("file", "path", private+"/secret"), "", nil)
	}
	// The runtime ends a thread some time after its goroutine.
	within(t, 30*time.Second, "the end of the threads of alice", func() bool { return len(threadsOfAlice()) == 0 })
}

func threadsOfAlice() []string {
	found := []string{}
	tasks, _ := os.ReadDir("/proc/self/task")
	for _, task := range tasks {
		status, _ := os.ReadFile("/proc/self/task/" + task.Name() + "/status")
		if bytes.Contains(status, []byte("54321")) {
			found = append(found, task.Name())
		}
	}
	return found
}

func TestStatAndFolders(t *testing.T) {
	h := start(t)
	folder := t.TempDir()
	h.call("POST", at("directory", "path", folder+"/a/b", "parents", "1", "mode", "2775"), "", nil)
	h.call("POST", at("directory", "path", folder+"/a/b", "parents", "1"), "", nil)
	if _, _, mode := ownerOf(t, folder+"/a/b"); mode != 0o2775 {
		t.Errorf("%o", mode)
	}
	h.refused("exists", "POST", at("directory", "path", folder+"/a/b"), "", nil)
	h.refused("not_found", "POST", at("directory", "path", folder+"/x/y"), "", nil)
	must(t, os.WriteFile(folder+"/"+strangeName, []byte("12345"), 0o640))
	must(t, os.Symlink("\xffgone", folder+"/link"))
	must(t, syscall.Mkfifo(folder+"/fifo", 0o600))
	must(t, os.Chown(folder+"/fifo", 99999, aliceGroup))
	var listing struct {
		Entries []struct {
			fileStat
			Target []byte `json:"target_b64"`
		}
	}
	must(t, json.Unmarshal(h.call("GET", at("directory", "path", folder), "", nil), &listing))
	var seen []string
	for _, e := range listing.Entries {
		seen = append(seen, fmt.Sprintf("%s %s %s %s:%s %s", e.Name, e.Type, e.Mode, e.User, e.Group, e.Target))
	}
	want := []string{"a directory 0755 root:root ", strangeName + " file 0640 root:root ", "fifo fifo 0600 99999:team ", "link symlink 0777 root:root \xffgone"}
	if strings.Join(seen, "|") != strings.Join(want, "|") {
		t.Errorf("%q\n%q", seen, want)
	}
	var stat fileStat
	must(t, json.Unmarshal(h.call("GET", at("stat", "path", folder+"/"+strangeName), "", nil), &stat))
	if string(stat.Name) != strangeName || stat.Size != 5 || time.Since(time.Unix(0, stat.Mtime)) > time.Minute {
		t.Errorf("%+v", stat)
	}
	h.refused("not_found", "GET", at("stat", "path", folder+"/link"), "", nil)
	h.call("GET", at("stat", "path", folder+"/link", "follow", "0"), "", nil)
	h.refused("is_directory", "GET", at("file", "path", folder), "", nil)
	h.refused("not_directory", "GET", at("directory", "path", folder+"/"+strangeName), "", nil)
	h.refused("invalid_request", "GET", at("file", "path", folder+"/fifo"), "", nil)
	h.refused("invalid_request", "GET", "/v1/nothing", "", nil)
	h.refused("not_empty", "DELETE", at("path", "path", folder+"/a"), "", nil)
	h.refused("not_found", "DELETE", at("path", "path", folder+"/nope", "recursive", "1"), "", nil)
	h.refused("invalid_request", "DELETE", at("path", "path", "/", "recursive", "1"), "", nil)
	h.call("DELETE", at("path", "path", folder+"/a", "recursive", "1"), "", nil)
	h.call("DELETE", at("path", "path", folder+"/link"), "", nil)
	must(t, os.WriteFile(folder+"/other", []byte("o"), 0o640))
	h.refused("exists", "POST", at("move", "from", folder+"/other", "to", folder+"/fifo"), "", nil)
	h.refused("not_found", "POST", at("move", "from", folder+"/nope", "to", folder+"/fifo"), "", nil)
	h.call("POST", at("move", "from", folder+"/other", "to", folder+"/fifo", "overwrite", "1"), "", nil)
	onlyThere(t, folder, strangeName, "fifo")
	h.call("POST", "/v1/sync", "", nil)
}
