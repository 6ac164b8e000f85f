package main

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// addPair makes two NICs that are joined by a wire.
func addPair(t *testing.T, name string, mac net.HardwareAddr, peer string, peerMAC net.HardwareAddr) {
	t.Helper()
	kernel, err := openNetlink()
	must(t, err)
	defer kernel.close()
	side := func(name string, mac net.HardwareAddr) []byte {
		values := attribute(nil, syscall.IFLA_IFNAME, append([]byte(name), 0))
		return attribute(values, syscall.IFLA_ADDRESS, mac)
	}
	other := append(bytesOf(&syscall.IfInfomsg{}), side(peer, peerMAC)...)
	info := attribute(attribute(nil, 1, []byte("veth")), 2, attribute(nil, 1, other))
	body := append(bytesOf(&syscall.IfInfomsg{}), side(name, mac)...)
	_, err = kernel.request(syscall.RTM_NEWLINK, syscall.NLM_F_CREATE|syscall.NLM_F_EXCL, attribute(body, syscall.IFLA_LINKINFO, info))
	must(t, err)
}

var dataMAC = net.HardwareAddr{0x02, 0x53, 0x54, 0x45, 0x00, 0x01}

func sampleIdentity() *identityRequest {
	entropy := make([]byte, 64)
	rand.Read(entropy)
	encoded, _ := json.Marshal(entropy)
	return &identityRequest{
		Nonce: "00ff", Machine: "m0123456789abcdefghi", Hostname: "box.example.org", MachineID: strings.Repeat("ab", 16),
		TimeNs: time.Now().UnixNano(), Entropy: strings.Trim(string(encoded), `"`),
		Network:     &network{dataMAC.String(), "100.64.0.5", "169.254.0.1", []string{"169.254.0.1", "fd00::1"}, 1400},
		SSHHostKeys: map[string]string{"ssh_host_ed25519_key": "private", "ssh_host_ed25519_key.pub": "public"},
	}
}

