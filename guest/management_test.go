package main

import (
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestManagementNIC(t *testing.T) {
	if !inNamespaces(t) {
		return
	}
	folder := t.TempDir() + "/stead"
	kernel, err := openNetlink()
	must(t, err)
	defer kernel.close()
	// The NIC's driver is loaded after the agent has started.
	time.AfterFunc(60*time.Millisecond, func() { addPair(t, "eth1", managementMAC, "host1", hostMAC) })
	listener, err := listenOnManagement(folder)
	must(t, err)
	defer func() { syscall.Unmount(folder+"/netns", syscall.MNT_DETACH) }()
	if _, _, mode := ownerOf(t, folder); mode != 0o700 {
		t.Errorf("mode %o", mode)
	}
	if nic, _ := kernel.findLink(managementMAC); nic != nil {
		t.Errorf("%s is still in the root namespace", nic.name)
	}
	host, err := kernel.findLink(hostMAC)
	must(t, err)
	must(t, kernel.changeLink(host.index, true, nil))
	must(t, kernel.addAddress(host.index, netip.MustParsePrefix("fe80::1/64"), unix.IFA_F_NODAD))
	must(t, kernel.addNeighbour(host.index, agentAddress.Addr(), managementMAC))

	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	ask := func() string {
		t.Helper()
		response, err := client.Get("http://[fe80::2%25host1]:7070/")
		must(t, err)
		defer response.Body.Close()
		body, _ := io.ReadAll(response.Body)
		return string(body)
	}
	answer := func(listener net.Listener, text string) *http.Server {
		server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, text+r.RemoteAddr)
		})}
		go server.Serve(listener)
		return server
	}
	server := answer(listener, "first ")
	if got := ask(); !strings.HasPrefix(got, "first [fe80::1%") {
		t.Errorf("%q", got)
	}
	server.Close()
	// The agent is restarted: it finds its namespace and the NIC in it.
	listener, err = listenOnManagement(folder)
	must(t, err)
	server = answer(listener, "second ")
	if got := ask(); !strings.HasPrefix(got, "second ") {
		t.Errorf("%q", got)
	}
	server.Close()
	// No thread that could start commands stays in the namespace.
	own, err := os.Readlink("/proc/self/ns/net")
	must(t, err)
	within(t, 60*time.Second, "every thread is in the root namespace", func() bool {
		tasks, err := os.ReadDir("/proc/self/task")
		must(t, err)
		for _, task := range tasks {
			if other, err := os.Readlink("/proc/self/task/" + task.Name() + "/ns/net"); err == nil && other != own {
				return false
			}
		}
		return true
	})
	// The mount is gone and the namespace with it. (A virtual NIC dies with its namespace, a real one comes back.)
	must(t, syscall.Unmount(folder+"/netns", 0))
	within(t, 60*time.Second, "the namespace ends", func() bool {
		host, _ := kernel.findLink(hostMAC)
		return host == nil
	})
	addPair(t, "dev7", managementMAC, "host2", hostMAC)
	listener, err = listenOnManagement(folder)
	must(t, err)
	listener.Close()
}
