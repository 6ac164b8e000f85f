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

// stream is the reading end of a command's stdout or stderr.
type stream struct {
	file  *os.File
	conn  syscall.RawConn
	ended atomic.Int64 // when the command ended, in nanoseconds since it started reading; 0 while it runs
	began time.Time
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
func (s *stream) forward(frames *frameWriter, kind byte, done *sync.WaitGroup) {
	more := s.copy(frames, kind)
	if more {
		done.Done()
		s.file.SetReadDeadline(time.Time{})
		io.CopyBuffer(frames.rest(kind), readOnly{s.file}, make([]byte, 4096))
	}
	s.file.Close()
	if frames.record != nil {
		frames.record.release()
	}
	if !more {
		done.Done()
	}
}

// copy reports whether someone still holds the pipe's other end.
func (s *stream) copy(frames *frameWriter, kind byte) bool {
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
func (s *stream) rest(frames *frameWriter, kind byte) (held bool) {
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

func (s *stream) readOnce(fd int, frames *frameWriter, kind byte) (int, error) {
	buffer := streamBuffers.Get().(*[]byte)
	defer streamBuffers.Put(buffer)
	for {
		n, err := syscall.Read(fd, (*buffer)[frameHeader:])
		if err == syscall.EINTR {
			continue
		}
		if n > 0 {
			frames.send(kind, (*buffer)[:frameHeader+n], true)
		}
		return n, err
	}
}