func TestIdentityIsAppliedAndReadBack(t *testing.T) {
	if !inNamespaces(t) {
		return
	}
	addPair(t, "eth0", dataMAC, "host0", hostMAC)
	h := start(t)
	root := h.agent.identity.root
	must(t, os.MkdirAll(root+"/etc/ssh", 0o755))
	must(t, os.WriteFile(root+"/etc/ssh/ssh_host_rsa_key", []byte("the parent's"), 0o600))
	must(t, os.WriteFile(root+"/etc/hosts", []byte("127.0.0.1 localhost\n127.0.1.1 template\n10.1.1.1 mine # kept\n"), 0o644))
	must(t, os.Symlink("../run/stub", root+"/etc/resolv.conf"))
	var clock int64
	h.agent.identity.setClock = func(now int64) error { clock = now; return nil }

	kernel, err := openNetlink()
	must(t, err)
	defer kernel.close()
	nic, err := kernel.findLink(dataMAC)
	must(t, err)
	for _, old := range []string{"10.9.9.9/24", "10.9.9.10/24", "100.64.0.9/32"} {
		must(t, kernel.addAddress(nic.index, netip.MustParsePrefix(old), 0))
	}
	var randoms []string
	for _, address := range []string{"100.64.0.5", "100.64.0.6", "100.64.0.6"} {
		request := sampleIdentity()
		request.Network.Address = address
		body, _ := json.Marshal(request)
		var answer identityAnswer
		must(t, json.Unmarshal(h.call("POST", "/v1/identity", "", bytes.NewReader(body)), &answer))
		if answer.Nonce != "00ff" || answer.Machine != request.Machine || answer.Hostname != request.Hostname || answer.MachineID != request.MachineID ||
			answer.Address != address || len(answer.Random) != 64 || answer.BootID == "" || answer.Kernel == "" ||
			len(answer.SSHHostKeys) != 1 || answer.SSHHostKeys["ssh_host_ed25519_key.pub"] != "public" {
			t.Fatalf("%+v", answer)
		}
		if clock < request.TimeNs || clock > request.TimeNs+int64(time.Second) || answer.TimeNs < request.TimeNs {
			t.Errorf("clock %d for %d", clock, request.TimeNs)
		}
		randoms = append(randoms, answer.Random)
	}
	if randoms[0] == randoms[1] || randoms[1] == randoms[2] {
		t.Error("random repeats")
	}
	if content, err := os.ReadFile("/proc/sys/net/ipv6/conf/eth0/disable_ipv6"); err == nil && string(content) != "1\n" {
		t.Errorf("IPv6 is on: %q", content)
	}
	if name, _ := os.Hostname(); name != "box.example.org" {
		t.Errorf("hostname %q", name)
	}
	for path, want := range map[string]string{
		"/etc/hostname":                 "box.example.org\n",
		"/etc/hosts":                    "127.0.0.1 localhost\n127.0.1.1 box.example.org box\n10.1.1.1 mine # kept\n",
		"/etc/machine-id":               strings.Repeat("ab", 16) + "\n",
		"/etc/resolv.conf":              "nameserver 169.254.0.1\nnameserver fd00::1\n",
		"/etc/ssh/ssh_host_ed25519_key": "private",
	} {
		if content, err := os.ReadFile(root + path); string(content) != want {
			t.Errorf("%s: %q %v", path, content, err)
		}
	}
	for path, want := range map[string]uint32{"/etc/ssh/ssh_host_ed25519_key": 0o600, "/etc/ssh/ssh_host_ed25519_key.pub": 0o644, "/etc/machine-id": 0o444} {
		if _, _, mode := ownerOf(t, root+path); mode != want {
			t.Errorf("%s has mode %o", path, mode)
		}
	}
	onlyThere(t, root+"/etc/ssh", "ssh_host_ed25519_key", "ssh_host_ed25519_key.pub")
	routes, err := os.ReadFile("/proc/net/route")
	must(t, err)
	// Destination, gateway, flags up(1) gateway(2) host(4); addresses are little-endian hex.
	if table := string(routes); !strings.Contains(table, "eth0\t00000000\t0100FEA9\t0003") || !strings.Contains(table, "eth0\t0100FEA9\t00000000\t0005") {
		t.Errorf("routes:\n%s", table)
	}
	neighbours, _ := os.ReadFile("/proc/net/arp")
	if !strings.Contains(string(neighbours), "169.254.0.1      0x1         0x6         02:53:54:45:00:fe") {
		t.Errorf("neighbours:\n%s", neighbours)
	}
	if nic, _ := kernel.findLink(dataMAC); nic.mtu != 1400 || !nic.up {
		t.Errorf("%+v", nic)
	}
	testReboot(t, h, kernel, nic)
}

func TestPreparedNICHasAllButItsAddress(t *testing.T) {
	if !inNamespaces(t) {
		return
	}
	addPair(t, "eth0", dataMAC, "host0", hostMAC)
	h := start(t)
	h.agent.identity.setClock = func(int64) error { return nil }
	body, _ := json.Marshal(prepareRequest{Network: sampleIdentity().Network})
	h.call("POST", "/v1/prepare", "", bytes.NewReader(body))
	table := func() string {
		routes, err := os.ReadFile("/proc/net/route")
		must(t, err)
		return string(routes)
	}
	prepared := table()
	if !strings.Contains(prepared, "eth0\t00000000\t0100FEA9\t0003") || h.agent.identity.ready == nil {
		t.Fatalf("routes of a prepared NIC:\n%s", prepared)
	}
	kernel, err := openNetlink()
	must(t, err)
	defer kernel.close()
	index := h.agent.identity.ready.index
	if present, err := kernel.addresses(index); err != nil || len(present) != 0 {
		t.Fatalf("addresses of a prepared NIC: %v %v", present, err)
	}
	for _, address := range []string{"100.64.0.5", "100.64.0.6"} {
		request := sampleIdentity()
		request.Network.Address = address
		body, _ := json.Marshal(request)
		h.call("POST", "/v1/identity", "", bytes.NewReader(body))
		if present, err := kernel.addresses(index); err != nil || len(present) != 1 || present[0].Addr().String() != address {
			t.Errorf("addresses: %v %v", present, err)
		}
		if table() != prepared {
			t.Errorf("routes:\n%s, before:\n%s", table(), prepared)
		}
	}
	h.call("POST", "/v1/prepare", "", bytes.NewReader(body))
	if present, err := kernel.addresses(index); err != nil || len(present) != 1 {
		t.Errorf("a machine with an identity was prepared again: %v %v", present, err)
	}
	h.refused("invalid_request", "POST", "/v1/prepare", "", strings.NewReader(`{"network":{"mac":"x"}}`))
}

