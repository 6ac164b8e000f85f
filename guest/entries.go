package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// file writes one regular file; long runs of zeros become holes.
func (u *unpacker) file(base string, header *tar.Header, content io.Reader) error {
	file, err := u.parent.OpenFile(base, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer file.Close()
	size, err := writeSparse(file, content, u.buffer)
	u.byteCount += size
	if err != nil {
		return err
	}
	return u.finish(file, header)
}

var zeroChunk [copyChunk]byte

func writeSparse(file *os.File, content io.Reader, buffer []byte) (int64, error) {
	var size int64
	hole := false
	for {
		n, err := io.ReadFull(content, buffer)
		if n > 0 {
			if hole = n == len(buffer) && bytes.Equal(buffer, zeroChunk[:n]); !hole {
				if _, err := file.WriteAt(buffer[:n], size); err != nil {
					return size, err
				}
			}
			size += int64(n)
		}
		if errors.Is(err, io.EOF) || (errors.Is(err, io.ErrUnexpectedEOF) && n > 0 && isWhole(content)) {
			break
		}
		if err != nil {
			return size, invalid("truncated or invalid tar archive: %v", err)
		}
	}
	if hole {
		return size, file.Truncate(size)
	}
	return size, nil
}

// isWhole tells the short last chunk of an entry from an archive that was cut there.
func isWhole(content io.Reader) bool {
	var one [1]byte
	_, err := content.Read(one[:])
	return err == io.EOF
}

// node makes a fifo or, as root, a device; os.Root cannot.
func (u *unpacker) node(base string, header *tar.Header) error {
	kind := uint32(syscall.S_IFIFO)
	device := uint64(0)
	if header.Typeflag != tar.TypeFifo {
		if !u.asRoot {
			return fmt.Errorf("device nodes are not extracted: %w", syscall.EPERM)
		}
		kind = syscall.S_IFCHR
		if header.Typeflag == tar.TypeBlock {
			kind = syscall.S_IFBLK
		}
		device = unix.Mkdev(uint32(header.Devmajor), uint32(header.Devminor))
	}
	if err := syscall.Mknodat(int(u.handle.Fd()), base, kind|0o600, int(device)); err != nil {
		return err
	}
	if err := u.parent.Chmod(base, os.FileMode(header.Mode&0o777)); err != nil {
		return err
	}
	return u.ownAndTime(base, header)
}

// ownAndTime is for what cannot be opened: links and nodes.
func (u *unpacker) ownAndTime(base string, header *tar.Header) error {
	if u.asRoot {
		if err := u.parent.Lchown(base, header.Uid, header.Gid); err != nil {
			return err
		}
	}
	return setTimes(int(u.handle.Fd()), base, header.ModTime)
}
