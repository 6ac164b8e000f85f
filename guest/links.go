package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

type link struct {
	index int32
	name  string
	mac   net.HardwareAddr
	mtu   uint32
	up    bool
}

func (n *netlink) links() ([]link, error) {
	answers, err := n.request(syscall.RTM_GETLINK, syscall.NLM_F_DUMP, bytesOf(&syscall.IfInfomsg{}))
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	var links []link
	for _, answer := range answers {
		if answer.kind != syscall.RTM_NEWLINK || len(answer.data) < syscall.SizeofIfInfomsg {
			continue
		}
		found := attributes(answer.data, syscall.SizeofIfInfomsg)
		one := link{
			index: int32(binary.NativeEndian.Uint32(answer.data[4:])),
			up:    binary.NativeEndian.Uint32(answer.data[8:])&syscall.IFF_UP != 0,
			name:  string(bytes.TrimRight(found[syscall.IFLA_IFNAME], "\x00")),
			mac:   net.HardwareAddr(found[syscall.IFLA_ADDRESS]),
		}
		if mtu := found[syscall.IFLA_MTU]; len(mtu) == 4 {
			one.mtu = binary.NativeEndian.Uint32(mtu)
		}
		links = append(links, one)
	}
	return links, nil
}

// findLink returns nil when no link has the address.
func (n *netlink) findLink(mac net.HardwareAddr) (*link, error) {
	links, err := n.links()
	if err != nil {
		return nil, err
	}
	for i := range links {
		if bytes.Equal(links[i].mac, mac) {
			return &links[i], nil
		}
	}
	return nil, nil
}

// changeLink applies attributes and, with up, brings the link up.
func (n *netlink) changeLink(index int32, up bool, values []byte) error {
	header := syscall.IfInfomsg{Index: index}
	if up {
		header.Flags, header.Change = syscall.IFF_UP, syscall.IFF_UP
	}
	_, err := n.request(syscall.RTM_NEWLINK, 0, append(bytesOf(&header), values...))
	return err
}

func (n *netlink) moveLink(index int32, namespace int) error {
	return n.changeLink(index, false, attribute32(nil, unix.IFLA_NET_NS_FD, uint32(namespace)))
}

func (n *netlink) renameLink(index int32, name string) error {
	return n.changeLink(index, false, attribute(nil, syscall.IFLA_IFNAME, append([]byte(name), 0)))
}

func family(address netip.Addr) uint8 {
	if address.Is4() {
		return syscall.AF_INET
	}
	return syscall.AF_INET6
}

// addresses lists the IPv4 addresses of a link.
func (n *netlink) addresses(index int32) ([]netip.Prefix, error) {
	answers, err := n.request(syscall.RTM_GETADDR, syscall.NLM_F_DUMP, bytesOf(&syscall.IfAddrmsg{Family: syscall.AF_INET}))
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	var prefixes []netip.Prefix
	for _, answer := range answers {
		if answer.kind != syscall.RTM_NEWADDR || len(answer.data) < syscall.SizeofIfAddrmsg {
			continue
		}
		if int32(binary.NativeEndian.Uint32(answer.data[4:])) != index || answer.data[0] != syscall.AF_INET {
			continue
		}
		if address, ok := netip.AddrFromSlice(attributes(answer.data, syscall.SizeofIfAddrmsg)[syscall.IFA_LOCAL]); ok {
			prefixes = append(prefixes, netip.PrefixFrom(address, int(answer.data[1])))
		}
	}
	return prefixes, nil
}

func (n *netlink) addAddress(index int32, prefix netip.Prefix, flags uint32) error {
	body := addressMessage(index, prefix)
	if flags != 0 {
		body = attribute32(body, unix.IFA_FLAGS, flags)
	}
	_, err := n.request(syscall.RTM_NEWADDR, syscall.NLM_F_CREATE|syscall.NLM_F_REPLACE, body)
	return err
}

func (n *netlink) removeAddress(index int32, prefix netip.Prefix) error {
	_, err := n.request(syscall.RTM_DELADDR, 0, addressMessage(index, prefix))
	return err
}

func addressMessage(index int32, prefix netip.Prefix) []byte {
	address := prefix.Addr()
	body := bytesOf(&syscall.IfAddrmsg{Family: family(address), Prefixlen: uint8(prefix.Bits()), Index: uint32(index)})
	body = attribute(body, syscall.IFA_LOCAL, address.AsSlice())
	return attribute(body, syscall.IFA_ADDRESS, address.AsSlice())
}

// addRoute makes or replaces a route; without a gateway the destination is on the link itself.
func (n *netlink) addRoute(index int32, destination netip.Prefix, gateway netip.Addr) error {
	message := syscall.RtMsg{
		Family: family(destination.Addr()), Dst_len: uint8(destination.Bits()), Table: syscall.RT_TABLE_MAIN,
		Protocol: syscall.RTPROT_BOOT, Scope: syscall.RT_SCOPE_LINK, Type: syscall.RTN_UNICAST,
	}
	if gateway.IsValid() {
		message.Scope, message.Flags = syscall.RT_SCOPE_UNIVERSE, unix.RTNH_F_ONLINK
	}
	body := bytesOf(&message)
	if destination.Bits() > 0 {
		body = attribute(body, syscall.RTA_DST, destination.Addr().AsSlice())
	}
	if gateway.IsValid() {
		body = attribute(body, syscall.RTA_GATEWAY, gateway.AsSlice())
	}
	body = attribute32(body, syscall.RTA_OIF, uint32(index))
	_, err := n.request(syscall.RTM_NEWROUTE, syscall.NLM_F_CREATE|syscall.NLM_F_REPLACE, body)
	return err
}

// routeTo returns the link and the gateway by which the kernel would send to an IPv4 address.
func (n *netlink) routeTo(destination netip.Addr) (index int32, gateway netip.Addr, err error) {
	body := bytesOf(&syscall.RtMsg{Family: syscall.AF_INET, Dst_len: 32})
	answers, err := n.request(syscall.RTM_GETROUTE, 0, attribute(body, syscall.RTA_DST, destination.AsSlice()))
	if err != nil {
		return 0, gateway, err
	}
	for _, answer := range answers {
		if answer.kind != syscall.RTM_NEWROUTE || len(answer.data) < syscall.SizeofRtMsg {
			continue
		}
		found := attributes(answer.data, syscall.SizeofRtMsg)
		if link := found[syscall.RTA_OIF]; len(link) == 4 {
			index = int32(binary.NativeEndian.Uint32(link))
		}
		gateway, _ = netip.AddrFromSlice(found[syscall.RTA_GATEWAY])
	}
	return index, gateway, nil
}

// addNeighbour makes a permanent entry, so that nothing has to be asked or answered on the link.
func (n *netlink) addNeighbour(index int32, address netip.Addr, mac net.HardwareAddr) error {
	body := bytesOf(&unix.NdMsg{Family: family(address), Ifindex: index, State: unix.NUD_PERMANENT})
	body = attribute(body, unix.NDA_DST, address.AsSlice())
	body = attribute(body, unix.NDA_LLADDR, mac)
	_, err := n.request(unix.RTM_NEWNEIGH, syscall.NLM_F_CREATE|syscall.NLM_F_REPLACE, body)
	return err
}