func TestPreparedFilesAreWrittenInPlace(t *testing.T) {
	if !inNamespaces(t) {
		return
	}
	addPair(t, "eth0", dataMAC, "host0", hostMAC)
	h := start(t)
	h.agent.identity.setClock = func(int64) error { return nil }
	root := h.agent.identity.root
	must(t, os.MkdirAll(root+"/etc/ssh", 0o755))
	must(t, os.MkdirAll(filepath.Dir(root+generationEvent), 0o755))
	must(t, os.WriteFile(root+generationEvent, nil, 0o644))
	must(t, os.WriteFile(root+"/etc/ssh/ssh_host_rsa_key", []byte("of the image"), 0o600))
	must(t, os.WriteFile(root+"/etc/hosts", []byte("10.1.1.1 mine\n"), 0o644))
	content := func(path string) string {
		read, err := os.ReadFile(root + path)
		must(t, err)
		return string(read)
	}
	request := sampleIdentity()
	prepare, _ := json.Marshal(prepareRequest{request.Network, []string{"ssh_host_ed25519_key", "ssh_host_ed25519_key.pub"}})
	for range 2 {
		h.call("POST", "/v1/prepare", "", bytes.NewReader(prepare))
	}
	if event := content(generationEvent); event != "disable\n" {
		t.Errorf("the event was %q", event)
	}
	written := map[string]string{
		"/etc/hostname": "box.example.org\n", "/etc/hosts": "10.1.1.1 mine\n127.0.1.1 box.example.org box\n",
		"/etc/machine-id": request.MachineID + "\n", "/etc/ssh/ssh_host_ed25519_key": "private",
		"/etc/ssh/ssh_host_ed25519_key.pub": "public",
	}
	before := map[string]uint64{}
	for path := range written {
		if found := content(path); found != blank {
			t.Errorf("%s was prepared as %q", path, found)
		}
		before[path] = versionOf(root + path).inode
	}
	rebooted := newIdentity(root)
	if rebooted.resume(); rebooted.machineID() != "" {
		t.Errorf("a template is machine %q", rebooted.machineID())
	}
	body, _ := json.Marshal(request)
	h.call("POST", "/v1/identity", "", bytes.NewReader(body))
	for path, want := range written {
		if found := content(path); found != want || versionOf(root+path).inode != before[path] {
			t.Errorf("%s: %q, in place: %v", path, found, versionOf(root+path).inode == before[path])
		}
	}
	if event := content(generationEvent); !strings.HasPrefix(event, "enable\n") {
		t.Errorf("the event is %q", event)
	}
	onlyThere(t, root+"/etc/ssh", "ssh_host_ed25519_key", "ssh_host_ed25519_key.pub")
	h.refused("invalid_request", "POST", "/v1/prepare", "", strings.NewReader(`{"ssh_host_keys":["../x"]}`))
}

