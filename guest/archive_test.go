package main

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func tarOf(t *testing.T, headers ...tar.Header) *bytes.Buffer {
	t.Helper()
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	for _, header := range headers {
		content := header.Uname
		header.Uname, header.Size = "", int64(len(content))
		must(t, w.WriteHeader(&header))
		io.WriteString(w, content)
	}
	must(t, w.Close())
	return &archive
}

// snapshot describes everything below a folder.
func snapshot(t *testing.T, folder string) string {
	var all strings.Builder
	inodes := map[uint64]string{}
	must(t, filepath.Walk(folder, func(path string, info os.FileInfo, err error) error {
		if err != nil || path == folder {
			return err
		}
		name, _ := filepath.Rel(folder, path)
		stat := info.Sys().(*syscall.Stat_t)
		fmt.Fprintf(&all, "%q %o %d:%d %d", name, stat.Mode, stat.Uid, stat.Gid, stat.Rdev)
		fmt.Fprintf(&all, " %d", stat.Mtim.Nano())
		switch {
		case info.Mode().IsRegular():
			content, _ := os.ReadFile(path)
			first, known := inodes[stat.Ino]
			if !known {
				inodes[stat.Ino] = name
			}
			fmt.Fprintf(&all, " %d %x %q", len(content), content[:min(9, len(content))], first)
		case stat.Mode&syscall.S_IFMT == syscall.S_IFLNK:
			target, _ := os.Readlink(path)
			fmt.Fprintf(&all, " -> %q", target)
		}
		all.WriteString("\n")
		return nil
	}))
	return all.String()
}

func TestArchiveKeepsEverything(t *testing.T) {
	h := start(t)
	source := t.TempDir()
	must(t, os.MkdirAll(source+"/locked/"+strangeName, 0o755))
	must(t, os.WriteFile(source+"/locked/"+strangeName+"/"+strangeName, []byte("odd"), 0o4755))
	must(t, os.WriteFile(source+"/"+strings.Repeat("l", 255), []byte("long"), 0o600))
	must(t, os.Link(source+"/locked/"+strangeName+"/"+strangeName, source+"/zhard"))
	must(t, os.Symlink("/etc/\xffanywhere", source+"/link"))
	must(t, os.Lchown(source+"/link", aliceUID, aliceGroup))
	must(t, syscall.Mkfifo(source+"/fifo", 0o620))
	must(t, syscall.Mknod(source+"/null", syscall.S_IFCHR|0o600, 1<<8|3))
	must(t, os.Chown(source+"/zhard", aliceUID, aliceGroup))
	must(t, os.Chmod(source+"/zhard", 0o4755))
	holey, err := os.Create(source + "/holey")
	must(t, err)
	holey.WriteAt([]byte("end"), 40<<20)
	holey.Close()
	must(t, os.Chtimes(source+"/holey", time.Now(), time.Unix(1234567890, 123456789)))
	must(t, os.Chmod(source+"/locked", 0o555))

	archive := h.call("GET", at("archive", "path", source), "", nil)
	target := t.TempDir() + "/made/for it"
	h.call("PUT", at("archive", "path", target), "", bytes.NewReader(archive))
	if before, after := snapshot(t, source), snapshot(t, target); before != after {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
	var stat syscall.Stat_t
	must(t, syscall.Stat(target+"/holey", &stat))
	if stat.Blocks*512 > 4<<20 {
		t.Errorf("the hole takes %d bytes", stat.Blocks*512)
	}
	// Once more over what is there.
	h.call("PUT", at("archive", "path", target), "", bytes.NewReader(archive))
	if before, after := snapshot(t, source), snapshot(t, target); before != after {
		t.Errorf("after the second time:\n%s", after)
	}
	// The real tar reads it and is read.
	extracted := t.TempDir()
	command := exec.Command("tar", "-x", "-p", "-C", extracted)
	command.Stdin = bytes.NewReader(archive)
	if output, err := command.CombinedOutput(); err != nil {
		t.Errorf("tar: %v %s", err, output)
	}
	if before, after := snapshot(t, source), snapshot(t, extracted); before != after {
		t.Errorf("tar made:\n%s", after)
	}
	for _, format := range []string{"--format=gnu", "--format=pax", "--format=pax --sparse"} {
		packed, err := exec.Command("sh", "-c", "tar -c "+format+" -C '"+source+"' .").Output()
		must(t, err)
		again := t.TempDir()
		h.call("PUT", at("archive", "path", again), "", bytes.NewReader(packed))
		if format == "--format=pax" && snapshot(t, source) != snapshot(t, again) {
			t.Errorf("from tar %s:\n%s", format, snapshot(t, again))
		}
	}
	must(t, os.Chmod(source+"/locked", 0o755))
}

func TestArchiveCannotReachOutside(t *testing.T) {
	h := start(t)
	outside := t.TempDir()
	must(t, os.WriteFile(outside+"/victim", []byte("safe"), 0o644))
	entry := func(name string) tar.Header { return tar.Header{Name: name, Mode: 0o644, Uname: "evil"} }
	link := func(name, to string) tar.Header {
		return tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to}
	}
	hard := func(name, to string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: to} }
	for i, archive := range []*bytes.Buffer{
		tarOf(t, entry("../victim")),
		tarOf(t, entry("a/../../victim")),
		tarOf(t, link("out", outside), entry("out/victim")),
		tarOf(t, link("out", outside), entry("out/new")),
		tarOf(t, link("up", "../.."), link("up/x", "y")),
		tarOf(t, link("out", outside+"/victim"), hard("hard", "out/../../victim")),
		tarOf(t, hard("hard", "../victim")),
		tarOf(t, link("a", "b"), link("b", outside), tar.Header{Name: "a/dir/", Typeflag: tar.TypeDir, Mode: 0o777}),
		tarOf(t, link("d", outside), tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o711}, link("e", outside), entry("e/victim")),
	} {
		inside := filepath.Join(t.TempDir(), "inside")
		before := snapshot(t, outside)
		h.refused("invalid_request", "PUT", at("archive", "path", inside), "", archive)
		if after := snapshot(t, outside); after != before {
			t.Errorf("archive %d changed:\n%s", i, after)
		}
		onlyThere(t, filepath.Dir(inside), "inside")
	}
	// A link of the same name is replaced, not written through; absolute names stay inside.
	inside := t.TempDir()
	h.call("PUT", at("archive", "path", inside), "", tarOf(t, link("f", outside+"/victim"), entry("f"), entry("/abs/file")))
	if content, _ := os.ReadFile(outside + "/victim"); string(content) != "safe" {
		t.Errorf("%q", content)
	}
	onlyThere(t, inside, "abs", "f")
}

