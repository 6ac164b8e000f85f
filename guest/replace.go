package main

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"syscall"
)

// besides names a temporary file or folder for a path; it is short, for the target's own name may be 255 bytes.
func besides(path string) string {
	return path[:strings.LastIndexByte(path, '/')+1] + fmt.Sprintf(".stead-%016x", rand.Uint64())
}

// replaceContent writes a new file beside the target and renames it over it: whatever fails, the target stays as it was.
func replaceContent(path string, body io.Reader, mode uint32, owner, group int) (size int64, err error) {
	temporary := besides(path)
	file, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return 0, pathFailure(path, err)
	}
	defer func() {
		file.Close()
		if err != nil {
			os.Remove(temporary)
		}
	}()
	if size, err = copyBody(file, body); err != nil {
		return 0, pathFailure(path, err)
	}
	fd := int(file.Fd())
	if owner >= 0 || group >= 0 {
		if err := syscall.Fchown(fd, owner, group); err != nil {
			return 0, pathFailure(path, err)
		}
	}
	// After the owner, for a change of owner takes the set-user-id bit away.
	if err := syscall.Fchmod(fd, mode); err != nil {
		return 0, pathFailure(path, err)
	}
	if err := file.Sync(); err != nil {
		return 0, pathFailure(path, err)
	}
	if err := syscall.Rename(temporary, path); err != nil {
		return 0, pathFailure(path, err)
	}
	syncFolder(path)
	return size, nil
}

// copyBody tells a failing disk from a sender that went away.
func copyBody(file *os.File, body io.Reader) (int64, error) {
	buffer := takeBuffer()
	defer giveBuffer(buffer)
	source := &bodyReader{body: body}
	size, err := io.CopyBuffer(writeOnly{file}, source, *buffer)
	if source.err != nil {
		return size, invalid("request body ended early after %d bytes", size)
	}
	return size, err
}

type bodyReader struct {
	body io.Reader
	err  error
}

func (b *bodyReader) Read(into []byte) (int, error) {
	n, err := b.body.Read(into)
	if err != nil && !errors.Is(err, io.EOF) {
		b.err = err
	}
	return n, err
}

// syncFolder makes a rename in the path's folder durable. A folder that its user may write but not read cannot be synced.
func syncFolder(path string) {
	folder, err := os.Open(path[:strings.LastIndexByte(path, '/')+1])
	if err == nil {
		folder.Sync()
		folder.Close()
	}
}
