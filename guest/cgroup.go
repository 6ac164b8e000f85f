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

// prepareCgroups puts commands into a cgroup beside the agent's own, so that a fork bomb or a memory hog
// among them leaves the agent able to answer. It returns an open folder for clone3.
func prepareCgroups() (int, error) {
	membership, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return -1, err
	}
	_, own, found := strings.Cut("\n"+string(membership), "\n0::")
	own, _, _ = strings.Cut(own, "\n")
	if !found || filepath.Base(own) != "agent" {
		return -1, fmt.Errorf("the agent is in cgroup %q, not in one named agent of its service", own)
	}
	agent := "/sys/fs/cgroup" + own
	service := filepath.Dir(agent)
	commands := filepath.Join(service, "exec")
	var problems []error
	for _, controller := range []string{"+cpu", "+memory", "+pids"} {
		problems = append(problems, os.WriteFile(service+"/cgroup.subtree_control", []byte(controller), 0))
	}
	if err := os.Mkdir(commands, 0o755); err != nil && !os.IsExist(err) {
		return -1, err
	}
	fd, err := syscall.Open(commands, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	return fd, errors.Join(append(problems, limitCgroups(service, agent, commands))...)
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
		{commands + "/pids.max", most * 60 / 100},
		{commands + "/memory.max", memory - max(64*mib, memory*6/100)},
		{agent + "/cpu.weight", 10000},
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
