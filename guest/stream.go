package main

import (
	"errors"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

const (
	streamChunk = 64 << 10
	drainQuiet  = 50 * time.Millisecond
	drainLimit  = time.Second
	drainBytes  = 1 << 20 // the most an unprivileged program can make a pipe hold
	ttyBuffer   = 4095    // the most that one read of a terminal returns
	// Output without a gap from which on a terminal is read at intervals: more than redraws a screen, and slower than
	// 8 MB a second, which is not reached by reading at intervals.
	floodBytes  = 32 << 10
	floodTime   = 4 * time.Millisecond
	minInterval = 500 * time.Microsecond
	maxInterval = 4 * time.Millisecond
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
	pace  pace
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
		n += s.readMore(fd, n, (*buffer)[frameHeader+n:])
	} else {
		s.pace.end()
	}
	if n > 0 {
		frames.send(kind, (*buffer)[:frameHeader+n], true)
	}
	return n, err
}

// readMore gathers what a terminal has left: it gives at most 4 KiB at once, and each frame costs a packet.
func (s *stream) readMore(fd int, n int, buffer []byte) (total int) {
	for total < len(buffer) {
		s.pace.wait(n)
		var err error
		n, err = nonblocking(syscall.SYS_READ, fd, buffer[total:])
		if err == syscall.EAGAIN && s.pace.waitsLonger() {
			n = 0
			continue
		}
		if err != nil || n == 0 {
			s.pace.end()
			break // an end is met again by the next read
		}
		total += n
	}
	return total
}

// pace reads a terminal at intervals while its program prints without end. The kernel moves the output line by line into
// the buffer that is read: a reader that takes each line at once costs itself, the kernel's worker and the program a
// wake-up for it.
type pace struct {
	printed  int       // bytes since nothing was left to read, or of the newest part of a flood
	since    time.Time // when the first of them was read
	flooding bool
	slow     bool
	interval time.Duration
}

// floods counts the terminals that print without end. Only a single one is read at intervals: several keep the
// processors busy enough for output to gather, and the thread that sleeps does nothing else meanwhile.
var floods atomic.Int32

// wait delays the next read after one that returned so many bytes.
func (p *pace) wait(read int) {
	if p.printed == 0 {
		p.since = time.Now()
	}
	if p.printed += read; p.printed >= floodBytes {
		p.slow = time.Since(p.since) > floodTime
		p.printed = 0
		if !p.flooding {
			p.flooding = true
			floods.Add(1)
		}
	}
	if !p.slow {
		return
	}
	switch {
	case read >= ttyBuffer: // the program may soon have to wait
		p.interval /= 2
	case read < ttyBuffer/2:
		p.interval = min(max(2*p.interval, minInterval), maxInterval)
	}
	if p.interval >= minInterval && floods.Load() == 1 {
		// The thread sleeps. A goroutine that does would leave it to the poller, which every line wakes.
		interval := syscall.NsecToTimespec(int64(p.interval))
		syscall.RawSyscall(syscall.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&interval)), 0, 0)
	}
}

// waitsLonger reports whether there may be more after a longer interval, when there was nothing.
func (p *pace) waitsLonger() bool {
	return p.slow && floods.Load() == 1 && p.interval < maxInterval
}

// end notes that nothing was left to read.
func (p *pace) end() {
	if p.flooding {
		floods.Add(-1)
	}
	*p = pace{}
}
