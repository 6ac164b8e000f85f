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

func readNetwork(in *jsonReader) *network {
	if in.word("null") {
		return nil
	}
	n := &network{}
	n.readFrom(in)
	return n
}

func (n *network) readFrom(in *jsonReader) {
	in.object(func(name string) {
		switch name {
		case "mac":
			n.MAC = in.text()
		case "address":
			n.Address = in.text()
		case "gateway":
			n.Gateway = in.text()
		case "dns":
			n.DNS = in.texts()
		case "mtu":
			mtu := in.integer()
			if n.MTU = uint32(mtu); int64(n.MTU) != mtu {
				in.fail()
			}
		default:
			in.skip()
		}
	})
}

func (n *network) appendTo(to []byte) []byte {
	to = appendMember(append(to, '{'), "mac", n.MAC)
	to = appendMember(to, "address", n.Address)
	to = appendMember(to, "gateway", n.Gateway)
	to = append(appendName(to, "dns"), '[')
	for i, server := range n.DNS {
		if i > 0 {
			to = append(to, ',')
		}
		to = appendText(to, server)
	}
	return append(appendInteger(append(to, ']'), "mtu", int64(n.MTU)), '}')
}

func (n *network) check() error {
	if mac, err := net.ParseMAC(n.MAC); err != nil || len(mac) != 6 {
		return invalid("network.mac is not a MAC address")
	}
	if address, err := netip.ParseAddr(n.Address); err != nil || !address.Is4() {
		return invalid("network.address is not an IPv4 address")
	}
	if gateway, err := netip.ParseAddr(n.Gateway); err != nil || !gateway.Is4() {
		return invalid("network.gateway is not an IPv4 address")
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

// elsewhere is an address that no network has (TEST-NET-2): the route to it is the default route.
var elsewhere = netip.AddrFrom4([4]byte{198, 51, 100, 1})

// disableIPv6 keeps a NIC silent: the host drops IPv6, and router solicitations would only wake it up.
func disableIPv6(name string) error {
	path := "/proc/sys/net/ipv6/conf/" + name + "/disable_ipv6"
	content, err := readFile(path)
	if os.IsNotExist(err) || err == nil && strings.TrimSpace(content) == "1" {
		return nil // a kernel without IPv6, or already done
	}
	if err == nil {
		err = writeFile(path, "1", 0, 0)
	}
	if err != nil {
		return fmt.Errorf("disable IPv6 on %s: %w", name, err)
	}
	return nil
}

// readyNIC is a NIC that was set up before: in a template it has everything but an address, in a machine that was
// given an identity it has that address too. A copy then has less to do.
type readyNIC struct {
	index   int32
	network network
	address netip.Prefix // not valid in a template
}

func (r *readyNIC) fits(n *network) bool {
	return r != nil && r.network.MAC == n.MAC && r.network.Gateway == n.Gateway && r.network.MTU == n.MTU
}

// apply sets the NIC up in the root namespace, as it was left by an earlier call if it still is as that left it, and
// returns it with the address that the kernel then reports.
func (n *network) apply(kernel *netlink, ready *readyNIC) (*readyNIC, error) {
	address, err := netip.ParseAddr(n.Address)
	if err != nil {
		return nil, err
	}
	wanted := netip.PrefixFrom(address, 32)
	if ready.fits(n) && n.move(kernel, ready, wanted) {
		return &readyNIC{ready.index, *n, wanted}, nil
	}
	nic, err := n.connect(kernel, &wanted)
	if err != nil {
		return nil, err
	}
	after, err := kernel.addresses(nic.index)
	if err != nil {
		return nil, err
	}
	if len(after) != 1 || after[0] != wanted {
		return nil, fmt.Errorf("%s has %v, not %s", nic.name, after, wanted)
	}
	return &readyNIC{nic.index, *n, wanted}, nil
}

// move changes nothing but the address, and reports whether the NIC then is as it has to be. The new address comes
// before the old one goes: with its last address a NIC would lose its routes.
func (n *network) move(kernel *netlink, ready *readyNIC, wanted netip.Prefix) bool {
	if ready.address != wanted {
		if kernel.addAddress(ready.index, wanted, 0) != nil {
			return false
		}
		if ready.address.IsValid() && kernel.removeAddress(ready.index, ready.address) != nil {
			return false
		}
	}
	after, err := kernel.addresses(ready.index)
	if err != nil || len(after) != 1 || after[0] != wanted {
		return false
	}
	// In a template no program but the agent touches the NIC; in a machine any may have.
	if !ready.address.IsValid() {
		return true
	}
	index, gateway, err := kernel.routeTo(elsewhere)
	return err == nil && index == ready.index && gateway.String() == n.Gateway
}

// connect brings the NIC up with its routes, and with wanted as its only address if one is given.
func (n *network) connect(kernel *netlink, wanted *netip.Prefix) (*link, error) {
	mac, err := net.ParseMAC(n.MAC)
	if err != nil {
		return nil, err
	}
	gateway, err := netip.ParseAddr(n.Gateway)
	if err != nil {
		return nil, err
	}
	nic, err := kernel.findLink(mac)
	if err != nil {
		return nil, err
	}
	if nic == nil {
		return nil, fmt.Errorf("data NIC %s: %w", mac, errNoLinkFound)
	}
	present, err := kernel.addresses(nic.index)
	if err != nil {
		return nil, err
	}
	has := wanted == nil
	for _, old := range present {
		if wanted != nil && old == *wanted {
			has = true
			continue
		}
		// With a primary address the kernel may have removed this one too.
		if err := kernel.removeAddress(nic.index, old); err != nil && err != syscall.EADDRNOTAVAIL {
			return nil, fmt.Errorf("remove %s from %s: %w", old, nic.name, err)
		}
	}
	if err := disableIPv6(nic.name); err != nil {
		return nil, err
	}
	if !nic.up || nic.mtu != n.MTU {
		if err := kernel.changeLink(nic.index, true, attribute32(nil, syscall.IFLA_MTU, n.MTU)); err != nil {
			return nil, fmt.Errorf("bring %s up: %w", nic.name, err)
		}
	}
	if !has {
		if err := kernel.addAddress(nic.index, *wanted, 0); err != nil {
			return nil, fmt.Errorf("add %s to %s: %w", *wanted, nic.name, err)
		}
	}
	if err := kernel.addRoute(nic.index, netip.PrefixFrom(gateway, 32), netip.Addr{}); err != nil {
		return nil, fmt.Errorf("route to %s: %w", gateway, err)
	}
	if err := kernel.addRoute(nic.index, netip.PrefixFrom(netip.IPv4Unspecified(), 0), gateway); err != nil {
		return nil, fmt.Errorf("default route: %w", err)
	}
	if err := kernel.addNeighbour(nic.index, gateway, hostMAC); err != nil {
		return nil, fmt.Errorf("neighbour %s: %w", gateway, err)
	}
	return nic, nil
}
