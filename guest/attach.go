package main

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"time"
)

const (
	clientQueue  = 256 << 10
	clientLag    = 512 << 10 // how far behind the output of a process a client may be before the process waits
	screenLimit  = 16 << 20
	clientsLimit = 64   // of one session
	connsLimit   = 1024 // of all sessions and ports
	// How long a client may take to read the end before its connection is closed.
	lingering = 5 * time.Second
	// How long a program waits for a client to take some of its output.
	clientPatience = 250 * time.Millisecond
)

// connection is one that was upgraded from HTTP.
type connection struct {
	*net.TCPConn
	raw   syscall.RawConn
	early []byte // what the client sent right after its request
}

// upgrade takes a connection over from the HTTP server. The caller sends the answer 101.
func (t *sessions) upgrade(w http.ResponseWriter, r *http.Request, protocol string) (*connection, error) {
	if !strings.EqualFold(r.Header.Get("Upgrade"), protocol) || !strings.EqualFold(r.Header.Get("Connection"), "upgrade") {
		return nil, invalid("this call needs the headers Connection: Upgrade and Upgrade: %s", protocol)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.conns) >= connsLimit {
		return nil, overloaded("the VM has %d clients of sessions and ports, the most it may have", connsLimit)
	}
	taken, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return nil, err
	}
	conn := &connection{}
	if conn.TCPConn, _ = taken.(*net.TCPConn); conn.TCPConn == nil {
		taken.Close()
		return nil, http.ErrNotSupported
	}
	conn.SetDeadline(time.Time{})
	conn.early, _ = buffered.Reader.Peek(buffered.Reader.Buffered())
	if conn.raw, err = conn.SyscallConn(); err != nil {
		taken.Close()
		return nil, err
	}
	if t.conns == nil {
		t.conns = map[*connection]bool{}
	}
	t.conns[conn] = true
	return conn, nil
}

func (t *sessions) release(conn *connection) {
	conn.Close()
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.conns, conn)
}

// dropConnections is for a machine that was restored: its clients are gone, or those of the VM it was forked from.
func (t *sessions) dropConnections() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for conn := range t.conns {
		conn.Close()
	}
}

func switching(protocol string) []byte {
	return []byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + protocol + "\r\n\r\n")
}

// client is one attached connection. Its fields are guarded by the session's lock, but for those of the reader.
type client struct {
	*connection
	session    *session
	cols, rows int
	pending    []byte // frames that wait for the connection
	sending    bool   // a goroutine sends what is pending
	behind     bool   // output was left out: a terminal needs its screen, a process goes on from its log
	offset     int64  // of the output that was sent or is pending
	slow       bool   // it made no room in time: not waited for until it has everything
	told       bool   // the result is sent or pending
	gone       bool
	input      inputQueue
}

func (t *sessions) attach(s *session, w http.ResponseWriter, r *http.Request) error {
	cols, err := number(r, "cols", 0, sizeLimit)
	if err != nil {
		return err
	}
	rows, err := number(r, "rows", 0, sizeLimit)
	if err != nil {
		return err
	}
	offset, err := number(r, "offset", 0, 1<<62)
	if err != nil {
		return err
	}
	if attached := s.info().Attached; attached >= clientsLimit {
		return overloaded("session %s has %d clients, the most it may have", s.id, attached)
	}
	conn, err := t.upgrade(w, r, "stead-session")
	if err != nil {
		return err
	}
	defer t.release(conn)
	c := &client{connection: conn, session: s, cols: int(cols), rows: int(rows), offset: offset}
	c.input.room.L = &c.input.mu
	c.join()
	defer c.leave()
	c.read()
	return nil
}

// join sends the state of the session; whatever is printed from now on follows it.
func (c *client) join() {
	s := c.session
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clients = append(s.clients, c)
	if s.resizeLocked() {
		s.redrawn = true
	}
	hello := appendFrame(switching("stead-session"), frameStarted, encoded(s.infoLocked()))
	if s.screen != nil {
		if s.redrawn {
			s.printed = s.replayLocked(c.rows, true)
		}
		hello = appendFrame(hello, frameScreen, s.printed)
		s.printed, s.redrawn = nil, true
		c.offset = s.offset
	} else {
		hello, c.offset = s.cutLocked(hello, c.offset)
		c.behind = c.offset < s.offset
	}
	sent, _ := attemptWrite(c.raw, hello)
	c.pending = hello[sent:]
	if len(c.pending) > 0 || c.behind || s.result != nil {
		c.startSending()
	}
}

func (c *client) leave() {
	s := c.session
	s.mu.Lock()
	defer s.mu.Unlock()
	c.gone, c.pending = true, nil
	c.input.discard()
	s.clients = slices.DeleteFunc(s.clients, func(other *client) bool { return other == c })
	s.resizeLocked()
	s.accountLocked()
}

// replayLocked redraws a terminal, without the scrollback when it is too large for a frame.
func (s *session) replayLocked(rows int, scrollback bool) []byte {
	replay := s.screen.ReplayTo(rows, scrollback)
	if len(replay) > screenLimit && scrollback {
		replay = s.screen.Replay(false)
	}
	if len(replay) > screenLimit {
		return nil
	}
	return replay
}

// cutLocked says which output from an offset on is no longer held, and where to go on.
func (s *session) cutLocked(to []byte, offset int64) ([]byte, int64) {
	offset = min(offset, s.offset)
	if offset < s.log.start {
		to = appendFrame(to, frameCut, fmt.Appendf(nil, `{"from":%d,"to":%d}`, offset, s.log.start))
		offset = s.log.start
	}
	return to, offset
}

