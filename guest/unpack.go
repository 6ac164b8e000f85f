package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func (f *files) unpack(c *fileCall) error {
	folder, err := c.path("path")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return pathFailure(folder, err)
	}
	body := &bodyReader{body: c.r.Body}
	count, size, err := unpackInto(body, folder, c.user == nil)
	if body.err != nil {
		return invalid("request body ended early")
	}
	if err != nil {
		return pathFailure(folder, err)
	}
	writeJSON(c.w, http.StatusOK, map[string]int64{"files": count, "bytes": size})
	return nil
}

// unpacker writes an archive's entries below a root that no name and no link can lead out of.
type unpacker struct {
	root      *os.Root
	asRoot    bool
	buffer    []byte
	parent    *os.Root // of the last entry: entries come folder by folder
	parentAt  string
	handle    *os.File // the same folder, for calls that os.Root lacks
	folders   []*tar.Header
	fileCount int64
	byteCount int64
}

func unpackInto(source io.Reader, folder string, asRoot bool) (count, size int64, err error) {
	root, err := os.OpenRoot(folder)
	if err != nil {
		return 0, 0, err
	}
	defer root.Close()
	buffer := takeBuffer()
	defer giveBuffer(buffer)
	u := &unpacker{root: root, asRoot: asRoot, buffer: *buffer, parentAt: "?"}
	defer u.leave()
	tail := &tailReader{source: source}
	archive := tar.NewReader(tail)
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return u.fileCount, u.byteCount, invalid("truncated or invalid tar archive: %v", err)
		}
		if err := u.entry(header, archive); err != nil {
			return u.fileCount, u.byteCount, entryFailure(header.Name, err)
		}
	}
	if tail.ended {
		return u.fileCount, u.byteCount, invalid("truncated tar archive: end-of-archive marker is missing")
	}
	if _, err := io.CopyBuffer(io.Discard, readOnly{source}, u.buffer); err != nil {
		return u.fileCount, u.byteCount, invalid("truncated or invalid tar archive: %v", err)
	}
	return u.fileCount, u.byteCount, u.finishFolders()
}

// tailReader notices when the source ran dry: a reader that stopped at the archive's own end mark never gets there.
type tailReader struct {
	source io.Reader
	ended  bool
}

func (t *tailReader) Read(into []byte) (int, error) {
	n, err := t.source.Read(into)
	if n > 0 && errors.Is(err, io.EOF) {
		return n, nil
	}
	t.ended = t.ended || err != nil
	return n, err
}

func entryFailure(name string, err error) error {
	var number syscall.Errno
	if known := (*apiError)(nil); errors.As(err, &known) || errors.As(err, &number) {
		return pathFailure(name, err)
	}
	return invalid("%s: %v", printable(name), err)
}

func (u *unpacker) leave() {
	if u.parent != nil {
		u.parent.Close()
		u.handle.Close()
		u.parent = nil
	}
}

// enter opens the folder of an entry, made if the archive did not name it, and returns the entry's own name.
func (u *unpacker) enter(name string) (string, error) {
	folder, base := path.Split(name)
	if folder == u.parentAt && u.parent != nil {
		return base, nil
	}
	u.leave()
	inner := path.Clean("./" + folder)
	if err := u.root.MkdirAll(inner, 0o755); err != nil {
		return "", err
	}
	parent, err := u.root.OpenRoot(inner)
	if err != nil {
		return "", err
	}
	handle, err := parent.Open(".")
	if err != nil {
		parent.Close()
		return "", err
	}
	u.parent, u.handle, u.parentAt = parent, handle, folder
	return base, nil
}

// inside makes an archive's name relative; names that climb out are refused, not bent.
func inside(name string) (string, error) {
	clean := path.Clean(strings.TrimLeft(name, "/"))
	if name == "" || clean == ".." || strings.HasPrefix(clean, "../") || strings.IndexByte(name, 0) >= 0 {
		return "", invalid("archive entry %s is outside of the target directory", printable(name))
	}
	return clean, nil
}

func (u *unpacker) entry(header *tar.Header, content io.Reader) error {
	if header.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	name, err := inside(header.Name)
	if err != nil {
		return err
	}
	if name == "." {
		if header.Typeflag != tar.TypeDir {
			return invalid("archive entry without a name")
		}
		header.Name = "."
		u.folders = append(u.folders, header)
		return nil
	}
	base, err := u.enter(name)
	if err != nil {
		return err
	}
	if header.Typeflag == tar.TypeDir {
		header.Name = name
		u.folders = append(u.folders, header)
		return u.makeFolder(base)
	}
	u.fileCount++
	if err := u.parent.Remove(base); err != nil && !os.IsNotExist(err) {
		if errors.Is(err, syscall.ENOTEMPTY) {
			err = syscall.EISDIR
		}
		return err
	}
	switch header.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse:
		return u.file(base, header, content)
	case tar.TypeLink:
		target, err := inside(header.Linkname)
		if err != nil {
			return err
		}
		if err = u.root.Link(target, name); os.IsNotExist(err) {
			return invalid("hard link target %s does not exist", printable(header.Linkname))
		}
		return err
	case tar.TypeSymlink:
		if err := u.parent.Symlink(header.Linkname, base); err != nil {
			return err
		}
		return u.ownAndTime(base, header)
	case tar.TypeFifo, tar.TypeChar, tar.TypeBlock:
		return u.node(base, header)
	}
	return invalid("unsupported archive entry type %q", header.Typeflag)
}

func (u *unpacker) makeFolder(base string) error {
	err := u.parent.Mkdir(base, 0o700)
	if !os.IsExist(err) {
		return err
	}
	if info, err := u.parent.Stat(base); err == nil && info.IsDir() {
		return nil
	}
	if err := u.parent.Remove(base); err != nil {
		return err
	}
	return u.parent.Mkdir(base, 0o700)
}

// finishFolders comes last, the innermost first: a folder that is read-only or old would not stay so before.
func (u *unpacker) finishFolders() error {
	u.leave()
	for i := len(u.folders) - 1; i >= 0; i-- {
		header := u.folders[i]
		folder, err := u.root.Open(header.Name)
		if err != nil {
			return entryFailure(header.Name, err)
		}
		err = u.finish(folder, header)
		folder.Close()
		if err != nil {
			return entryFailure(header.Name, err)
		}
	}
	return nil
}

// finish sets owner, mode and time of an open file or folder.
func (u *unpacker) finish(file *os.File, header *tar.Header) error {
	if u.asRoot {
		if err := file.Chown(header.Uid, header.Gid); err != nil {
			return err
		}
	}
	if err := syscall.Fchmod(int(file.Fd()), uint32(header.Mode)&0o7777); err != nil {
		return err
	}
	return setTimes(int(file.Fd()), "", header.ModTime)
}

// setTimes sets the time of what has the name in an open folder; without a name, of the open file itself.
func setTimes(fd int, name string, modified time.Time) error {
	times := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, unix.NsecToTimespec(modified.UnixNano())}
	if err := unix.UtimesNanoAt(fd, name, times, unix.AT_SYMLINK_NOFOLLOW|unix.AT_EMPTY_PATH); err != nil {
		return fmt.Errorf("set the time: %w", err)
	}
	return nil
}
