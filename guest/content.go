package main

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
)

const wholeRead = 64 << 10

func (f *files) read(c *fileCall) error {
	path, err := c.path("path")
	if err != nil {
		return err
	}
	// Non-blocking: the open of a pipe without a writer would wait.
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return pathFailure(path, err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return pathFailure(path, err)
	}
	if info.IsDir() {
		return pathFailure(path, syscall.EISDIR)
	}
	if !info.Mode().IsRegular() {
		return invalid("%s is not a regular file", printable(path))
	}
	c.w.Header().Set("Content-Type", "application/octet-stream")
	size := info.Size()
	if size > wholeRead {
		return sendFile(c, file, size)
	}
	// Files of /proc and /sys do not say how long they are, so small ones are read first.
	buffer := takeBuffer()
	defer giveBuffer(buffer)
	n, err := io.ReadFull(file, *buffer)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return sendBytes(c, (*buffer)[:n])
	}
	if err != nil {
		return pathFailure(path, err)
	}
	c.w.Write(*buffer)
	if _, err := io.CopyBuffer(writeOnly{c.w}, readOnly{file}, *buffer); err != nil {
		panic(http.ErrAbortHandler)
	}
	return nil
}

func sendBytes(c *fileCall, content []byte) error {
	from, length, err := c.rangeOf(int64(len(content)))
	if err != nil {
		return err
	}
	c.w.Write(content[from : from+length])
	return nil
}

func sendFile(c *fileCall, file *os.File, size int64) error {
	from, length, err := c.rangeOf(size)
	if err != nil {
		return err
	}
	if _, err := file.Seek(from, io.SeekStart); err != nil {
		return err
	}
	// Not copied through the agent: this ends in sendfile(2).
	if _, err := io.CopyN(c.w, file, length); err != nil {
		panic(http.ErrAbortHandler)
	}
	return nil
}

// rangeOf writes the answer's head for the part of the content that is asked for.
func (c *fileCall) rangeOf(size int64) (from, length int64, err error) {
	header := c.w.Header()
	header.Set("Accept-Ranges", "bytes")
	from, to := int64(0), size-1
	status := http.StatusOK
	asked, isRange := strings.CutPrefix(c.r.Header.Get("Range"), "bytes=")
	first, last, dashed := strings.Cut(asked, "-")
	if isRange && dashed {
		a, err1 := strconv.ParseInt(first, 10, 64)
		b, err2 := strconv.ParseInt(last, 10, 64)
		switch {
		case first == "" && err2 == nil:
			from, status = max(0, size-b), http.StatusPartialContent
		case err1 == nil && last == "":
			from, status = a, http.StatusPartialContent
		case err1 == nil && err2 == nil && a <= b:
			from, to, status = a, min(b, size-1), http.StatusPartialContent
		}
		if status == http.StatusPartialContent && from >= size {
			header.Set("Content-Range", fmt.Sprintf("bytes */%d", size))
			return 0, 0, fail("out_of_range", "range starts beyond the end of the file (%d bytes)", size)
		}
	}
	if status == http.StatusPartialContent {
		header.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, to, size))
	}
	header.Set("Content-Length", strconv.FormatInt(to-from+1, 10))
	c.w.WriteHeader(status)
	return from, to - from + 1, nil
}

func (f *files) write(c *fileCall) error {
	path, err := c.path("path")
	if err != nil {
		return err
	}
	mode, err := c.mode()
	if err != nil {
		return err
	}
	owner, group := -1, -1
	if name := c.query.Get("owner"); name != "" && c.user == nil {
		if owner, err = f.accounts.uid(name); err != nil {
			return err
		}
	}
	if name := c.query.Get("group"); name != "" && c.user == nil {
		if group, err = f.accounts.gid(name); err != nil {
			return err
		}
	}
	if path, err = followLinks(path); err != nil {
		return err
	}
	var stat syscall.Stat_t
	err = syscall.Lstat(path, &stat)
	switch {
	case err == syscall.ENOENT:
		if mode < 0 {
			mode = 0o644
		}
		if err := makeParents(path); err != nil {
			return err
		}
	case err != nil:
		return pathFailure(path, err)
	default:
		if err := c.checkReplaceable(path, &stat); err != nil {
			return err
		}
		if mode < 0 {
			mode = int(stat.Mode & 0o7777)
		}
		// The new file takes the place of the old one: it stays whose it was.
		if c.user == nil && owner < 0 {
			owner = int(stat.Uid)
		}
		if c.user == nil && group < 0 {
			group = int(stat.Gid)
		}
	}
	size, err := replaceContent(path, c.r.Body, uint32(mode), owner, group)
	if err != nil {
		return err
	}
	writeJSON(c.w, http.StatusOK, map[string]int64{"size": size})
	return nil
}

func (c *fileCall) checkReplaceable(path string, stat *syscall.Stat_t) error {
	switch stat.Mode & syscall.S_IFMT {
	case syscall.S_IFDIR:
		return pathFailure(path, syscall.EISDIR)
	case syscall.S_IFREG:
	default:
		return invalid("%s is not a regular file", printable(path))
	}
	if c.user == nil {
		return nil
	}
	// A rename asks only the folder; a user who may not write the file must not replace it either.
	fd, err := syscall.Open(path, syscall.O_WRONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err == syscall.ETXTBSY {
		return nil
	}
	if err != nil {
		return pathFailure(path, err)
	}
	return syscall.Close(fd)
}

// followLinks finds where a symlink at the path leads, even if nothing is there yet.
func followLinks(path string) (string, error) {
	for range 40 {
		target, err := os.Readlink(path)
		if err != nil {
			return path, nil // no link; what else may be wrong shows when the path is used
		}
		if target = strings.TrimRight(target, "/"); target == "" {
			return "/", nil
		}
		if target[0] != '/' {
			// Not cleaned: only the kernel knows what a ".." behind a link means.
			target = path[:strings.LastIndexByte(path, '/')+1] + target
		}
		path = target
	}
	return "", pathFailure(path, syscall.ELOOP)
}