func TestFilesOfACopyAreWrittenInPlace(t *testing.T) {
	if !inNamespaces(t) {
		return
	}
	addPair(t, "eth0", dataMAC, "host0", hostMAC)
	h := start(t)
	h.agent.identity.setClock = func(int64) error { return nil }
	root := h.agent.identity.root
	must(t, os.MkdirAll(root+"/etc/ssh", 0o755))
	give := func(change func(*identityRequest)) {
		request := sampleIdentity()
		change(request)
		body, _ := json.Marshal(request)
		h.call("POST", "/v1/identity", "", bytes.NewReader(body))
	}
	give(func(*identityRequest) {})
	paths := []string{"/etc/hostname", "/etc/hosts", "/etc/machine-id", rememberedFile, "/etc/ssh/ssh_host_ed25519_key"}
	inodes := func() map[string]uint64 {
		found := map[string]uint64{}
		for _, path := range paths {
			found[path] = versionOf(root + path).inode
		}
		return found
	}
	before := inodes()
	// Another name may lead to one of them, which has to keep its content.
	must(t, os.Link(root+"/etc/machine-id", root+"/etc/kept"))
	give(func(r *identityRequest) {
		r.Machine, r.Hostname, r.MachineID = "m0123456789abcdefghj", "bag.example.org", strings.Repeat("cd", 16)
		r.Network.Address = "100.64.10.15" // longer than before
		r.SSHHostKeys = map[string]string{"ssh_host_ed25519_key": "secrets", "ssh_host_ed25519_key.pub": "a longer one"}
	})
	for path, inode := range inodes() {
		if inPlace := inode == before[path]; inPlace != (path != "/etc/machine-id") {
			t.Errorf("%s was written in place: %v", path, inPlace)
		}
	}
	for path, want := range map[string]string{
		"/etc/hostname": "bag.example.org\n", "/etc/machine-id": strings.Repeat("cd", 16) + "\n",
		"/etc/kept": strings.Repeat("ab", 16) + "\n", "/etc/ssh/ssh_host_ed25519_key": "secrets",
		"/etc/ssh/ssh_host_ed25519_key.pub": "a longer one",
	} {
		if content, err := os.ReadFile(root + path); string(content) != want {
			t.Errorf("%s: %q %v", path, content, err)
		}
	}
	resumed := newIdentity(root)
	if resumed.resume(); resumed.machineID() != "m0123456789abcdefghj" {
		t.Errorf("remembered: %q", resumed.machineID())
	}
}

func TestNICThatAProgramChangedIsSetUpAnew(t *testing.T) {
	if !inNamespaces(t) {
		return
	}
	addPair(t, "eth0", dataMAC, "host0", hostMAC)
	h := start(t)
	h.agent.identity.setClock = func(int64) error { return nil }
	kernel, err := openNetlink()
	must(t, err)
	defer kernel.close()
	nic, err := kernel.findLink(dataMAC)
	must(t, err)
	give := func(address string) {
		request := sampleIdentity()
		request.Network.Address = address
		body, _ := json.Marshal(request)
		h.call("POST", "/v1/identity", "", bytes.NewReader(body))
	}
	give("100.64.0.5")
	wanted := netip.MustParseAddr("169.254.0.1")
	for name, change := range map[string]func() error{
		"another address": func() error { return kernel.addAddress(nic.index, netip.MustParsePrefix("10.9.9.9/24"), 0) },
		"no address":      func() error { return kernel.removeAddress(nic.index, netip.MustParsePrefix("100.64.0.5/32")) },
		"another gateway": func() error {
			return kernel.addRoute(nic.index, netip.MustParsePrefix("0.0.0.0/0"), netip.MustParseAddr("169.254.0.9"))
		},
		"link is down": func() error {
			header := syscall.IfInfomsg{Index: nic.index, Change: syscall.IFF_UP}
			_, err := kernel.request(syscall.RTM_NEWLINK, 0, bytesOf(&header))
			return err
		},
	} {
		must(t, change())
		for _, address := range []string{"100.64.0.6", "100.64.0.5"} {
			give(address)
			index, gateway, err := kernel.routeTo(elsewhere)
			if err != nil || index != nic.index || gateway != wanted {
				t.Errorf("%s: route by %d, %s: %v", name, index, gateway, err)
			}
			present, err := kernel.addresses(nic.index)
			if err != nil || len(present) != 1 || present[0].Addr().String() != address {
				t.Errorf("%s: addresses %v: %v", name, present, err)
			}
		}
	}
}

