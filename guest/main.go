// The agent inside every Stead VM: runs commands and handles files for the host.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"syscall"
)

var version = "development"

func init() {
	// The main thread stays with main(): it must not become one of those that change namespace or user,
	// because the runtime cannot end it and /proc/self would show it.
	runtime.LockOSThread()
}

func main() {
	listen := flag.String("listen", "", "listen on this `host:port` instead of the management NIC (for development)")
	showVersion := flag.Bool("version", false, "print the version and end")
	flag.Parse()
	if *showVersion {
		fmt.Println(version)
		return
	}
	log.SetFlags(0)
	if err := run(*listen); err != nil {
		log.Fatal(err)
	}
}

func run(address string) error {
	syscall.Umask(0o022)
	// Set explicitly, or the runtime looks for new limits every second. One until more is of use: see widening.
	runtime.GOMAXPROCS(1)
	// Collect when memory is used, not every two minutes: an idle agent does nothing.
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(agentMemory)

	groups, err := prepareCgroups()
	if err != nil {
		log.Printf("command resource limits incomplete: %q", err)
	}
	launcher, err := newLauncher(groups)
	if err != nil {
		return err
	}
	accounts := &accounts{}
	terminals := newTerminals(accounts, "")
	identity := newIdentity("")
	agent := &agent{
		identity:   identity,
		executions: newExecutions(accounts, launcher, terminals),
		files:      &files{accounts: accounts},
		terminals:  terminals,
		watches:    newWatches(accounts, "/"),
		sessions:   &sessions{accounts: accounts, launcher: launcher, machine: identity.machineID},
	}
	go agent.executions.oom.follow()
	var listener net.Listener
	if address != "" {
		listener, err = listenConfig.Listen(context.Background(), "tcp", address)
	} else {
		// Under -listen this is a developer's machine, whose names and network stay as they are.
		go agent.identity.resume()
		listener, err = listenOnManagement("/run/stead")
	}
	if err != nil {
		return err
	}
	log.Printf("agent %s listening on %s", version, listener.Addr())
	notifyReady()
	ended := make(chan error)
	// Not on the main thread, which would have to be woken for every connection.
	go func() { ended <- serve(listener, agent.handler()) }()
	return <-ended
}

// notifyReady tells systemd, when the unit is of Type=notify.
func notifyReady() {
	socket := os.Getenv("NOTIFY_SOCKET")
	if socket == "" {
		return
	}
	conn, err := net.Dial("unixgram", socket)
	if err != nil {
		log.Printf("NOTIFY_SOCKET: %v", err)
		return
	}
	defer conn.Close()
	conn.Write([]byte("READY=1"))
}
