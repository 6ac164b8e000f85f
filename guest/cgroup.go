package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

const mib = 1 << 20

// cgroups are where commands live, beside the agent's own, so that a fork bomb or a memory hog among them leaves
// the agent able to answer. They are two and each command is started in the emptier one: beside a fork bomb it
// finds processes and processor time left to end it.
type cgroups [2]cgroup

type cgroup struct {
	folder int // open for clone3
	tasks  *os.File
}

func (g *cgroups) choose() int {
	if g[1].count() < g[0].count() {
		return g[1].folder
	}
	return g[0].folder
}

func (g *cgroup) count() int64 {
	var text [24]byte
	n, _ := g.tasks.ReadAt(text[:], 0)
	count, _ := strconv.ParseInt(strings.TrimSpace(string(text[:n])), 10, 64)
	return count
}

func openCgroup(path string) (group cgroup, err error) {
	if err = os.Mkdir(path, 0o755); err != nil && !os.IsExist(err) {
		return group, err
	}
	if group.folder, err = syscall.Open(path, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0); err != nil {
		return group, err
	}
	group.tasks, err = os.Open(path + "/pids.current")
	return group, err
}

// prepareCgroups makes the groups and their limits. With a limit missing, the groups are of use still.
func prepareCgroups() (*cgroups, error) {
	membership, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	_, own, found := strings.Cut("\n"+string(membership), "\n0::")
	own, _, _ = strings.Cut(own, "\n")
	if !found || filepath.Base(own) != "agent" {
		return nil, fmt.Errorf("agent runs in cgroup %q, expected one named agent", own)
	}
	agent := "/sys/fs/cgroup" + own
	service := filepath.Dir(agent)
	commands := filepath.Join(service, "exec")
	if err := os.Mkdir(commands, 0o755); err != nil && !os.IsExist(err) {
		return nil, err
	}
	var problems []error
	for _, control := range []struct{ folder, controller string }{
		{service, "+cpu"}, {service, "+memory"}, {service, "+pids"}, {commands, "+cpu"}, {commands, "+pids"},
	} {
		problems = append(problems, os.WriteFile(control.folder+"/cgroup.subtree_control", []byte(control.controller), 0))
	}
	groups := &cgroups{}
	for i, name := range []string{"/first", "/second"} {
		if groups[i], err = openCgroup(commands + name); err != nil {
			return nil, errors.Join(append(problems, err)...)
		}
	}
	return groups, errors.Join(append(problems, limitCgroups(service, agent, commands))...)
}

func limitCgroups(service, agent, commands string) error {
	threads, err := os.ReadFile("/proc/sys/kernel/threads-max")
	if err != nil {
		return err
	}
	most, err := strconv.ParseInt(string(bytes.TrimSpace(threads)), 10, 64)
	if err != nil {
		return err
	}
	memory, err := memTotal()
	if err != nil {
		return err
	}
	var problems []error
	for _, limit := range []struct {
		file  string
		value int64
	}{
		// The kernel's own limit would let bare processes fill the memory.
		{commands + "/first/pids.max", most / 4},
		{commands + "/second/pids.max", most / 4},
		{commands + "/memory.max", memory - max(64*mib, memory*6/100)},
		{service + "/memory.min", 48 * mib},
		{agent + "/memory.min", 48 * mib},
	} {
		problems = append(problems, os.WriteFile(limit.file, strconv.AppendInt(nil, limit.value, 10), 0))
	}
	return errors.Join(problems...)
}

func memTotal() (int64, error) {
	info, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	var kib int64
	if _, err := fmt.Sscanf(string(info), "MemTotal: %d kB", &kib); err != nil {
		return 0, fmt.Errorf("/proc/meminfo: %w", err)
	}
	return kib << 10, nil
}
