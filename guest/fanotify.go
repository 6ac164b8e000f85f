package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	watchedChanges = unix.FAN_MODIFY | unix.FAN_ATTRIB | unix.FAN_MOVED_FROM | unix.FAN_MOVED_TO | unix.FAN_CREATE |
		unix.FAN_DELETE | unix.FAN_ONDIR

	// Sizes from linux/fanotify.h and linux/fcntl.h that unix does not have.
	infoHeader   = 12 // kind, padding, length, file system id
	handleHeader = 8  // size and type
)

// notices is the kernel's queue of changes on one file system. It is bounded: unread, it fills up
// and the kernel reports that changes were lost.
type notices struct {
	file   *os.File
	conn   syscall.RawConn
	folder int // any open folder of the file system, to open others by their handles
	buffer []byte
}

// notice is one change: of which name in which folder. Handles are the kernel's bytes.
type notice struct {
	mask   uint64
	folder string
	name   string
	target string
	held   bool
}

func openNotices(path string) (*notices, error) {
	// Each change is reported with the folder's handle, the name in it, and the handle of what has that name.
	group, err := unix.FanotifyInit(unix.FAN_CLOEXEC|unix.FAN_NONBLOCK|unix.FAN_REPORT_DFID_NAME_TARGET, unix.O_RDONLY)
	if err == syscall.EMFILE {
		return nil, overloaded("too many file watches in the VM")
	}
	if err != nil {
		return nil, fmt.Errorf("fanotify_init: %w", err)
	}
	n := &notices{file: os.NewFile(uintptr(group), "fanotify"), buffer: make([]byte, 64<<10)}
	if n.conn, err = n.file.SyscallConn(); err != nil {
		n.file.Close()
		return nil, err
	}
	if n.folder, err = syscall.Open(path, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0); err != nil {
		n.file.Close()
		return nil, err
	}
	if err = unix.FanotifyMark(group, unix.FAN_MARK_ADD|unix.FAN_MARK_FILESYSTEM, watchedChanges, n.folder, ""); err != nil {
		n.close()
		return nil, fmt.Errorf("fanotify_mark: %w", err)
	}
	return n, nil
}

// end makes a read that waits return; it may come from any goroutine, and more than once.
func (n *notices) end() { n.file.Close() }

func (n *notices) close() {
	n.end()
	syscall.Close(n.folder)
}

// wait blocks until there is something and returns it.
func (n *notices) wait(into []notice) ([]notice, error) {
	var got int
	var failed error
	err := n.conn.Read(func(fd uintptr) bool {
		got, failed = n.read(fd)
		return failed != syscall.EAGAIN
	})
	if err == nil {
		err = failed
	}
	if err != nil {
		return into, err
	}
	return parseNotices(into, n.buffer[:got]), nil
}

func (n *notices) read(fd uintptr) (got int, err error) {
	for {
		if got, err = syscall.Read(int(fd), n.buffer); err != syscall.EINTR {
			return got, err
		}
	}
}

// more returns what is there now, up to about as many as asked for; drained says that nothing is left.
func (n *notices) more(into []notice, limit int) (_ []notice, drained bool, err error) {
	for len(into) < limit {
		var got int
		var failed error
		if err := n.conn.Control(func(fd uintptr) { got, failed = n.read(fd) }); err != nil {
			return into, false, err
		}
		if failed == syscall.EAGAIN {
			return into, true, nil
		}
		if failed != nil {
			return into, false, failed
		}
		into = parseNotices(into, n.buffer[:got])
	}
	return into, false, nil
}

func parseNotices(into []notice, raw []byte) []notice {
	for len(raw) >= unix.FAN_EVENT_METADATA_LEN {
		length := int(binary.NativeEndian.Uint32(raw))
		if length < unix.FAN_EVENT_METADATA_LEN || length > len(raw) {
			break
		}
		found := notice{mask: binary.NativeEndian.Uint64(raw[8:])}
		for info := raw[binary.NativeEndian.Uint16(raw[6:]):length]; len(info) >= infoHeader+handleHeader; {
			size := int(binary.NativeEndian.Uint16(info[2:]))
			if size < infoHeader+handleHeader || size > len(info) {
				break
			}
			handle := handleHeader + int(binary.NativeEndian.Uint32(info[infoHeader:]))
			if infoHeader+handle <= size {
				switch info[0] {
				case unix.FAN_EVENT_INFO_TYPE_FID:
					found.target = string(info[infoHeader : infoHeader+handle])
				case unix.FAN_EVENT_INFO_TYPE_DFID_NAME:
					found.folder = string(info[infoHeader : infoHeader+handle])
					found.name, _, _ = strings.Cut(string(info[infoHeader+handle:size]), "\x00")
				}
			}
			info = info[size:]
		}
		// What has no folder is an inode without a name any more, such as the rest of a deleted file.
		if found.folder != "" || found.mask&unix.FAN_Q_OVERFLOW != 0 {
			into = append(into, found)
		}
		raw = raw[length:]
	}
	return into
}

// path finds where a folder is now; a folder that was deleted is nowhere.
func (n *notices) path(handle string) (string, bool) {
	raw := []byte(handle)
	kind := int32(binary.NativeEndian.Uint32(raw[4:]))
	fd, err := unix.OpenByHandleAt(n.folder, unix.NewFileHandle(kind, raw[handleHeader:]), unix.O_PATH|unix.O_CLOEXEC)
	if err != nil {
		return "", false
	}
	defer syscall.Close(fd)
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil || path[0] != '/' {
		return "", false
	}
	if strings.HasSuffix(path, " (deleted)") {
		var stat syscall.Stat_t
		if syscall.Fstat(fd, &stat) != nil || stat.Nlink == 0 {
			return "", false
		}
	}
	return path, true
}
