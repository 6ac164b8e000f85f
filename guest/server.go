package main

import (
	"encoding/json"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

const (
	protocol  = 1
	jsonLimit = 8 << 20
	// Enough for the caller of a small refused upload to read why; a big one has its connection closed.
	drainUpload = 32 << 20
	acceptPause = 100 * time.Millisecond
)

type agent struct {
	identity   *identity
	executions *executions
	files      *files
	terminals  *terminals
	watches    *watches
	sessions   *sessions
}

func (a *agent) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/oom", a.executions.oom.handleList)
	mux.HandleFunc("POST /v1/prepare", a.identity.handlePrepare)
	mux.HandleFunc("POST /v1/exec/{id}/stdin", a.executions.handleStdin)
	mux.HandleFunc("DELETE /v1/exec/{id}", a.executions.handleKill)
	mux.HandleFunc("GET /v1/file", a.files.answer(a.files.read))
	mux.HandleFunc("PUT /v1/file", a.files.answer(a.files.write))
	mux.HandleFunc("GET /v1/stat", a.files.answer(a.files.stat))
	mux.HandleFunc("GET /v1/directory", a.files.answer(a.files.list))
	mux.HandleFunc("POST /v1/directory", a.files.answer(a.files.makeDirectory))
	mux.HandleFunc("DELETE /v1/path", a.files.answer(a.files.remove))
	mux.HandleFunc("POST /v1/move", a.files.answer(a.files.move))
	mux.HandleFunc("GET /v1/archive", a.files.answer(a.files.pack))
	mux.HandleFunc("PUT /v1/archive", a.files.answer(a.files.unpack))
	mux.HandleFunc("POST /v1/ssh", a.identity.handleSSH)
	mux.HandleFunc("GET /v1/watch", a.watches.handleWatch)
	mux.HandleFunc("GET /v1/terminals", a.terminals.handleList)
	mux.HandleFunc("GET /v1/terminals/{name}", a.terminals.handleOutput)
	mux.HandleFunc("GET /v1/sessions", a.sessions.handleList)
	mux.HandleFunc("POST /v1/sessions", a.sessions.handleStart)
	mux.HandleFunc("GET /v1/sessions/{id}", a.sessions.answer(a.sessions.get))
	mux.HandleFunc("DELETE /v1/sessions/{id}", a.sessions.answer(a.sessions.close))
	mux.HandleFunc("POST /v1/sessions/{id}/signal", a.sessions.answer(a.sessions.signal))
	mux.HandleFunc("GET /v1/sessions/{id}/wait", a.sessions.answer(a.sessions.wait))
	mux.HandleFunc("POST /v1/sessions/{id}/input", a.sessions.answer(a.sessions.feed))
	mux.HandleFunc("GET /v1/sessions/{id}/output", a.sessions.answer(a.sessions.output))
	mux.HandleFunc("GET /v1/sessions/{id}/attach", a.sessions.answer(a.sessions.attach))
	mux.HandleFunc("GET /v1/connect", a.sessions.handleConnect)
	mux.HandleFunc("POST /v1/sync", handleSync)
	mux.HandleFunc("POST /v1/shutdown", handleShutdown)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, invalid("unknown call %s %s", r.Method, printable(r.URL.Path)))
	})
	return widening(recovered(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// What every create calls does not have to be looked up.
		switch {
		case !isPlain(r.Method, r.URL.Path):
			mux.ServeHTTP(w, r)
		case r.URL.Path == "/v1/health":
			a.handleHealth(w, r)
		case r.URL.Path == "/v1/identity":
			a.handleIdentity(w, r)
		case r.URL.Path == "/v1/exec":
			a.executions.handleExec(w, r)
		}
	})))
}

func (a *agent) handleIdentity(w http.ResponseWriter, r *http.Request) {
	a.watches.endAll()
	a.sessions.dropConnections()
	a.identity.handleApply(w, r)
}

// recovered answers a bug in one call with `internal` and keeps the agent up.
func recovered(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			problem := recover()
			if problem == nil {
				return
			}
			if problem == http.ErrAbortHandler {
				panic(problem)
			}
			log.Printf("panic in %s %s: %v\n%s", r.Method, r.URL.Path, problem, debug.Stack())
			writeError(w, fail("internal", "internal error in the guest agent; see `journalctl -u stead-agent` in the VM"))
		}()
		next.ServeHTTP(w, r)
	})
}

// widening gives the agent more than one processor once that is of use: with the first call that is not part of
// a create, or the first that comes while another is answered. Until then one is cheaper: a restored clone under
// emulation translates no code that wakes and balances threads.
func widening(next http.Handler) http.Handler {
	var wide sync.Once
	var calls atomic.Int32
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		together := calls.Add(1) > 1
		defer calls.Add(-1)
		switch r.URL.Path {
		case "/v1/health", "/v1/prepare", "/v1/identity", "/v1/exec", "/v1/sync":
		default:
			together = true
		}
		if together {
			wide.Do(func() { runtime.GOMAXPROCS(min(runtime.NumCPU(), 4)) })
		}
		w.Header()["Date"] = nil // the host does not read it
		next.ServeHTTP(w, r)
	})
}

