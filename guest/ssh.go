package main

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

const (
	// /usr/local/bin/fetch-ssh-keys prints it to sshd. It is memory: a boot forgets it.
	gatewayKey     = "/run/stead/ssh-gateway-key"
	maxHostKeys    = 8
	maxKeyBytes    = 16 << 10
	maxGatewayLine = 4 << 10
)

// sshRequest is about the SSH gateway of the host, which logs in to this machine by a key of its own.
type sshRequest struct {
	Machine  string            `json:"machine"`
	Key      string            `json:"authorized_key"`
	HostKeys map[string]string `json:"host_keys"` // for a machine that has none
}

type sshAnswer struct {
	HostKeys map[string]string `json:"host_keys"`
}

func (i *identity) handleSSH(w http.ResponseWriter, r *http.Request) {
	var request sshRequest
	err := readJSON(w, r, &request)
	if err == nil {
		err = request.check()
	}
	var answer *sshAnswer
	if err == nil {
		answer, err = i.admitGateway(&request)
	}
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, answer)
}

// admitGateway has sshd accept the gateway's key, and only this one, and tells the host keys that sshd shows.
func (i *identity) admitGateway(request *sshRequest) (*sshAnswer, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if machine := i.machineID(); request.Machine != machine {
		return nil, invalid("this is machine %s, not %s", printable(machine), printable(request.Machine))
	}
	keys, err := i.publicHostKeys()
	if err == nil && len(keys) == 0 && len(request.HostKeys) > 0 {
		for name, content := range request.HostKeys {
			mode := uint32(0o600)
			if strings.HasSuffix(name, ".pub") {
				mode = 0o644
			}
			if _, err := replaceFile(i.root+"/etc/ssh/"+name, content, mode); err != nil {
				return nil, err
			}
		}
		keys, err = i.publicHostKeys()
	}
	if err != nil {
		return nil, err
	}
	i.gateway = true
	if _, err := replaceFile(i.root+gatewayKey, request.Key+"\n", 0o600); err != nil {
		return nil, err
	}
	return &sshAnswer{keys}, nil
}

func isThere(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// forgetGateway makes a copy of a machine refuse the gateway's key for the original.
func (i *identity) forgetGateway() error {
	if !i.gateway {
		return nil
	}
	if err := os.Remove(i.root + gatewayKey); err != nil && !os.IsNotExist(err) {
		return err
	}
	i.gateway = false
	return nil
}

// publicHostKeys are those whose private key is there too, by the name of their file.
func (i *identity) publicHostKeys() (map[string]string, error) {
	found, err := filepath.Glob(i.root + "/etc/ssh/ssh_host_*_key.pub")
	if err != nil {
		return nil, err
	}
	keys := map[string]string{}
	for _, path := range found {
		if _, err := os.Lstat(strings.TrimSuffix(path, ".pub")); err != nil || len(keys) == maxHostKeys {
			continue
		}
		content, err := readKey(path)
		if err != nil {
			return nil, err
		}
		keys[filepath.Base(path)] = content
	}
	return keys, nil
}

// readKey does not wait for a writer, which the reader of a FIFO does.
func readKey(path string) (string, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer file.Close()
	if info, err := file.Stat(); err != nil || !info.Mode().IsRegular() || info.Size() > maxKeyBytes {
		return "", invalid("%s is not a key file", printable(path))
	}
	content, err := io.ReadAll(io.LimitReader(file, maxKeyBytes))
	return string(content), err
}

func (r *sshRequest) check() error {
	if r.Key == "" || len(r.Key) > maxGatewayLine || strings.ContainsFunc(r.Key, func(c rune) bool { return c < ' ' || c > '~' }) {
		return invalid("authorized_key must be one line of at most %d bytes", maxGatewayLine)
	}
	for name, content := range r.HostKeys {
		kind, found := strings.CutPrefix(strings.TrimSuffix(name, ".pub"), "ssh_host_")
		kind, isKey := strings.CutSuffix(kind, "_key")
		if !found || !isKey || kind == "" || strings.Trim(kind, "abcdefghijklmnopqrstuvwxyz0123456789_") != "" {
			return invalid("host_keys has an invalid file name %s", printable(name))
		}
		if len(content) > maxKeyBytes {
			return invalid("host key %s has more than %d bytes", printable(name), maxKeyBytes)
		}
	}
	return nil
}