func TestBrokenArchives(t *testing.T) {
	h := start(t)
	whole := tarOf(t, tar.Header{Name: "f", Mode: 0o644, Uname: strings.Repeat("x", 3000)}, tar.Header{Name: "g", Mode: 0o644, Uname: "y"}).Bytes()
	for _, broken := range [][]byte{nil, []byte("garbage"), bytes.Repeat([]byte("garbage!"), 999), whole[:100], whole[:512], whole[:2000], whole[:3584], whole[:4096], whole[:4608]} {
		h.refused("invalid_request", "PUT", at("archive", "path", t.TempDir()), "", bytes.NewReader(broken))
	}
	if answer := h.call("PUT", at("archive", "path", t.TempDir()), "", io.MultiReader(bytes.NewReader(whole), strings.NewReader(strings.Repeat("\x00", 9000)))); string(answer) != `{"bytes":3001,"files":2}` {
		t.Errorf("%s", answer)
	}
	h.refused("not_found", "GET", at("archive", "path", "/nope"), "", nil)
	h.refused("not_directory", "GET", at("archive", "path", "/etc/passwd"), "", nil)
	h.refused("not_directory", "PUT", at("archive", "path", "/etc/passwd"), "", bytes.NewReader(whole))
}

func TestArchiveAsUser(t *testing.T) {
	h := start(t)
	folder := h.folder()
	archive := tarOf(t,
		tar.Header{Name: "ro/", Typeflag: tar.TypeDir, Mode: 0o555, Uid: 7, Gid: 7},
		tar.Header{Name: "ro/file", Mode: 0o640, Uid: 7, Gid: 7, Uname: "content"}).Bytes()
	h.call("PUT", at("archive", "path", folder+"/x"), "alice", bytes.NewReader(archive))
	for path, want := range map[string]uint32{"/x": 0o755, "/x/ro": 0o555, "/x/ro/file": 0o640} {
		if uid, gid, mode := ownerOf(t, folder+path); uid != aliceUID || gid != aliceUID || mode != want {
			t.Errorf("%s: %d:%d %o", path, uid, gid, mode)
		}
	}
	h.call("GET", at("archive", "path", folder), "alice", nil)
	device := tarOf(t, tar.Header{Name: "null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3})
	h.refused("permission_denied", "PUT", at("archive", "path", folder), "alice", device)
}
