package main

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	controlC  = 0x03
	endOfFile = 0x04
)

// openPty makes a pseudo-terminal. The master does not block; the slave is the user's, as a login makes it.
func openPty(cols, rows int, owner *user) (master, slave int, err error) {
	master, err = syscall.Open("/dev/ptmx", syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0)
	if err != nil {
		return -1, -1, fmt.Errorf("open /dev/ptmx: %w", err)
	}
	defer func() {
		if err != nil {
			syscall.Close(master)
		}
	}()
	if err = unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return -1, -1, fmt.Errorf("unlock the terminal: %w", err)
	}
	if slave, err = openSlave(master, 0); err != nil {
		return -1, -1, fmt.Errorf("open the terminal: %w", err)
	}
	if modes, err := unix.IoctlGetTermios(slave, unix.TCGETS); err == nil {
		modes.Iflag |= unix.IUTF8 // so that erasing a character erases all of its bytes
		unix.IoctlSetTermios(slave, unix.TCSETS, modes)
	}
	setWindowSize(master, cols, rows)
	if owner != nil {
		if err = syscall.Fchown(slave, int(owner.uid), -1); err != nil {
			syscall.Close(slave)
			return -1, -1, fmt.Errorf("give the terminal to %s: %w", owner.name, err)
		}
	}
	return master, slave, nil
}

func openSlave(master, flags int) (slave int, err error) {
	flags |= syscall.O_RDWR | syscall.O_NOCTTY | syscall.O_CLOEXEC
	fd, _, number := syscall.Syscall(syscall.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, uintptr(flags))
	if number != 0 {
		return -1, number
	}
	return int(fd), nil
}

// setWindowSize tells the programs of the terminal with SIGWINCH.
func setWindowSize(master, cols, rows int) error {
	return unix.IoctlSetWinsize(master, unix.TIOCSWINSZ, &unix.Winsize{Row: uint16(rows), Col: uint16(cols)})
}

// interruptUnread does what the line discipline does at Control-C, if the programs of the terminal have left input
// unread: it discards that input, unless the terminal is set to keep it, and signals them. With its buffer full, the line
// discipline would not see the character. False if all is read, or if Control-C is a character like others.
func interruptUnread(master int, discardMore func()) bool {
	slave, err := openSlave(master, syscall.O_NONBLOCK)
	if err != nil {
		return false
	}
	defer syscall.Close(slave)
	modes, err := unix.IoctlGetTermios(slave, unix.TCGETS)
	if err != nil {
		return false
	}
	// Of complete lines, or of all characters if the terminal does not gather lines.
	unread, err := unix.IoctlGetInt(slave, unix.TIOCINQ)
	if err != nil || unread == 0 || modes.Lflag&syscall.ISIG == 0 || modes.Cc[syscall.VINTR] != controlC {
		return false
	}
	if modes.Lflag&syscall.NOFLSH == 0 {
		discardMore() // before there is room for it
		unix.IoctlSetInt(slave, unix.TCFLSH, unix.TCIFLUSH)
	}
	return signalForeground(master, syscall.SIGINT)
}

// signalForeground signals the programs in the foreground of a terminal.
func signalForeground(master int, number syscall.Signal) bool {
	return unix.IoctlSetInt(master, unix.TIOCSIG, int(number)) == nil
}

// nonblocking reads or writes a descriptor in non-blocking mode with a raw system call. For other calls the runtime wakes
// its monitor thread, which then sleeps 20 µs at a time and moves the goroutine's processor to another thread: that
// costs more than the call itself.
func nonblocking(call uintptr, fd int, data []byte) (int, error) {
	for {
		n, _, number := syscall.RawSyscall(call, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(data))), uintptr(len(data)))
		switch number {
		case 0:
			return int(n), nil
		case syscall.EINTR:
		default:
			return -1, number
		}
	}
}

// attemptWrite writes what can be written without waiting.
func attemptWrite(conn syscall.RawConn, data []byte) (written int, err error) {
	unusable := conn.Write(func(fd uintptr) bool {
		written, err = nonblocking(syscall.SYS_WRITE, int(fd), data)
		return true
	})
	if unusable != nil {
		return 0, unusable
	}
	if err == syscall.EAGAIN {
		err = nil
	}
	return max(written, 0), err
}

// writeWhile waits until something can be written, and writes it if that is still wanted then.
func writeWhile(conn syscall.RawConn, data []byte, isWanted func() bool) (written int, err error) {
	unusable := conn.Write(func(fd uintptr) bool {
		if !isWanted() {
			return true
		}
		written, err = nonblocking(syscall.SYS_WRITE, int(fd), data)
		return err != syscall.EAGAIN
	})
	if unusable != nil && !errors.Is(unusable, os.ErrDeadlineExceeded) {
		return 0, unusable
	}
	if err == syscall.EAGAIN {
		err = nil
	}
	return max(written, 0), err
}

// hungUp reports whether the other end of a connection has closed it, even with data unread before the end.
func hungUp(conn syscall.RawConn) bool {
	poll := []unix.PollFd{{Events: unix.POLLRDHUP}}
	err := conn.Control(func(fd uintptr) {
		poll[0].Fd = int32(fd)
		unix.Poll(poll, 0)
	})
	return err != nil || poll[0].Revents != 0
}
