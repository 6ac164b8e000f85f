package main

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"unsafe"
)

// The calls of a create are read and answered here and not by net/http: a restored clone runs every piece of code
// for the first time in its emulator, and net/http is several times as much of it. The head of a request is only
// looked at first. With any other call, or with anything unusual in it, the connection passes to net/http for good.

const (
	headLimit = 4 << 10
	headEnd   = "\r\n\r\n"
	bodyKept  = 4 << 10 // of an answer, so that a short one is sent at once and with its length
)

func isPlain(method, path string) bool {
	switch path {
	case "/v1/health":
		return method == "GET"
	case "/v1/identity", "/v1/exec":
		return method == "POST"
	}
	return false
}

// passed is where net/http gets its connections from.
type passed struct {
	net.Listener
	connections chan net.Conn
}

func (p *passed) Accept() (net.Conn, error) { return <-p.connections, nil }

// answerPlain answers the plain calls of a connection.
func answerPlain(conn *net.TCPConn, handler http.Handler, others chan<- net.Conn) {
	buffer := make([]byte, headLimit)
	for {
		head, err := peekHead(conn, buffer)
		if err != nil {
			break
		}
		request, length := parseHead(head)
		if request == nil {
			others <- conn
			return
		}
		whole := make([]byte, len(head)+length)
		if _, err := io.ReadFull(conn, whole); err != nil {
			break
		}
		content := whole[len(head):]
		request.Body, request.ContentLength = &wholeBody{bytes.NewReader(content), content}, int64(length)
		answer := &plainAnswer{conn: conn, header: http.Header{}, status: http.StatusOK}
		handler.ServeHTTP(answer, request)
		if answer.send(nil, true); answer.err != nil {
			break
		}
	}
	conn.Close()
}

// peekHead waits for a request and returns what has come of its head, which stays where it is. The host sends a
// head at once; nothing waits for the rest of one, because what was only looked at wakes no one a second time.
func peekHead(conn *net.TCPConn, buffer []byte) (head []byte, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	var size uintptr
	var number syscall.Errno
	err = raw.Read(func(fd uintptr) bool {
		for number = syscall.EINTR; number == syscall.EINTR; {
			size, _, number = syscall.Syscall6(syscall.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&buffer[0])), uintptr(len(buffer)), syscall.MSG_PEEK, 0, 0)
		}
		return number != syscall.EAGAIN
	})
	if err == nil && number != 0 {
		err = number
	}
	if err == nil && size == 0 {
		err = io.EOF
	}
	if err != nil {
		return nil, err
	}
	head = buffer[:size]
	if end := bytes.Index(head, []byte(headEnd)); end >= 0 {
		head = head[:end+len(headEnd)]
	}
	return head, nil
}

// parseHead understands the head of a plain call, of which the host sends few headers; nil stands for any other.
func parseHead(head []byte) (request *http.Request, length int) {
	line, rest, _ := strings.Cut(string(head), "\r\n")
	method, line, _ := strings.Cut(line, " ")
	path, version, _ := strings.Cut(line, " ")
	if version != "HTTP/1.1" || !isPlain(method, path) || !strings.HasSuffix(rest, headEnd[2:]) {
		return nil, 0
	}
	request = &http.Request{Method: method, URL: &url.URL{Path: path}, Header: http.Header{}}
	for rest != headEnd[2:] {
		line, rest, _ = strings.Cut(rest, "\r\n")
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch strings.ToLower(name) {
		case "host", "accept-encoding", "user-agent":
		case "content-length":
			size, err := strconv.ParseUint(value, 10, 31)
			if err != nil || size > jsonLimit || length != 0 {
				return nil, 0
			}
			length = int(size)
		case "x-stead-user":
			request.Header["X-Stead-User"] = append(request.Header["X-Stead-User"], value)
		default:
			return nil, 0
		}
	}
	return request, length
}

// wholeBody is the body of a request that has arrived.
type wholeBody struct {
	*bytes.Reader
	content []byte
}

func (*wholeBody) Close() error { return nil }

// plainAnswer is the answer to a plain call: of one piece if it is short, else in chunks.
type plainAnswer struct {
	conn   *net.TCPConn
	header http.Header
	status int
	kept   []byte
	begun  bool // the head is sent
	err    error
}

func (a *plainAnswer) Header() http.Header { return a.header }

func (a *plainAnswer) WriteHeader(status int) { a.status = status }

func (a *plainAnswer) Write(data []byte) (int, error) {
	if len(a.kept)+len(data) > bodyKept {
		a.send(data, false)
	} else {
		a.kept = append(a.kept, data...)
	}
	return len(data), a.err
}

func (a *plainAnswer) FlushError() error {
	a.send(nil, false)
	return a.err
}

// send sends what was kept and more data; with last, the answer is complete.
func (a *plainAnswer) send(data []byte, last bool) {
	if a.err != nil {
		return
	}
	size := len(a.kept) + len(data)
	packet := make([]byte, 0, 160+len(a.kept))
	chunked := a.begun || !last
	if !a.begun {
		a.begun = true
		packet = append(strconv.AppendInt(append(packet, "HTTP/1.1 "...), int64(a.status), 10), ' ')
		packet = append(append(packet, http.StatusText(a.status)...), "\r\nContent-Type: "...)
		for _, kind := range a.header["Content-Type"] {
			packet = append(packet, kind...)
		}
		if chunked {
			packet = append(packet, "\r\nTransfer-Encoding: chunked\r\n\r\n"...)
		} else {
			packet = strconv.AppendInt(append(packet, "\r\nContent-Length: "...), int64(size), 10)
			packet = append(packet, "\r\n\r\n"...)
		}
	}
	if chunked && size > 0 {
		packet = append(strconv.AppendInt(packet, int64(size), 16), "\r\n"...)
	}
	packet = append(packet, a.kept...)
	a.kept = a.kept[:0]
	end := ""
	if chunked && size > 0 {
		end = "\r\n"
	}
	if chunked && last {
		end += "0\r\n\r\n"
	}
	if len(data) == 0 {
		if packet = append(packet, end...); len(packet) > 0 {
			_, a.err = a.conn.Write(packet)
		}
		return
	}
	pieces := net.Buffers{packet, data, []byte(end)}
	_, a.err = pieces.WriteTo(a.conn)
}
