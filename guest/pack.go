package main

import (
	"archive/tar"
	"errors"
	"io"
	"net/http"
	"os"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

func (f *files) pack(c *fileCall) error {
	path, err := c.path("path")
	if err != nil {
		return err
	}
	folder, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return pathFailure(path, err)
	}
	names, err := folder.Readdirnames(-1)
	folder.Close()
	if err != nil {
		return pathFailure(path, err)
	}
	c.w.Header().Set("Content-Type", "application/x-tar")
	if err := packNames(c.w, path, names); err != nil {
		// The answer has begun: cut the connection, so that the client does not take it for complete.
		panic(http.ErrAbortHandler)
	}
	return nil
}

type inode struct{ device, number uint64 }

type packer struct {
	archive *tar.Writer
	linked  map[inode]string
	buffer  []byte
}

// packNames writes the named children of a folder, and all below them, as a tar archive.
func packNames(to io.Writer, folder string, names []string) error {
	root, err := os.OpenRoot(folder)
	if err != nil {
		return err
	}
	defer root.Close()
	buffer := takeBuffer()
	defer giveBuffer(buffer)
	p := &packer{tar.NewWriter(to), map[inode]string{}, *buffer}
	if err := p.all(root, "", names); err != nil {
		return err
	}
	return p.archive.Close()
}

func (p *packer) all(folder *os.Root, prefix string, names []string) error {
	slices.Sort(names)
	for _, name := range names {
		// A file that vanishes while its folder is packed was not part of it.
		if err := p.one(folder, prefix, name); err != nil && !errors.Is(err, errVanished) {
			return err
		}
	}
	return nil
}

var errVanished = errors.New("vanished")

func (p *packer) one(folder *os.Root, prefix, name string) error {
	info, err := folder.Lstat(name)
	if os.IsNotExist(err) {
		return errVanished
	}
	if err != nil {
		return err
	}
	stat := info.Sys().(*syscall.Stat_t)
	header := &tar.Header{
		Name: prefix + name, Mode: int64(stat.Mode & 0o7777), Uid: int(stat.Uid), Gid: int(stat.Gid),
		ModTime: info.ModTime(), Format: tar.FormatPAX,
	}
	switch stat.Mode & syscall.S_IFMT {
	case syscall.S_IFREG:
		return p.file(folder, name, header, stat)
	case syscall.S_IFDIR:
		return p.directory(folder, name, header)
	case syscall.S_IFLNK:
		header.Typeflag = tar.TypeSymlink
		if header.Linkname, err = folder.Readlink(name); err != nil {
			return err
		}
	case syscall.S_IFIFO:
		header.Typeflag = tar.TypeFifo
	case syscall.S_IFCHR, syscall.S_IFBLK:
		header.Typeflag = tar.TypeChar
		if stat.Mode&syscall.S_IFMT == syscall.S_IFBLK {
			header.Typeflag = tar.TypeBlock
		}
		header.Devmajor = int64(unix.Major(stat.Rdev))
		header.Devminor = int64(unix.Minor(stat.Rdev))
	default:
		return nil // a socket is nothing without its process
	}
	return p.archive.WriteHeader(header)
}

func (p *packer) directory(folder *os.Root, name string, header *tar.Header) error {
	inner, err := folder.OpenRoot(name)
	if os.IsNotExist(err) {
		return errVanished
	}
	if err != nil {
		return err
	}
	defer inner.Close()
	listing, err := inner.Open(".")
	if err != nil {
		return err
	}
	names, err := listing.Readdirnames(-1)
	listing.Close()
	if err != nil {
		return err
	}
	header.Typeflag = tar.TypeDir
	header.Name += "/"
	if err := p.archive.WriteHeader(header); err != nil {
		return err
	}
	return p.all(inner, header.Name, names)
}

func (p *packer) file(folder *os.Root, name string, header *tar.Header, stat *syscall.Stat_t) error {
	if stat.Nlink > 1 {
		key := inode{stat.Dev, stat.Ino}
		if first, known := p.linked[key]; known {
			header.Typeflag, header.Linkname = tar.TypeLink, first
			return p.archive.WriteHeader(header)
		}
		p.linked[key] = header.Name
	}
	file, err := folder.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if os.IsNotExist(err) {
		return errVanished
	}
	if err != nil {
		return err
	}
	defer file.Close()
	header.Typeflag, header.Size = tar.TypeReg, stat.Size
	if err := p.archive.WriteHeader(header); err != nil {
		return err
	}
	copied, err := io.CopyBuffer(writeOnly{p.archive}, io.LimitReader(file, stat.Size), p.buffer)
	if err != nil {
		return err
	}
	// A file that shrinks meanwhile is filled up: the header has promised its size.
	_, err = io.CopyBuffer(writeOnly{p.archive}, io.LimitReader(zeros{}, stat.Size-copied), p.buffer)
	return err
}

type zeros struct{}

func (zeros) Read(into []byte) (int, error) {
	clear(into)
	return len(into), nil
}
