package main

import (
	"os"
	"sync"
	"syscall"
	"time"
)

const (
	// How often input that a program does not read asks whether its sender is still there.
	inputCheck = time.Second
	// What one client may send ahead of a program that does not read.
	inputQueued = 256 << 10
	inputPiece  = 4 << 10 // as much as the line discipline of a terminal holds
)

var errNoInput = invalid("this process was started without stdin, or its stdin is closed")

func (s *session) setInput(file *os.File) {
	s.input = file
	s.inputTo, _ = file.SyscallConn() // cannot fail: the file is open
}

// takeTurn waits until no other sender writes to the program; false when this one is gone before.
func (s *session) takeTurn(isThere func() bool) bool {
	if s.tryTurn() {
		return true
	}
	check := time.NewTicker(inputCheck)
	defer check.Stop()
	for {
		select {
		case s.inputTurn <- struct{}{}:
			return true
		case <-check.C:
			if !isThere() {
				return false
			}
		}
	}
}

func (s *session) tryTurn() bool {
	select {
	case s.inputTurn <- struct{}{}:
		return true
	default:
		return false
	}
}

func (s *session) endTurn() { <-s.inputTurn }

// write feeds the program; it waits while the program takes no more and the sender is there.
func (s *session) write(data []byte, isThere func() bool) error {
	if s.input == nil {
		return errNoInput
	}
	if !s.takeTurn(isThere) {
		return nil
	}
	defer s.endTurn()
	written, err := s.attempt(data)
	if err != nil || written == len(data) {
		return err
	}
	defer s.input.SetWriteDeadline(time.Time{})
	for data = data[written:]; len(data) > 0 && isThere(); data = data[written:] {
		s.input.SetWriteDeadline(time.Now().Add(inputCheck))
		if written, err = writeWhile(s.inputTo, data, isThere); err != nil {
			return err
		}
	}
	return nil
}

// writeNow writes what the program's input takes without waiting: nothing while another sender waits.
func (s *session) writeNow(data []byte) (written int, err error) {
	if s.input == nil {
		return 0, errNoInput
	}
	if !s.tryTurn() {
		return 0, nil
	}
	defer s.endTurn()
	return s.attempt(data)
}

func (s *session) attempt(data []byte) (written int, err error) {
	if s.inputClosed.Load() {
		return 0, errNoInput
	}
	if len(data) == 0 {
		return 0, nil
	}
	return attemptWrite(s.inputTo, data)
}

// typed writes to a terminal without waiting; false when its input is full.
func (s *session) typed(data []byte) bool {
	written, err := s.writeNow(data)
	return err == nil && written == len(data)
}

// endInput is end of file for the program, after what was written before; a terminal's is typed.
func (s *session) endInput(isThere func() bool) {
	if s.pty {
		s.write([]byte{endOfFile}, isThere)
	} else if s.takeTurn(isThere) {
		defer s.endTurn()
		s.closeInput()
	}
}

func (s *session) closeInput() {
	if s.input != nil && !s.inputClosed.Swap(true) && !s.pty { // the pty's master is closed by its reader
		s.input.Close()
	}
}

// interrupt types Control-C on a terminal. Behind input that its programs have not read it would wait: then they are
// signalled, and that input is discarded as the line discipline does.
func (s *session) interrupt() {
	signalled := false
	s.inputTo.Control(func(fd uintptr) { signalled = interruptUnread(int(fd), s.discardInput) })
	if !signalled && !s.typed([]byte{controlC}) {
		s.inputTo.Control(func(fd uintptr) { signalForeground(int(fd), syscall.SIGINT) })
	}
}

func (s *session) discardInput() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, each := range s.clients {
		each.input.discard()
	}
}

// inputQueue holds what a client sent and the program has not read, so that frames after it (signals, new sizes) do not
// wait behind it. When it is full, the connection is not read.
type inputQueue struct {
	mu      sync.Mutex
	waiting []byte
	ends    bool      // end of file follows
	writing bool      // a goroutine writes what waits
	drops   int       // how often what waited was discarded
	room    sync.Cond // on mu
}

func (q *inputQueue) held() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return cap(q.waiting)
}

func (q *inputQueue) discard() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting = nil
	q.drops++
	q.room.Broadcast()
}

func (q *inputQueue) dropped() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.drops
}

// next takes a piece of what waits; false when there is nothing more.
func (q *inputQueue) next(piece []byte) (_ []byte, ends, more bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	piece = append(piece[:0], q.waiting[:min(len(q.waiting), inputPiece)]...)
	if q.waiting = q.waiting[len(piece):]; len(q.waiting) == 0 {
		q.waiting = nil
		ends, q.ends = q.ends, false
	}
	q.writing = len(piece) > 0 || ends
	q.room.Broadcast()
	return piece, ends, q.writing
}

// feed gives input to the program, or queues what it does not take at once.
func (c *client) feed(data []byte) {
	q := &c.input
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.waiting) > 0 && len(q.waiting)+len(data) > inputQueued {
		q.room.Wait()
	}
	if !q.writing {
		written, err := c.session.writeNow(data)
		if err != nil || written == len(data) {
			return
		}
		data = data[written:]
	}
	q.waiting = append(q.waiting, data...)
	c.startWriting()
}

// endInput closes the program's input after what was sent before.
func (c *client) endInput() {
	s, q := c.session, &c.input
	if s.pty {
		c.feed([]byte{endOfFile})
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.writing && s.tryTurn() {
		defer s.endTurn()
		s.closeInput()
		return
	}
	q.ends = true
	c.startWriting()
}

func (c *client) startWriting() {
	if !c.input.writing {
		c.input.writing = true
		go c.writeQueued()
	}
}

// writeQueued writes until the program has taken everything, or the client is gone.
func (c *client) writeQueued() {
	q := &c.input
	drops := q.dropped()
	isWanted := func() bool { return q.dropped() == drops && c.isThere() }
	piece, ends, more := q.next(nil)
	for ; more; piece, ends, more = q.next(piece) {
		c.session.write(piece, isWanted)
		if ends {
			c.session.endInput(c.isThere)
		}
		if !c.isThere() {
			q.discard()
		}
		drops = q.dropped()
	}
}
