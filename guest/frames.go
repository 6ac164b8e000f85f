package main

import (
	"encoding/binary"
	"io"
	"net/http"
	"strconv"
	"sync"
)

const (
	frameStarted = iota
	frameStdout
	frameStderr
	frameResult
	frameScreen
	frameCut

	frameHeader = 8
)

// Frames of a client that is attached to a session.
const (
	frameInput = 16 + iota
	frameResize
	frameSignal
	frameCloseStdin
)

func putHeader(kind byte, frame []byte) {
	frame[0], frame[1], frame[2], frame[3] = kind, 0, 0, 0
	binary.BigEndian.PutUint32(frame[4:], uint32(len(frame)-frameHeader))
}

// appendFrame adds a whole frame to what is to be sent.
func appendFrame(to []byte, kind byte, payload []byte) []byte {
	start := len(to)
	to = append(append(to, make([]byte, frameHeader)...), payload...)
	putHeader(kind, to[start:])
	return to
}

// frameWriter sends frames of several goroutines over one answer.
type frameWriter struct {
	mu     sync.Mutex
	out    http.ResponseWriter
	record *terminal // nil for most commands
	gone   bool
}

// send fills in the header, for which the first frameHeader bytes of frame are reserved.
// A caller that went away is not an error: the command goes on and its output is dropped.
func (f *frameWriter) send(kind byte, frame []byte, flush bool) {
	putHeader(kind, frame)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.record != nil && kind != frameStarted && kind != frameResult {
		f.record.write(kind, frame[frameHeader:])
	}
	if f.gone {
		return
	}
	if _, err := f.out.Write(frame); err != nil {
		f.gone = true
		return
	}
	if flush {
		f.flushLocked()
	}
}

func (f *frameWriter) sendStarted(id string, pid int, flush bool) {
	frame := append(make([]byte, frameHeader, 96), `{"id":"`+id+`","pid":`+strconv.Itoa(pid)+`}`...)
	f.send(frameStarted, frame, flush)
}

// sendResult does not flush: the end of the answer goes out in the same packet.
func (f *frameWriter) sendResult(result *execResult) {
	f.send(frameResult, result.appendTo(make([]byte, frameHeader, 160)), false)
}

// flush sends what is waiting, unless the answer is already complete.
func (f *frameWriter) flush() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.gone {
		f.flushLocked()
	}
}

// close keeps a late flush from touching an answer that its handler has left.
func (f *frameWriter) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gone = true
}

func (f *frameWriter) flushLocked() {
	if err := http.NewResponseController(f.out).Flush(); err != nil {
		f.gone = true
	}
}

// rest is where output goes that comes after the command's end: to its terminal if it has one.
func (f *frameWriter) rest(kind byte) io.Writer {
	if f.record == nil {
		return io.Discard
	}
	return terminalStream{f.record, kind}
}

func (f *frameWriter) release() {
	if f.record != nil {
		f.record.release()
	}
}

type terminalStream struct {
	terminal *terminal
	kind     byte
}

func (s terminalStream) Write(data []byte) (int, error) {
	s.terminal.write(s.kind, data)
	return len(data), nil
}
