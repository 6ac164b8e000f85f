package main

import (
	"context"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"
)

const connectLimit = 10 * time.Second

// handleConnect joins the caller with a port of the guest's loopback interface.
func (t *sessions) handleConnect(w http.ResponseWriter, r *http.Request) {
	port, err := number(r, "port", 0, 65535)
	if err == nil && port == 0 {
		err = invalid("port must be a number from 1 to 65535")
	}
	var target *net.TCPConn
	if err == nil {
		target, err = dialLoopback(r.Context(), int(port))
	}
	if err != nil {
		writeError(w, err)
		return
	}
	defer target.Close()
	conn, err := t.upgrade(w, r, "stead-tcp")
	if err != nil {
		writeError(w, err)
		return
	}
	defer t.release(conn)
	conn.Write(switching("stead-tcp"))
	if len(conn.early) > 0 {
		target.Write(conn.early)
	}
	relay(conn.TCPConn, target)
}

// dialLoopback connects in the guest's own network; programs listen on one of the two addresses or on both.
func dialLoopback(ctx context.Context, port int) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(ctx, connectLimit)
	defer cancel()
	dialer := net.Dialer{KeepAlive: -1}
	var failures []error
	for _, address := range []string{"127.0.0.1", "::1"} {
		conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(address, strconv.Itoa(port)))
		if err == nil {
			return conn.(*net.TCPConn), nil
		}
		failures = append(failures, err)
	}
	return nil, fail("connection_refused", "nothing accepts connections on port %d of the VM: %v", port, failures[0])
}

// relay copies both ways until both ends have sent all; a connection that breaks breaks the other.
func relay(one, other *net.TCPConn) {
	var copying sync.WaitGroup
	for _, each := range [2][2]*net.TCPConn{{one, other}, {other, one}} {
		copying.Go(func() {
			to, from := each[0], each[1]
			if _, err := io.Copy(to, from); err != nil {
				for _, broken := range each {
					broken.SetLinger(0) // a reset, so that neither end takes this for all of the data
					broken.Close()
				}
				return
			}
			to.CloseWrite()
		})
	}
	copying.Wait()
}
