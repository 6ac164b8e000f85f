package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"unsafe"
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

func utsString(field *[65]int8) string {
	bytes := unsafe.Slice((*byte)(unsafe.Pointer(&field[0])), len(field))
	text, _, _ := strings.Cut(string(bytes), "\x00")
	return text
}

// replaceFile writes by rename, not synced because the host can give the identity again at any time, and
// returns what is in the file afterwards. A file that is already right is left alone.
func replaceFile(path, content string, mode os.FileMode) (string, error) {
	if sameFile(path, content, mode) {
		return content, nil
	}
	temporary := filepath.Join(filepath.Dir(path), ".stead-"+filepath.Base(path))
	os.Remove(temporary)
	err := os.WriteFile(temporary, []byte(content), mode)
	if os.IsNotExist(err) {
		if err = os.MkdirAll(filepath.Dir(path), 0o755); err == nil {
			err = os.WriteFile(temporary, []byte(content), mode)
		}
	}
	if err != nil {
		return "", err
	}
	if err := os.Rename(temporary, path); err != nil {
		os.Remove(temporary)
		// A file that something is mounted on can only be written in place.
		if err := os.WriteFile(path, []byte(content), mode); err != nil {
			return "", err
		}
	}
	written, err := os.ReadFile(path)
	if err == nil && string(written) != content {
		err = fmt.Errorf("%s differs from what was written to it", path)
	}
	return string(written), err
}

func sameFile(path, content string, mode os.FileMode) bool {
	var stat syscall.Stat_t
	if syscall.Lstat(path, &stat) != nil || stat.Mode != syscall.S_IFREG|uint32(mode) || stat.Size != int64(len(content)) {
		return false
	}
	present, err := os.ReadFile(path)
	return err == nil && string(present) == content
}

// reseed makes the random pool forget what it shared with the guest this one was cloned from.
func reseed(entropy []byte) error {
	pool, err := syscall.Open("/dev/urandom", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("/dev/urandom: %w", err)
	}
	defer syscall.Close(pool)
	credit := struct {
		bits, size int32
		bytes      [64]byte
	}{bits: int32(8 * len(entropy)), size: int32(len(entropy))}
	copy(credit.bytes[:], entropy)
	if _, _, number := syscall.Syscall(syscall.SYS_IOCTL, uintptr(pool), addEntropy, uintptr(unsafe.Pointer(&credit))); number != 0 {
		return fmt.Errorf("credit entropy: %w", number)
	}
	if _, _, number := syscall.Syscall(syscall.SYS_IOCTL, uintptr(pool), reseedRandom, 0); number != 0 {
		return fmt.Errorf("reseed the random pool: %w", number)
	}
	return nil
}

func setClock(nanoseconds int64) error {
	now := syscall.NsecToTimespec(nanoseconds)
	if _, _, number := syscall.Syscall(syscall.SYS_CLOCK_SETTIME, clockRealtime, uintptr(unsafe.Pointer(&now)), 0); number != 0 {
		return number
	}
	return nil
}
