package main

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// user is whom a request acts as; nil is root.
type user struct {
	uid, gid          uint32
	groups            []uint32
	name, home, shell string
}

// accounts is /etc/passwd, /etc/group and the environment files, each parsed again only when it changed.
type accounts struct {
	root string

	mu      sync.Mutex
	passwd  fileVersion
	group   fileVersion
	users   map[string]*user
	byUID   map[uint32]string
	groups  map[string]uint32
	byGID   map[uint32]string
	members map[string][]uint32

	environmentVersions [len(environmentFiles)]fileVersion
	variables           []variable
}

type fileVersion struct {
	inode     uint64
	size      int64
	mtime     syscall.Timespec
	wasMissed bool
}

func versionOf(path string) fileVersion {
	var stat syscall.Stat_t
	if syscall.Stat(path, &stat) != nil {
		return fileVersion{wasMissed: true}
	}
	return fileVersion{inode: stat.Ino, size: stat.Size, mtime: stat.Mtim}
}

// find resolves a name or a numeric uid; nil stands for root, which needs no change of credentials.
func (a *accounts) find(name string) (*user, error) {
	if name == "" || name == "root" || name == "0" {
		return nil, nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refresh()
	found, asked := a.users[name], name
	if found == nil {
		if uid, err := strconv.ParseUint(name, 10, 32); err == nil {
			name = a.byUID[uint32(uid)]
			found = a.users[name]
		}
	}
	if found == nil {
		return nil, fail("user_not_found", "user %s does not exist in the VM", printable(asked))
	}
	if found.uid == 0 {
		return nil, nil
	}
	if found.groups == nil {
		found.groups = []uint32{found.gid}
		for _, gid := range a.members[name] {
			if !slices.Contains(found.groups, gid) {
				found.groups = append(found.groups, gid)
			}
		}
	}
	return found, nil
}

// uid resolves the owner of a new file; unlike a user to act as, a bare number is always fine.
func (a *accounts) uid(name string) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refresh()
	if found := a.users[name]; found != nil {
		return int(found.uid), nil
	}
	if uid, err := strconv.ParseUint(name, 10, 31); err == nil {
		return int(uid), nil
	}
	return 0, fail("user_not_found", "user %s does not exist in the VM", printable(name))
}

func (a *accounts) gid(name string) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refresh()
	if gid, known := a.groups[name]; known {
		return int(gid), nil
	}
	if gid, err := strconv.ParseUint(name, 10, 31); err == nil {
		return int(gid), nil
	}
	return 0, fail("user_not_found", "group %s does not exist in the VM", printable(name))
}

// names gives a function that turns ids into names, or into decimal numbers where there is none.
func (a *accounts) names() func(uid, gid uint32) (string, string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refresh()
	byUID, byGID := a.byUID, a.byGID
	return func(uid, gid uint32) (string, string) {
		owner, known := byUID[uid]
		if !known {
			owner = strconv.FormatUint(uint64(uid), 10)
		}
		group, known := byGID[gid]
		if !known {
			group = strconv.FormatUint(uint64(gid), 10)
		}
		return owner, group
	}
}

func (a *accounts) refresh() {
	a.readEnvironments()
	passwd, group := versionOf(a.root+"/etc/passwd"), versionOf(a.root+"/etc/group")
	if a.users != nil && passwd == a.passwd && group == a.group {
		return
	}
	// New maps each time: names() hands the old ones out.
	a.passwd, a.group = passwd, group
	a.users, a.byUID = map[string]*user{}, map[uint32]string{}
	a.groups, a.byGID, a.members = map[string]uint32{}, map[uint32]string{}, map[string][]uint32{}
	eachLine(a.root+"/etc/passwd", func(fields []string) {
		if len(fields) < 4 || fields[0] == "" {
			return
		}
		uid, err := strconv.ParseUint(fields[2], 10, 32)
		gid, err2 := strconv.ParseUint(fields[3], 10, 32)
		if err != nil || err2 != nil || a.users[fields[0]] != nil {
			return
		}
		found := &user{uid: uint32(uid), gid: uint32(gid), name: fields[0], home: "/", shell: "/bin/sh"}
		if len(fields) > 5 && fields[5] != "" {
			found.home = fields[5]
		}
		if len(fields) > 6 && fields[6] != "" {
			found.shell = fields[6]
		}
		a.users[fields[0]] = found
		if _, taken := a.byUID[uint32(uid)]; !taken {
			a.byUID[uint32(uid)] = fields[0]
		}
	})
	eachLine(a.root+"/etc/group", func(fields []string) {
		if len(fields) < 4 || fields[0] == "" {
			return
		}
		gid, err := strconv.ParseUint(fields[2], 10, 32)
		if err != nil {
			return
		}
		a.groups[fields[0]] = uint32(gid)
		if _, taken := a.byGID[uint32(gid)]; !taken {
			a.byGID[uint32(gid)] = fields[0]
		}
		for _, member := range strings.Split(fields[3], ",") {
			if member != "" {
				a.members[member] = append(a.members[member], uint32(gid))
			}
		}
	})
}

func eachLine(path string, use func(fields []string)) {
	file, err := os.Open(path)
	if err != nil {
		return
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		use(strings.Split(lines.Text(), ":"))
	}
}

// do runs a file operation with the user's rights. File access is checked by the kernel against the calling
// thread, so the operation gets a thread of its own, which ends with it.
func (u *user) do(operation func() error) error {
	if u == nil {
		return operation()
	}
	type outcome struct {
		err      error
		panicked any
	}
	done := make(chan outcome, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the runtime then ends the thread with the goroutine
		var result outcome
		defer func() {
			result.panicked = recover()
			done <- result
		}()
		if result.err = u.become(); result.err == nil {
			result.err = operation()
		}
	}()
	result := <-done
	if result.panicked != nil {
		panic(result.panicked)
	}
	return result.err
}

// canEnter reports why a folder cannot be the user's working directory.
func (u *user) canEnter(folder string) error {
	return u.do(func() error {
		fd, err := syscall.Open(folder+"/.", syscall.O_RDONLY|unix.O_PATH|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
		if err == nil {
			syscall.Close(fd)
		}
		return err
	})
}

// become changes the rights of this thread only. setgroups is called by its number because the syscall package's
// wrapper changes all threads, and the one of unix does not promise otherwise.
func (u *user) become() error {
	if _, _, err := syscall.RawSyscall(syscall.SYS_SETGROUPS, uintptr(len(u.groups)), uintptr(unsafe.Pointer(&u.groups[0])), 0); err != 0 {
		return fmt.Errorf("setgroups: %w", err)
	}
	// setfsgid and setfsuid report no failure; asking again with an invalid id returns the current one.
	unix.Setfsgid(int(u.gid))
	if now, _ := unix.SetfsgidRetGid(-1); uint32(now) != u.gid {
		return fmt.Errorf("setfsgid: still %d", now)
	}
	unix.Setfsuid(int(u.uid))
	if now, _ := unix.SetfsuidRetUid(-1); uint32(now) != u.uid {
		return fmt.Errorf("setfsuid: still %d", now)
	}
	// setfsuid drops only the file capabilities; CAP_SYS_RESOURCE alone would let a user eat the reserved blocks.
	var none [2]unix.CapUserData // version 3 has two
	if err := unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &none[0]); err != nil {
		return fmt.Errorf("capset: %w", err)
	}
	return nil
}
