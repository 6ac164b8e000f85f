package main

import (
	"errors"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	streamChunk = 64 << 10
	drainQuiet  = 50 * time.Millisecond
	drainLimit  = time.Second
	drainBytes  = 1 << 20 // the most an unprivileged program can make a pipe hold
)

var streamBuffers = sync.Pool{New: func() any {
	buffer := make([]byte, frameHeader+streamChunk)
	return &buffer
}}

// frameSink takes what a command prints, as frames with room for their header.
type frameSink interface {
	send(kind byte, frame []byte, flush bool)
	rest(kind byte) io.Writer // for what comes after the command's end
	release()                 // one of the streams has ended
}

// stream is the reading end of a command's stdout or stderr, or of its terminal.
type stream struct {
	file  *os.File
	conn  syscall.RawConn
	ended atomic.Int64 // when the command ended, in nanoseconds since it started reading; 0 while it runs
	began time.Time
	tty   bool
}

func newStream(fd int) (*stream, error) {
	file := os.NewFile(uintptr(fd), "pipe")
	conn, err := file.SyscallConn()
	return &stream{file: file, conn: conn, began: time.Now()}, err
}

// end tells the stream that the command's process is gone: what is in the pipe still counts, more does not.
func (s *stream) end() {
	s.ended.Store(max(1, int64(time.Since(s.began))))
	s.file.SetReadDeadline(time.Now().Add(drainQuiet))
}

// forward sends what the command prints, then keeps the pipe open for background children that still hold it.
func (s *stream) forward(frames frameSink, kind byte, done *sync.WaitGroup) {
	more := s.copy(frames, kind)
	if more {
		done.Done()
		s.file.SetReadDeadline(time.Time{})
		io.CopyBuffer(frames.rest(kind), readOnly{s.file}, make([]byte, 4096))
	}
	s.file.Close()
	frames.release()
	if !more {
		done.Done()
	}
}

// copy reports whether someone still holds the pipe's other end.
func (s *stream) copy(frames frameSink, kind byte) bool {
	for {
		var got int
		var failed error
		err := s.conn.Read(func(fd uintptr) bool {
			// A buffer is taken only when there is something to read: idle commands hold none.
			got, failed = s.readOnce(int(fd), frames, kind)
			return failed != syscall.EAGAIN
		})
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return s.rest(frames, kind)
		}
		if err != nil || failed != nil || got == 0 {
			return false
		}
		if ended := s.ended.Load(); ended != 0 && time.Since(s.began)-time.Duration(ended) < drainLimit {
			s.file.SetReadDeadline(time.Now().Add(drainQuiet))
		}
	}
}

// rest takes what was already in the pipe when the time was up: a slow reader at the other end of the
// connection must not cost the command its last words.
func (s *stream) rest(frames frameSink, kind byte) (held bool) {
	s.file.SetReadDeadline(time.Time{})
	s.conn.Read(func(fd uintptr) bool {
		held = true
		for total := 0; total < drainBytes; {
			got, err := s.readOnce(int(fd), frames, kind)
			if err == nil && got == 0 || err != nil && err != syscall.EAGAIN {
				held = false
			}
			if err != nil || got == 0 {
				break
			}
			total += got
		}
		return true
	})
	return held
}

func (s *stream) readOnce(fd int, frames frameSink, kind byte) (int, error) {
	buffer := streamBuffers.Get().(*[]byte)
	defer streamBuffers.Put(buffer)
	n, err := nonblocking(syscall.SYS_READ, fd, (*buffer)[frameHeader:])
	if s.tty && n > 0 {
		n += readMore(fd, (*buffer)[frameHeader+n:])
	}
	if n > 0 {
		frames.send(kind, (*buffer)[:frameHeader+n], true)
	}
	return n, err
}

// readMore gathers what a terminal has left: it gives at most 4 KiB at once, and each frame costs a packet.
func readMore(fd int, buffer []byte) (total int) {
	for total < len(buffer) {
		n, err := nonblocking(syscall.SYS_READ, fd, buffer[total:])
		if err != nil || n <= 0 {
			break // an end is met again by the next read
		}
		total += n
	}
	return total
}
