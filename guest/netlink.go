package main

import (
	"encoding/binary"
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// netlink is a socket to the kernel's network configuration, of the namespace its thread was in when it was opened.
type netlink struct {
	fd       int
	sequence uint32
	buffer   []byte
}

type netlinkMessage struct {
	kind uint16
	data []byte
}

func openNetlink() (*netlink, error) {
	fd, err := syscall.Socket(syscall.AF_NETLINK, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, syscall.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	// Better an error than an identity that hangs: the host gives up on a guest that does not answer.
	limit := syscall.Timeval{Sec: 5}
	if err := syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &limit); err != nil {
		syscall.Close(fd)
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	return &netlink{fd: fd, buffer: make([]byte, 32<<10)}, nil
}

func (n *netlink) close() { syscall.Close(n.fd) }

// request sends one message and returns what came back; body is the fixed header of the kind, then attributes.
func (n *netlink) request(kind, flags uint16, body []byte) ([]netlinkMessage, error) {
	n.sequence++
	if flags&syscall.NLM_F_DUMP != syscall.NLM_F_DUMP { // it shares a bit with NLM_F_REPLACE
		flags |= syscall.NLM_F_ACK
	}
	packet := make([]byte, 0, syscall.NLMSG_HDRLEN+len(body))
	packet = binary.NativeEndian.AppendUint32(packet, uint32(syscall.NLMSG_HDRLEN+len(body)))
	packet = binary.NativeEndian.AppendUint16(packet, kind)
	packet = binary.NativeEndian.AppendUint16(packet, flags|syscall.NLM_F_REQUEST)
	packet = binary.NativeEndian.AppendUint32(packet, n.sequence)
	packet = binary.NativeEndian.AppendUint32(packet, 0)
	packet = append(packet, body...)
	if err := syscall.Sendto(n.fd, packet, 0, &syscall.SockaddrNetlink{Family: syscall.AF_NETLINK}); err != nil {
		return nil, err
	}
	var answers []netlinkMessage
	for {
		size, _, err := syscall.Recvfrom(n.fd, n.buffer, 0)
		if err == syscall.EINTR {
			continue
		}
		if err == syscall.EAGAIN {
			return nil, fmt.Errorf("netlink request timed out: %w", syscall.ETIMEDOUT)
		}
		if err != nil {
			return nil, err
		}
		messages, err := parseNetlink(n.buffer[:size])
		if err != nil {
			return nil, err
		}
		for _, message := range messages {
			if message.Header.Seq != n.sequence {
				continue
			}
			switch message.Header.Type {
			case syscall.NLMSG_DONE:
				return answers, nil
			case syscall.NLMSG_ERROR:
				if number := int32(binary.NativeEndian.Uint32(message.Data)); number != 0 {
					return nil, syscall.Errno(-number)
				}
				return answers, nil
			}
			answers = append(answers, netlinkMessage{message.Header.Type, append([]byte(nil), message.Data...)})
		}
	}
}

func parseNetlink(packet []byte) ([]syscall.NetlinkMessage, error) {
	messages, err := syscall.ParseNetlinkMessage(packet)
	if err != nil {
		return nil, fmt.Errorf("netlink answer of %d bytes: %w", len(packet), err)
	}
	for _, message := range messages {
		if message.Header.Type == syscall.NLMSG_ERROR && len(message.Data) < 4 {
			return nil, fmt.Errorf("truncated netlink answer")
		}
	}
	return messages, nil
}

// attribute appends a type, its length and its value, padded.
func attribute(to []byte, kind uint16, value []byte) []byte {
	to = binary.NativeEndian.AppendUint16(to, uint16(unix.NLA_HDRLEN+len(value)))
	to = binary.NativeEndian.AppendUint16(to, kind)
	to = append(to, value...)
	for len(to)%unix.NLA_ALIGNTO != 0 {
		to = append(to, 0)
	}
	return to
}

func attribute32(to []byte, kind uint16, value uint32) []byte {
	return attribute(to, kind, binary.NativeEndian.AppendUint32(nil, value))
}

// attributes reads those that follow a fixed header of the given size.
func attributes(data []byte, header int) map[uint16][]byte {
	found := map[uint16][]byte{}
	for header+unix.NLA_HDRLEN <= len(data) {
		rest := data[header:]
		size := int(binary.NativeEndian.Uint16(rest))
		if size < unix.NLA_HDRLEN || size > len(rest) {
			break
		}
		kind := binary.NativeEndian.Uint16(rest[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
		found[kind] = rest[unix.NLA_HDRLEN:size]
		header += (size + unix.NLA_ALIGNTO - 1) &^ (unix.NLA_ALIGNTO - 1)
	}
	return found
}

// bytesOf is a kernel structure as it lies in memory.
func bytesOf[T any](value *T) []byte {
	return append([]byte(nil), unsafe.Slice((*byte)(unsafe.Pointer(value)), unsafe.Sizeof(*value))...)
}