// serve has no time-outs: the host is the only client, and each of them would be a timer for every call.
func serve(listener net.Listener, handler http.Handler) error {
	others := &passed{listener, make(chan net.Conn)}
	server := &http.Server{Handler: handler, ErrorLog: log.Default()}
	go server.Serve(others)
	idle := make(chan *net.TCPConn)
	for {
		conn, err := listener.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return err
			}
			log.Printf("accept: %v", err) // out of descriptors or memory: that passes
			time.Sleep(acceptPause)
			continue
		}
		select {
		case idle <- conn.(*net.TCPConn):
		default:
			// It serves others later: its stack has grown by then, in a clone already in the template.
			go func() {
				for conn := conn.(*net.TCPConn); ; conn = <-idle {
					answerPlain(conn, handler, others.connections)
				}
			}()
		}
	}
}

// listenConfig has the kernel probe silent connections once an hour instead of every 15 seconds: an idle
// machine stays idle, and connections that a restored guest inherited end some day. The options are set on
// the listening socket, accepted ones inherit them.
var listenConfig = func() (config net.ListenConfig) {
	config.SetMultipathTCP(false) // there is one path
	config.KeepAlive = -1
	config.Control = func(_, _ string, conn syscall.RawConn) error {
		return conn.Control(func(fd uintptr) {
			syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_KEEPALIVE, 1)
			syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_KEEPIDLE, 3600)
			syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_KEEPINTVL, 60)
		})
	}
	return config
}()

func (a *agent) handleHealth(w http.ResponseWriter, _ *http.Request) {
	writeLean(w, http.StatusOK, &health{protocol, version, a.identity.machineID(), a.identity.bootID, uptime().Milliseconds(), os.Getpid()})
}

type health struct {
	Protocol int    `json:"protocol"`
	Version  string `json:"version"`
	Machine  string `json:"machine"`
	BootID   string `json:"boot_id"`
	UptimeMs int64  `json:"uptime_ms"`
	PID      int    `json:"pid"`
}

func (h *health) appendTo(to []byte) []byte {
	to = appendInteger(append(to, '{'), "protocol", int64(h.Protocol))
	to = appendMember(to, "version", h.Version)
	to = appendMember(to, "machine", h.Machine)
	to = appendMember(to, "boot_id", h.BootID)
	to = appendInteger(to, "uptime_ms", h.UptimeMs)
	return append(appendInteger(to, "pid", int64(h.PID)), '}')
}

func handleSync(w http.ResponseWriter, _ *http.Request) {
	syscall.Sync()
	writeJSON(w, http.StatusOK, struct{}{})
}

func uptime() time.Duration {
	var now unix.Timespec
	unix.ClockGettime(unix.CLOCK_BOOTTIME, &now)
	return time.Duration(now.Nano())
}

func readJSON(w http.ResponseWriter, r *http.Request, into any) error {
	body, err := wholeOf(w, r)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, into); err != nil {
		return invalid("invalid JSON request: %v", err)
	}
	return nil
}

// readLean is readJSON for a value that decodes itself.
func readLean(w http.ResponseWriter, r *http.Request, into readable) error {
	body, err := wholeOf(w, r)
	if err != nil {
		return err
	}
	if err := decodeJSON(body, into); err != nil {
		return invalid("invalid JSON request: %v", err)
	}
	return nil
}

func wholeOf(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	if whole, arrived := r.Body.(*wholeBody); arrived {
		return whole.content, nil
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, jsonLimit))
	if tooLarge := (*http.MaxBytesError)(nil); err != nil && !errors.As(err, &tooLarge) {
		err = invalid("request body ended early: %v", err)
	}
	return body, err
}

// drain reads what is left of an upload that is refused, so that the refusal is not lost in a reset connection.
func drain(body io.Reader) {
	io.CopyN(io.Discard, body, drainUpload)
}

// printable makes any bytes fit for a message.
func printable(text string) string {
	if utf8.ValidString(text) && strings.IndexFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f }) < 0 {
		return text
	}
	return strconv.Quote(text)
}

const copyChunk = 256 << 10

var copyBuffers = sync.Pool{New: func() any {
	buffer := make([]byte, copyChunk)
	return &buffer
}}

func takeBuffer() *[]byte       { return copyBuffers.Get().(*[]byte) }
func giveBuffer(buffer *[]byte) { copyBuffers.Put(buffer) }

// readOnly and writeOnly hide the shortcuts of io.Copy, which would bring buffers of their own.
type readOnly struct{ io.Reader }
type writeOnly struct{ io.Writer }
