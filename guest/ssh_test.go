package main

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"syscall"
	"testing"
)

// startAs starts an agent of that machine, with a folder for host keys.
func startAs(t *testing.T, machine string) *harness {
	t.Helper()
	h := start(t)
	h.agent.identity.machine.Store(&machine)
	must(t, os.MkdirAll(h.agent.identity.root+"/etc/ssh", 0o755))
	return h
}

func (h *harness) admit(request sshRequest) map[string]string {
	h.Helper()
	body, _ := json.Marshal(request)
	var answer sshAnswer
	must(h.T, json.Unmarshal(h.call("POST", "/v1/ssh", "", bytes.NewReader(body)), &answer))
	return answer.HostKeys
}

func TestGatewayKeyAndHostKeysAreOfOneMachine(t *testing.T) {
	h := startAs(t, "m1")
	i := h.agent.identity
	must(t, os.WriteFile(i.root+"/etc/ssh/ssh_host_rsa_key.pub", []byte("without its private key"), 0o644))
	if keys := h.admit(sshRequest{Machine: "m1", Key: "ssh-ed25519 AAAA first"}); len(keys) != 0 {
		t.Fatalf("host keys of a machine without: %v", keys)
	}
	made := map[string]string{"ssh_host_ed25519_key": "private", "ssh_host_ed25519_key.pub": "public"}
	keys := h.admit(sshRequest{Machine: "m1", Key: "ssh-ed25519 AAAA second", HostKeys: made})
	if len(keys) != 1 || keys["ssh_host_ed25519_key.pub"] != "public" {
		t.Fatalf("made: %v", keys)
	}
	later := map[string]string{"ssh_host_ed25519_key": "other", "ssh_host_ed25519_key.pub": "other"}
	if keys := h.admit(sshRequest{Machine: "m1", Key: "ssh-ed25519 AAAA third", HostKeys: later}); keys["ssh_host_ed25519_key.pub"] != "public" {
		t.Fatalf("host keys were replaced: %v", keys)
	}
	for path, want := range map[string]uint32{gatewayKey: 0o600, "/etc/ssh/ssh_host_ed25519_key": 0o600, "/etc/ssh/ssh_host_ed25519_key.pub": 0o644} {
		if _, _, mode := ownerOf(t, i.root+path); mode != want {
			t.Errorf("%s has mode %o", path, mode)
		}
	}
	if content, _ := os.ReadFile(i.root + gatewayKey); string(content) != "ssh-ed25519 AAAA third\n" {
		t.Errorf("%q", content)
	}
	must(t, newIdentity(i.root).forgetGateway())
	onlyThere(t, i.root+"/run/stead")
}

func TestGatewayIsRefused(t *testing.T) {
	h := startAs(t, "m1")
	i := h.agent.identity
	for what, request := range map[string]sshRequest{
		"another machine": {Machine: "m2", Key: "ssh-ed25519 AAAA"},
		"two lines":       {Machine: "m1", Key: "ssh-ed25519 AAAA\nssh-ed25519 BBBB"},
		"no key":          {Machine: "m1"},
		"long key":        {Machine: "m1", Key: strings.Repeat("a", maxGatewayLine+1)},
		"a path":          {Machine: "m1", Key: "k", HostKeys: map[string]string{"ssh_host_../../x_key": ""}},
		"a long host key": {Machine: "m1", Key: "k", HostKeys: map[string]string{"ssh_host_rsa_key": strings.Repeat("a", maxKeyBytes+1)}},
	} {
		t.Log(what)
		body, _ := json.Marshal(request)
		h.refused("invalid_request", "POST", "/v1/ssh", "", bytes.NewReader(body))
	}
	onlyThere(t, i.root+"/etc/ssh")
	// A FIFO in the place of a key would hold the reader for ever.
	must(t, syscall.Mkfifo(i.root+"/etc/ssh/ssh_host_rsa_key", 0o600))
	must(t, syscall.Mkfifo(i.root+"/etc/ssh/ssh_host_rsa_key.pub", 0o600))
	body, _ := json.Marshal(sshRequest{Machine: "m1", Key: "k"})
	h.refused("invalid_request", "POST", "/v1/ssh", "", bytes.NewReader(body))
}
