package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	managementName = "management"
	agentPort      = "7070"
	nicDeadline    = 60 * time.Second
)

var (
	managementMAC  = net.HardwareAddr{0x02, 0x53, 0x54, 0x45, 0x00, 0x02}
	hostMAC        = net.HardwareAddr{0x02, 0x53, 0x54, 0x45, 0x00, 0xfe}
	agentAddress   = netip.MustParsePrefix("fe80::2/64")
	hostAddress    = netip.MustParseAddr("fe80::1")
	errNoLinkFound = errors.New("no link has that address")
)

// listenOnManagement opens the agent's port in a network namespace that holds nothing but the management
// NIC, so that no firewall, container engine or `ip link` in the guest can cut it.
func listenOnManagement(folder string) (net.Listener, error) {
	root, err := openNetlink()
	if err != nil {
		return nil, err
	}
	defer root.close()
	type outcome struct {
		listener net.Listener
		err      error
	}
	done := make(chan outcome)
	go func() {
		runtime.LockOSThread() // never unlocked: a thread of that namespace must not start commands
		listener, err := listenInNamespace(root, folder)
		done <- outcome{listener, err}
	}()
	result := <-done
	return result.listener, result.err
}

func listenInNamespace(root *netlink, folder string) (net.Listener, error) {
	namespace, err := enterNamespace(folder)
	if err != nil {
		return nil, err
	}
	defer syscall.Close(namespace)
	inside, err := openNetlink()
	if err != nil {
		return nil, err
	}
	defer inside.close()
	nic, err := fetchLink(root, inside, namespace)
	if err != nil {
		return nil, err
	}
	if err := configureManagement(inside, nic); err != nil {
		return nil, err
	}
	return listenConfig.Listen(context.Background(), "tcp6", net.JoinHostPort(agentAddress.Addr().String()+"%"+managementName, agentPort))
}

// enterNamespace moves this thread into the namespace that an agent before us left, else into a new one.
func enterNamespace(folder string) (int, error) {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return -1, err
	}
	if err := os.Chmod(folder, 0o700); err != nil {
		return -1, err
	}
	mount := filepath.Join(folder, "netns")
	var system syscall.Statfs_t
	if syscall.Statfs(mount, &system) == nil && system.Type == unix.NSFS_MAGIC {
		fd, err := syscall.Open(mount, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
		if err != nil {
			return -1, fmt.Errorf("%s: %w", mount, err)
		}
		if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
			return -1, fmt.Errorf("enter %s: %w", mount, err)
		}
		return fd, nil
	}
	if err := syscall.Unshare(syscall.CLONE_NEWNET); err != nil {
		return -1, fmt.Errorf("new network namespace: %w", err)
	}
	file, err := os.OpenFile(mount, os.O_CREATE|os.O_RDONLY, 0o400)
	if err != nil {
		return -1, err
	}
	file.Close()
	const own = "/proc/thread-self/ns/net"
	if err := syscall.Mount(own, mount, "", syscall.MS_BIND, ""); err != nil {
		return -1, fmt.Errorf("keep the network namespace at %s: %w", mount, err)
	}
	fd, err := syscall.Open(own, syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("%s: %w", own, err)
	}
	return fd, nil
}

// fetchLink finds the NIC here, or where it appears once its driver is loaded, and moves it here.
func fetchLink(root, inside *netlink, namespace int) (*link, error) {
	deadline := time.Now().Add(nicDeadline)
	pause := 5 * time.Millisecond
	for {
		if nic, err := inside.findLink(managementMAC); nic != nil || err != nil {
			return nic, err
		}
		nic, err := root.findLink(managementMAC)
		if err != nil {
			return nil, err
		}
		if nic != nil {
			if err := root.moveLink(nic.index, namespace); err == nil {
				continue
			} else if time.Now().After(deadline) {
				return nil, fmt.Errorf("move %s into the management namespace: %w", nic.name, err)
			}
		} else if time.Now().After(deadline) {
			return nil, fmt.Errorf("management NIC %s: %w", managementMAC, errNoLinkFound)
		}
		time.Sleep(pause)
		pause = min(2*pause, 200*time.Millisecond)
	}
}

func configureManagement(inside *netlink, nic *link) error {
	links, err := inside.links()
	if err != nil {
		return err
	}
	for _, other := range links {
		if other.name == "lo" {
			if err := inside.changeLink(other.index, true, nil); err != nil {
				return fmt.Errorf("bring lo up: %w", err)
			}
		}
	}
	if nic.name != managementName {
		if err := inside.renameLink(nic.index, managementName); err != nil {
			return fmt.Errorf("rename %s: %w", nic.name, err)
		}
	}
	quietLink()
	if err := inside.changeLink(nic.index, true, nil); err != nil {
		return fmt.Errorf("bring %s up: %w", managementName, err)
	}
	if err := inside.addAddress(nic.index, agentAddress, unix.IFA_F_NODAD); err != nil {
		return fmt.Errorf("add %s: %w", agentAddress, err)
	}
	if err := inside.addNeighbour(nic.index, hostAddress, hostMAC); err != nil {
		return fmt.Errorf("neighbour %s: %w", hostAddress, err)
	}
	return nil
}

// quietLink stops what IPv6 does on its own: router solicitations and a second address made from the MAC.
func quietLink() {
	for name, value := range map[string]string{"accept_ra": "0", "autoconf": "0", "addr_gen_mode": "1", "accept_dad": "0"} {
		path := "/proc/sys/net/ipv6/conf/" + managementName + "/" + name
		if err := os.WriteFile(path, []byte(value), 0); err != nil {
			log.Printf("%v", err)
		}
	}
}
