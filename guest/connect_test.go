package main

import (
	"fmt"
	"io"
	"net"
	"os"
	"testing"
	"time"
)

func TestPortIsConnected(t *testing.T) {
	h := start(t)
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		listener, err := net.Listen("tcp", address)
		must(t, err)
		defer listener.Close()
		go func() {
			for {
				conn, err := listener.Accept()
				if err != nil {
					return
				}
				all, _ := io.ReadAll(conn) // to the half-close
				fmt.Fprintf(conn, "%d bytes", len(all))
				conn.Close()
			}
		}()
		conn, from, response := h.upgrade(fmt.Sprintf("/v1/connect?port=%d", listener.Addr().(*net.TCPAddr).Port), "stead-tcp", "")
		if response.StatusCode != 101 || response.Header.Get("Upgrade") != "stead-tcp" {
			t.Fatalf("%+v", response)
		}
		conn.Write(make([]byte, 3_000_000))
		conn.(*net.TCPConn).CloseWrite()
		if answer, err := io.ReadAll(from); err != nil || string(answer) != "3000000 bytes" {
			t.Errorf("%q %v", answer, err)
		}
		port := listener.Addr().(*net.TCPAddr).Port
		listener.Close()
		h.refused("connection_refused", "GET", at("connect", "port", fmt.Sprint(port)), "", nil)
	}
	h.refused("invalid_request", "GET", "/v1/connect?port=0", "", nil)
	h.refused("invalid_request", "GET", "/v1/connect?port=65536", "", nil)
	within(t, 60*time.Second, "no connection is left", func() bool {
		h.agent.sessions.mu.Lock()
		defer h.agent.sessions.mu.Unlock()
		return len(h.agent.sessions.conns) == 0
	})
}

func TestPortThatBreaksBreaksTheConnection(t *testing.T) {
	h := start(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer listener.Close()
	go func() {
		conn, err := listener.Accept()
		if err == nil {
			conn.Read(make([]byte, 1))
			conn.(*net.TCPConn).SetLinger(0)
			conn.Close()
		}
	}()
	conn, from, _ := h.upgrade(fmt.Sprintf("/v1/connect?port=%d", listener.Addr().(*net.TCPAddr).Port), "stead-tcp", "")
	conn.Write([]byte("x"))
	conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := io.ReadAll(from); err == nil || os.IsTimeout(err) {
		t.Errorf("the reset is not passed on: %v", err)
	}
}
