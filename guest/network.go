package main

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
)

// network is the configuration of the VM's data NIC.
type network struct {
	MAC     string   `json:"mac"`
	Address string   `json:"address"`
	Gateway string   `json:"gateway"`
	DNS     []string `json:"dns"`
	MTU     uint32   `json:"mtu"`
}

func (n *network) check() error {
	if mac, err := net.ParseMAC(n.MAC); err != nil || len(mac) != 6 {
		return invalid("network.mac is not a MAC address")
	}
	for name, text := range map[string]string{"address": n.Address, "gateway": n.Gateway} {
		if address, err := netip.ParseAddr(text); err != nil || !address.Is4() {
			return invalid("network.%s is not an IPv4 address", name)
		}
	}
	for _, text := range n.DNS {
		if _, err := netip.ParseAddr(text); err != nil {
			return invalid("network.dns contains an invalid IP address")
		}
	}
	if n.MTU < 576 || n.MTU > 65535 {
		return invalid("network.mtu must be between 576 and 65535")
	}
	return nil
}

func (n *network) resolvers() string {
	var text strings.Builder
	for _, server := range n.DNS {
		text.WriteString("nameserver " + server + "\n")
	}
	return text.String()
}

// disableIPv6 keeps a NIC silent: the host drops IPv6, and router solicitations would only wake it up.
func disableIPv6(name string) error {
	path := "/proc/sys/net/ipv6/conf/" + name + "/disable_ipv6"
	content, err := os.ReadFile(path)
	if os.IsNotExist(err) || err == nil && strings.TrimSpace(string(content)) == "1" {
		return nil // a kernel without IPv6, or already done
	}
	if err == nil {
		err = os.WriteFile(path, []byte("1"), 0)
	}
	if err != nil {
		return fmt.Errorf("disable IPv6 on %s: %w", name, err)
	}
	return nil
}

// apply sets the NIC up in the root namespace and returns the address that the kernel then reports.
func (n *network) apply() (netip.Addr, error) {
	none := netip.Addr{}
	mac, err := net.ParseMAC(n.MAC)
	if err != nil {
		return none, err
	}
	address, err := netip.ParseAddr(n.Address)
	if err != nil {
		return none, err
	}
	gateway, err := netip.ParseAddr(n.Gateway)
	if err != nil {
		return none, err
	}
	wanted := netip.PrefixFrom(address, 32)
	kernel, err := openNetlink()
	if err != nil {
		return none, err
	}
	defer kernel.close()
	nic, err := kernel.findLink(mac)
	if err != nil {
		return none, err
	}
	if nic == nil {
		return none, fmt.Errorf("data NIC %s: %w", mac, errNoLinkFound)
	}
	present, err := kernel.addresses(nic.index)
	if err != nil {
		return none, err
	}
	has := false
	for _, old := range present {
		if has = has || old == wanted; old == wanted {
			continue
		}
		// With a primary address the kernel may have removed this one too.
		if err := kernel.removeAddress(nic.index, old); err != nil && err != syscall.EADDRNOTAVAIL {
			return none, fmt.Errorf("remove %s from %s: %w", old, nic.name, err)
		}
	}
	if err := disableIPv6(nic.name); err != nil {
		return none, err
	}
	if !nic.up || nic.mtu != n.MTU {
		if err := kernel.changeLink(nic.index, true, attribute32(nil, iflaMTU, n.MTU)); err != nil {
			return none, fmt.Errorf("bring %s up: %w", nic.name, err)
		}
	}
	if !has {
		if err := kernel.addAddress(nic.index, wanted, 0); err != nil {
			return none, fmt.Errorf("add %s to %s: %w", wanted, nic.name, err)
		}
	}
	if err := kernel.addRoute(nic.index, netip.PrefixFrom(gateway, 32), none); err != nil {
		return none, fmt.Errorf("route to %s: %w", gateway, err)
	}
	if err := kernel.addRoute(nic.index, netip.PrefixFrom(netip.IPv4Unspecified(), 0), gateway); err != nil {
		return none, fmt.Errorf("default route: %w", err)
	}
	if err := kernel.addNeighbour(nic.index, gateway, hostMAC); err != nil {
		return none, fmt.Errorf("neighbour %s: %w", gateway, err)
	}
	after, err := kernel.addresses(nic.index)
	if err != nil {
		return none, err
	}
	if len(after) != 1 || after[0] != wanted {
		return none, fmt.Errorf("%s has %v, not %s", nic.name, after, wanted)
	}
	return after[0].Addr(), nil
}