// testReboot has the kernel forget everything, as it does, and the agent put it back.
func testReboot(t *testing.T, h *harness, kernel *netlink, nic *link) {
	root := h.agent.identity.root
	forget := func() {
		must(t, kernel.removeAddress(nic.index, netip.MustParsePrefix("100.64.0.6/32")))
		must(t, syscall.Sethostname([]byte("forgotten")))
	}
	forget()
	restarted := newIdentity(root)
	restarted.resume()
	if content, err := os.ReadFile("/proc/sys/net/ipv6/conf/eth0/disable_ipv6"); err == nil && string(content) != "1\n" {
		t.Errorf("IPv6 is on: %q", content)
	}
	if name, _ := os.Hostname(); name != "forgotten" || restarted.machineID() != "m0123456789abcdefghi" {
		t.Errorf("a mere restart of the agent changed the hostname to %s, machine %q", name, restarted.machineID())
	}
	rebooted := newIdentity(root)
	rebooted.bootID = "another"
	rebooted.resume()
	present, _ := kernel.addresses(nic.index)
	if content, err := os.ReadFile("/proc/sys/net/ipv6/conf/eth0/disable_ipv6"); err == nil && string(content) != "1\n" {
		t.Errorf("IPv6 is on: %q", content)
	}
	if name, _ := os.Hostname(); name != "box.example.org" || len(present) != 1 || present[0].String() != "100.64.0.6/32" {
		t.Errorf("after the reboot: %s %v", name, present)
	}
	stored, _ := os.ReadFile(root + "/var/lib/stead/identity.json")
	if !bytes.Contains(stored, []byte(`"boot_id":"another"`)) {
		t.Errorf("%s", stored)
	}
}

func TestMalformedIdentityChangesNothing(t *testing.T) {
	h := start(t)
	h.agent.identity.setClock = func(int64) error { t.Error("the clock was set"); return nil }
	for name, spoil := range map[string]func(*identityRequest){
		"nonce":    func(r *identityRequest) { r.Nonce = "xyz" },
		"machine":  func(r *identityRequest) { r.Machine = "a/b" },
		"hostname": func(r *identityRequest) { r.Hostname = "-bad-" },
		"id":       func(r *identityRequest) { r.MachineID = "12" },
		"time":     func(r *identityRequest) { r.TimeNs = 5 },
		"entropy":  func(r *identityRequest) { r.Entropy = "AAAA" },
		"network":  func(r *identityRequest) { r.Network = nil },
		"mac":      func(r *identityRequest) { r.Network.MAC = "02:53" },
		"address":  func(r *identityRequest) { r.Network.Address = "fe80::1" },
		"gateway":  func(r *identityRequest) { r.Network.Gateway = "" },
		"dns":      func(r *identityRequest) { r.Network.DNS = []string{"1.1.1.1\nx"} },
		"mtu":      func(r *identityRequest) { r.Network.MTU = 10 },
		"keys":     func(r *identityRequest) { r.SSHHostKeys = map[string]string{"ssh_host_../../x_key": ""} },
	} {
		request := sampleIdentity()
		spoil(request)
		body, _ := json.Marshal(request)
		t.Log(name)
		h.refused("invalid_request", "POST", "/v1/identity", "", bytes.NewReader(body))
	}
	onlyThere(t, h.agent.identity.root)
}

func TestHostsFile(t *testing.T) {
	for before, after := range map[string]string{
		"":                         "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n127.0.1.1 n\n",
		"# c\n127.0.0.1 localhost": "# c\n127.0.0.1 localhost\n127.0.1.1 n\n",
		"127.0.1.1\told x\n\n127.0.1.1 twice\n::1 l\n": "127.0.1.1 n\n\n::1 l\n",
		"127.0.1.11 other\n":                           "127.0.1.11 other\n127.0.1.1 n\n",
	} {
		if got := hostsWith(before, "n"); got != after {
			t.Errorf("%q became %q", before, got)
		}
	}
}