// push sends output at once if the connection takes it, so that an echo waits for no other goroutine.
func (c *client) push(frame []byte) {
	if c.gone {
		return
	}
	if !c.sending && !c.behind {
		sent, err := attemptWrite(c.raw, frame)
		c.offset = c.session.offset
		if err != nil {
			c.drop()
		} else if sent < len(frame) {
			c.pending = append(c.pending[:0], frame[sent:]...)
			c.startSending()
		}
		return
	}
	if c.behind || c.session.screen == nil || len(c.pending)+len(frame) > clientQueue {
		c.behind = true
		return
	}
	c.pending = append(c.pending, frame...)
	c.offset = c.session.offset
}

// isFullLocked reports whether more output would be left out for this client, although it can be waited for.
func (c *client) isFullLocked(size int) bool {
	if !c.sending || c.slow || c.gone {
		return false
	}
	if c.session.screen != nil {
		return !c.behind && len(c.pending)+size > clientQueue
	}
	return c.session.offset-c.offset+int64(size) > clientLag
}

// drop ends the connection; its reader then leaves the session.
func (c *client) drop() {
	c.gone, c.pending = true, nil
	c.Close()
}

func (c *client) startSending() {
	if !c.sending && !c.gone {
		c.sending = true
		go c.drain()
	}
}

// drain sends until the client has everything.
func (c *client) drain() {
	s := c.session
	var spare []byte
	for {
		s.mu.Lock()
		if len(c.pending) == 0 && !c.gone {
			c.refillLocked()
		}
		frames := c.pending
		if len(frames) == 0 || c.gone {
			c.sending, c.slow = false, false
			if cap(frames) > clientQueue {
				c.pending = nil
			}
			ended := c.told && !c.gone
			s.mu.Unlock()
			if ended {
				// The client closes. Closing first, with input unread, would take the last output from it.
				c.CloseWrite()
				c.SetReadDeadline(time.Now().Add(lingering))
			}
			return
		}
		c.pending = spare[:0]
		select {
		case s.room <- struct{}{}:
		default: // the program does not wait for room
		}
		s.mu.Unlock()
		_, err := c.Write(frames)
		if spare = frames; cap(spare) > 2*clientQueue {
			spare = nil
		}
		if err != nil {
			s.mu.Lock()
			c.drop()
			s.mu.Unlock()
		}
	}
}

// refillLocked takes what the client has not had.
func (c *client) refillLocked() {
	s := c.session
	if c.behind && s.screen != nil {
		c.behind, c.offset = false, s.offset
		c.pending = appendFrame(c.pending, frameScreen, s.replayLocked(c.rows, false))
		return
	}
	if c.behind {
		c.pending, c.offset = s.cutLocked(c.pending, c.offset)
		c.pending, c.offset = s.log.read(c.pending, c.offset, streamChunk)
		c.behind = c.offset < s.offset
		return
	}
	if s.result != nil && !c.told {
		c.told = true
		c.pending = appendFrame(c.pending, frameResult, encoded(s.infoLocked()))
	}
}

// read takes frames from the client until it is gone.
func (c *client) read() {
	var source io.Reader = c.TCPConn
	if len(c.early) > 0 {
		source = io.MultiReader(strings.NewReader(string(c.early)), c.TCPConn)
	}
	frames := bufio.NewReaderSize(source, 4<<10)
	var header [frameHeader]byte
	var payload []byte
	for {
		if _, err := io.ReadFull(frames, header[:]); err != nil {
			return
		}
		length := int(binary.BigEndian.Uint32(header[4:]))
		if length > streamChunk {
			return
		}
		if cap(payload) < length {
			payload = make([]byte, length)
		}
		if _, err := io.ReadFull(frames, payload[:length]); err != nil {
			return
		}
		if !c.take(header[0], payload[:length]) {
			return
		}
	}
}

// take obeys one frame; false for one that is not understood.
func (c *client) take(kind byte, payload []byte) bool {
	s := c.session
	switch kind {
	case frameInput:
		c.feed(payload)
	case frameCloseStdin:
		c.endInput()
	case frameSignal:
		return s.signalNamed(payload) == nil
	case frameResize:
		var size struct {
			Cols int `json:"cols"`
			Rows int `json:"rows"`
		}
		if json.Unmarshal(payload, &size) != nil || checkSize(size.Cols, size.Rows) != nil {
			return false
		}
		s.mu.Lock()
		c.cols, c.rows = size.Cols, size.Rows
		s.resizeLocked()
		s.mu.Unlock()
	default:
		return false
	}
	return true
}

func (c *client) isThere() bool {
	c.session.mu.Lock()
	defer c.session.mu.Unlock()
	return !c.gone && c.session.result == nil && !hungUp(c.raw)
}

func (s *session) signalNamed(request []byte) error {
	var asked struct {
		Signal string `json:"signal"`
	}
	if err := json.Unmarshal(request, &asked); err != nil {
		return invalid("invalid JSON request: %v", err)
	}
	number := slices.Index(signalNames[:], asked.Signal)
	if number < 1 {
		return invalid("unknown signal %s", printable(asked.Signal))
	}
	s.signal(syscall.Signal(number))
	return nil
}

func encoded(value any) []byte {
	text, _ := json.Marshal(value)
	return text
}
