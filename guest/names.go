package main

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

const hostnameBytes = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-"

func isHostname(name string) bool {
	if len(name) > 64 {
		return false
	}
	for _, label := range strings.Split(name, ".") {
		if label == "" || len(label) > 63 || strings.Trim(label, hostnameBytes) != "" || label[0] == '-' || label[len(label)-1] == '-' {
			return false
		}
	}
	return true
}

const fileBlock = 4096 // of the root file system

// hostsWith keeps every line of /etc/hosts but those for the machine's own name.
func hostsWith(hosts, hostname string) string {
	own := "127.0.1.1 " + hostname
	if short, _, dotted := strings.Cut(hostname, "."); dotted {
		own += " " + short
	}
	var lines []string
	placed := false
	for line := range strings.Lines(hosts) {
		line = strings.TrimSuffix(line, "\n")
		if fields := strings.Fields(line); len(fields) > 0 && fields[0] == "127.0.1.1" {
			if placed {
				continue
			}
			line, placed = own, true
		}
		lines = append(lines, line)
	}
	if hosts == "" {
		lines = append(lines, "127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback")
	}
	if !placed {
		lines = append(lines, own)
	}
	return strings.Join(lines, "\n") + "\n"
}

// replaceFile writes a file, not synced because the host can give the identity again at any time, and returns
// what is in it afterwards. A file that is already right is left alone. One that is missing, is blank as in a
// template, or has the same length as in a copy of a machine, is written in place: the file system would write a
// renamed one to the disk at once. A file of another length is renamed over, because a crash could leave the new
// length with the old content; a block of a file is old or new as a whole.
func replaceFile(path, content string, mode uint32) (string, error) {
	var stat syscall.Stat_t
	err := syscall.Lstat(path, &stat)
	regular := err == nil && stat.Mode == syscall.S_IFREG|mode
	same := regular && stat.Size == int64(len(content))
	switch {
	case same && holds(path, content):
		return content, nil
	case same && stat.Nlink == 1 && len(content) <= fileBlock:
		err = writeFile(path, content, 0, mode)
	case err == syscall.ENOENT:
		err = createFile(path, content, mode)
	case regular && stat.Size <= int64(len(blank)) && len(content) >= len(blank):
		err = writeFile(path, content, 0, mode)
	default:
		err = renameOver(path, content, mode)
	}
	if err != nil {
		return "", err
	}
	written, err := readFile(path)
	if err == nil && written != content {
		err = fmt.Errorf("%s differs from what was written to it", path)
	}
	return written, err
}

func holds(path, content string) bool {
	present, err := readFile(path)
	return err == nil && present == content
}

// createFile makes a file, and its folder if it has none.
func createFile(path, content string, mode uint32) error {
	err := writeFile(path, content, syscall.O_EXCL, mode)
	if os.IsNotExist(err) {
		if err = os.MkdirAll(path[:strings.LastIndexByte(path, '/')], 0o755); err == nil {
			err = writeFile(path, content, syscall.O_EXCL, mode)
		}
	}
	return err
}

func renameOver(path, content string, mode uint32) error {
	slash := strings.LastIndexByte(path, '/') + 1
	temporary := path[:slash] + ".stead-" + path[slash:]
	os.Remove(temporary)
	if err := writeFile(temporary, content, syscall.O_EXCL, mode); err != nil {
		return err
	}
	if err := syscall.Rename(temporary, path); err != nil {
		os.Remove(temporary)
		// A file that something is mounted on can only be written in place.
		return writeFile(path, content, syscall.O_TRUNC, mode)
	}
	return nil
}

// readFile and writeFile are for small files, without what an os.File brings along for the runtime's poller: a
// restored clone would have to translate it.
func readFile(path string) (string, error) {
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return "", &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer syscall.Close(fd)
	content := make([]byte, 0, 4096)
	for {
		n, err := syscall.Read(fd, content[len(content):cap(content)])
		if err != nil {
			return "", &os.PathError{Op: "read", Path: path, Err: err}
		}
		if n == 0 {
			return string(content), nil
		}
		if content = content[:len(content)+n]; len(content) == cap(content) {
			content = slices.Grow(content, len(content))
		}
	}
}

func writeFile(path, content string, flag int, mode uint32) error {
	fd, err := syscall.Open(path, syscall.O_WRONLY|syscall.O_CREAT|syscall.O_CLOEXEC|flag, mode)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	for err == nil && content != "" {
		var n int
		n, err = syscall.Write(fd, []byte(content))
		content = content[max(n, 0):]
	}
	if failed := syscall.Close(fd); err == nil {
		err = failed
	}
	if err != nil {
		return &os.PathError{Op: "write", Path: path, Err: err}
	}
	return nil
}

// reseed makes the random pool forget what it shared with the guest this one was cloned from.
func reseed(entropy []byte) error {
	pool, err := syscall.Open("/dev/urandom", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("/dev/urandom: %w", err)
	}
	defer syscall.Close(pool)
	credit := struct { // rand_pool_info, which unix does not have
		bits, size int32
		bytes      [64]byte
	}{bits: int32(8 * len(entropy)), size: int32(len(entropy))}
	copy(credit.bytes[:], entropy)
	if _, _, number := syscall.Syscall(syscall.SYS_IOCTL, uintptr(pool), unix.RNDADDENTROPY, uintptr(unsafe.Pointer(&credit))); number != 0 {
		return fmt.Errorf("credit entropy: %w", number)
	}
	if err := unix.IoctlSetInt(pool, unix.RNDRESEEDCRNG, 0); err != nil {
		return fmt.Errorf("reseed the random pool: %w", err)
	}
	return nil
}

func setClock(nanoseconds int64) error {
	now := unix.NsecToTimespec(nanoseconds)
	return unix.ClockSettime(unix.CLOCK_REALTIME, &now)
}
