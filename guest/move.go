package main

import (
	"errors"
	"io"
	"log"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

func (f *files) move(c *fileCall) error {
	from, err := c.path("from")
	if err != nil {
		return err
	}
	to, err := c.path("to")
	if err != nil {
		return err
	}
	overwrite, err := c.flag("overwrite", false)
	if err != nil {
		return err
	}
	err = rename(from, to, overwrite)
	if errors.Is(err, syscall.EXDEV) {
		err = moveAcross(from, to, overwrite, c.user)
	}
	if err != nil {
		return moveFailure(from, to, err)
	}
	return c.done()
}

func moveFailure(from, to string, err error) error {
	var stat syscall.Stat_t
	if errors.Is(err, syscall.ENOENT) && syscall.Lstat(from, &stat) != nil {
		return pathFailure(from, err)
	}
	return pathFailure(to, err)
}

func rename(from, to string, overwrite bool) error {
	if overwrite {
		return syscall.Rename(from, to)
	}
	return unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
}

// moveAcross copies beside the target, puts the copy in place in one step and only then removes the source.
func moveAcross(from, to string, overwrite bool, actor *user) error {
	var stat syscall.Stat_t
	if !overwrite && syscall.Lstat(to, &stat) == nil {
		return syscall.EEXIST
	}
	staging := besides(to)
	if err := os.Mkdir(staging, 0o700); err != nil {
		return err
	}
	defer os.RemoveAll(staging)
	parent, name := filepath.Dir(from), filepath.Base(from)
	reader, writer := io.Pipe()
	// A goroutine has a thread of its own, which has to become the user too.
	go func() {
		err := errors.New("the agent failed while copying")
		defer func() {
			if problem := recover(); problem != nil {
				log.Printf("panic while copying: %v", problem)
			}
			writer.CloseWithError(err)
		}()
		err = actor.do(func() error { return packNames(writer, parent, []string{name}) })
	}()
	_, _, err := unpackInto(reader, staging, actor == nil)
	reader.CloseWithError(io.ErrClosedPipe)
	if err != nil {
		return err
	}
	if err := rename(staging+"/"+name, to, overwrite); err != nil {
		return err
	}
	return os.RemoveAll(from)
}
