package main

import (
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"log"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

type identityRequest struct {
	Nonce       string            `json:"nonce"`
	Machine     string            `json:"machine"`
	Hostname    string            `json:"hostname"`
	MachineID   string            `json:"machine_id"`
	TimeNs      int64             `json:"time_ns"`
	Entropy     string            `json:"entropy"`
	Network     *network          `json:"network"`
	SSHHostKeys map[string]string `json:"ssh_host_keys"`

	entropy []byte
}

type identityAnswer struct {
	Nonce       string            `json:"nonce"`
	Machine     string            `json:"machine"`
	Hostname    string            `json:"hostname"`
	MachineID   string            `json:"machine_id"`
	TimeNs      int64             `json:"time_ns"`
	Address     string            `json:"address"`
	Random      string            `json:"random"`
	BootID      string            `json:"boot_id"`
	Kernel      string            `json:"kernel"`
	SSHHostKeys map[string]string `json:"ssh_host_keys"`
}

func (r *identityRequest) readFrom(in *jsonReader) {
	in.object(func(name string) {
		switch name {
		case "nonce":
			r.Nonce = in.text()
		case "machine":
			r.Machine = in.text()
		case "hostname":
			r.Hostname = in.text()
		case "machine_id":
			r.MachineID = in.text()
		case "time_ns":
			r.TimeNs = in.integer()
		case "entropy":
			r.Entropy = in.text()
		case "network":
			r.Network = readNetwork(in)
		case "ssh_host_keys":
			r.SSHHostKeys = in.textsByName()
		default:
			in.skip()
		}
	})
}

func (a *identityAnswer) appendTo(to []byte) []byte {
	to = appendMember(append(to, '{'), "nonce", a.Nonce)
	to = appendMember(to, "machine", a.Machine)
	to = appendMember(to, "hostname", a.Hostname)
	to = appendMember(to, "machine_id", a.MachineID)
	to = appendInteger(to, "time_ns", a.TimeNs)
	to = appendMember(to, "address", a.Address)
	to = appendMember(to, "random", a.Random)
	to = appendMember(to, "boot_id", a.BootID)
	to = appendMember(to, "kernel", a.Kernel)
	to = append(appendName(to, "ssh_host_keys"), '{')
	for name, key := range a.SSHHostKeys {
		to = appendMember(to, name, key)
	}
	return append(to, "}}"...)
}

const rememberedFile = "/var/lib/stead/identity.json"

// remembered is what a reboot of the guest must not lose.
type remembered struct {
	BootID    string   `json:"boot_id"`
	Machine   string   `json:"machine"`
	Hostname  string   `json:"hostname"`
	MachineID string   `json:"machine_id"`
	Network   *network `json:"network"`
}

func (n *remembered) readFrom(in *jsonReader) {
	in.object(func(name string) {
		switch name {
		case "boot_id":
			n.BootID = in.text()
		case "machine":
			n.Machine = in.text()
		case "hostname":
			n.Hostname = in.text()
		case "machine_id":
			n.MachineID = in.text()
		case "network":
			n.Network = readNetwork(in)
		default:
			in.skip()
		}
	})
}

func (n *remembered) appendTo(to []byte) []byte {
	to = appendMember(append(to, '{'), "boot_id", n.BootID)
	to = appendMember(to, "machine", n.Machine)
	to = appendMember(to, "hostname", n.Hostname)
	to = appendMember(to, "machine_id", n.MachineID)
	return append(n.Network.appendTo(appendName(to, "network")), '}')
}

// identity is who this machine is; it changes when the guest is restored as another machine.
type identity struct {
	root     string // "" but in tests
	bootID   string
	setClock func(nanoseconds int64) error
	gateway  bool // the key of the SSH gateway may have been written

	mu      sync.Mutex // one identity at a time
	machine atomic.Pointer[string]
	given   bool
	ready   *readyNIC // set up before, in this boot
	blank   *blanks   // before the first identity
	quiet   bool      // generationEvent is off
	kernel  *netlink  // opened in a template, and kept
}

// blanks are the files of a template that await an identity: they exist, have room on the disk and hold blank,
// so that a clone has only to write into them.
type blanks struct {
	hosts  string          // /etc/hosts as it was
	keys   map[string]bool // host keys in /etc/ssh
	folder fileVersion     // of /etc/ssh
}

const (
	blank = "\n"
	// The interrupt with which QEMU tells that vmgenid may have changed, at every restore.
	generationEvent = "/sys/firmware/acpi/interrupts/gpe05"
)

type prepareRequest struct {
	Network     *network `json:"network"`
	SSHHostKeys []string `json:"ssh_host_keys"`
}

func (r *prepareRequest) check() error {
	for _, name := range r.SSHHostKeys {
		if !isHostKey(name) {
			return invalid("ssh_host_keys has an invalid file name %s", printable(name))
		}
	}
	if r.Network == nil {
		return invalid("network is missing")
	}
	return r.Network.check()
}

func newIdentity(root string) *identity {
	i := &identity{root: root, setClock: setClock, gateway: isThere(root + gatewayKey)}
	content, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		log.Printf("%v", err)
	}
	i.bootID = strings.TrimSpace(string(content))
	return i
}

func (i *identity) machineID() string {
	if machine := i.machine.Load(); machine != nil {
		return *machine
	}
	return ""
}

func (i *identity) handleApply(w http.ResponseWriter, r *http.Request) {
	arrived := time.Now()
	var request identityRequest
	err := readLean(w, r, &request)
	if err == nil {
		err = request.check()
	}
	var answer *identityAnswer
	if err == nil {
		answer, err = i.apply(&request, arrived)
	}
	if err != nil {
		writeError(w, err)
		return
	}
	writeLean(w, http.StatusOK, answer)
}

// handlePrepare does, in a template, what every clone would have to do before its first identity: the NIC is up,
// and the files that an identity writes exist.
func (i *identity) handlePrepare(w http.ResponseWriter, r *http.Request) {
	var request prepareRequest
	err := readJSON(w, r, &request)
	if err == nil {
		err = request.check()
	}
	if err == nil {
		err = i.prepare(&request)
	}
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, struct{}{})
}

func (i *identity) prepare(request *prepareRequest) (err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.given {
		return nil
	}
	if i.blank, err = i.blankFiles(request.SSHHostKeys); err != nil {
		return err
	}
	// A clone has the template's id, so its kernel would look at it for nothing.
	if _, err := os.Stat(i.root + generationEvent); err == nil && !i.quiet {
		if err := writeFile(i.root+generationEvent, "disable\n", 0, 0); err != nil {
			return err
		}
		i.quiet = true
	}
	i.ready, err = i.connect(request.Network)
	return err
}

// connect sets the NIC up without an address.
func (i *identity) connect(n *network) (*readyNIC, error) {
	kernel, err := i.netlink()
	if err != nil {
		return nil, err
	}
	nic, err := n.connect(kernel, nil)
	if err != nil {
		return nil, err
	}
	return &readyNIC{index: nic.index, network: *n}, nil
}

// netlink is opened once: a clone has it from its template.
func (i *identity) netlink() (kernel *netlink, err error) {
	if i.kernel == nil {
		i.kernel, err = openNetlink()
	}
	return i.kernel, err
}

// setNetwork gives the NIC its address and returns the one that the kernel then reports.
func (i *identity) setNetwork(n *network) (netip.Addr, error) {
	kernel, err := i.netlink()
	if err != nil {
		return netip.Addr{}, err
	}
	if i.ready, err = n.apply(kernel, i.ready); err != nil {
		kernel.close()
		i.kernel = nil
		return netip.Addr{}, err
	}
	return i.ready.address.Addr(), nil
}

func (i *identity) blankFiles(keys []string) (*blanks, error) {
	hosts, err := readFile(i.root + "/etc/hosts")
	if err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	if i.blank != nil {
		hosts = i.blank.hosts
	}
	blanks := &blanks{hosts: hosts, keys: map[string]bool{}}
	if err := i.forgetOtherKeys(nil); err != nil {
		return nil, err
	}
	modes := map[string]uint32{
		"/etc/hostname": 0o644, "/etc/hosts": 0o644, "/etc/machine-id": 0o444, rememberedFile: 0o600,
	}
	for _, name := range keys {
		blanks.keys[name] = true
		modes["/etc/ssh/"+name] = keyMode(name)
	}
	for name, mode := range modes {
		path := i.root + name
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return nil, err
		}
		if err := writeFile(path, blank, syscall.O_TRUNC, mode); err != nil {
			return nil, err
		}
		if err := os.Chmod(path, os.FileMode(mode)); err != nil {
			return nil, err
		}
	}
	blanks.folder = versionOf(i.root + "/etc/ssh")
	return blanks, nil
}

// awaits reports that the host keys in /etc/ssh are those of a template still, all of which are given now.
func (b *blanks) awaits(given map[string]string, folder string) bool {
	if b == nil || b.folder != versionOf(folder) {
		return false
	}
	for name := range b.keys {
		if _, found := given[name]; !found {
			return false
		}
	}
	return true
}

// forgetOtherKeys removes host keys of kinds that the machine is not given: a clone must not answer with its
// parent's.
func (i *identity) forgetOtherKeys(given map[string]string) error {
	folder := i.root + "/etc/ssh"
	if i.blank.awaits(given, folder) {
		return nil
	}
	found, err := filepath.Glob(folder + "/ssh_host_*_key*")
	if err != nil {
		return err
	}
	for _, path := range found {
		if _, kept := given[filepath.Base(path)]; !kept {
			if err := os.Remove(path); err != nil {
				return err
			}
		}
	}
	return nil
}

func isHostKey(name string) bool {
	kind, found := strings.CutPrefix(strings.TrimSuffix(name, ".pub"), "ssh_host_")
	kind, isKey := strings.CutSuffix(kind, "_key")
	return found && isKey && kind != "" && strings.Trim(kind, "abcdefghijklmnopqrstuvwxyz0123456789_") == ""
}

func keyMode(name string) uint32 {
	if strings.HasSuffix(name, ".pub") {
		return 0o644
	}
	return 0o600
}

func (i *identity) apply(request *identityRequest, arrived time.Time) (*identityAnswer, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.given = true
	if len(request.SSHHostKeys) > 0 {
		if err := i.forgetGateway(); err != nil {
			return nil, err
		}
	}
	answer := &identityAnswer{Nonce: request.Nonce, BootID: i.bootID, SSHHostKeys: map[string]string{}}
	// The random pool first: nothing after it may draw the numbers that the template or the parent drew.
	if err := reseed(request.entropy); err != nil {
		return nil, err
	}
	target := request.TimeNs + int64(time.Since(arrived))
	if err := i.setClock(target); err != nil {
		return nil, fmt.Errorf("set the clock: %w", err)
	}
	if off := time.Now().UnixNano() - target; off < -int64(time.Second) || off > int64(time.Second) {
		return nil, fmt.Errorf("clock is off by %v after setting it", time.Duration(off))
	}
	names := &remembered{i.bootID, request.Machine, request.Hostname, request.MachineID, request.Network}
	if err := i.applyNames(names, answer); err != nil {
		return nil, err
	}
	if len(request.SSHHostKeys) > 0 { // else the machine keeps the ones it has
		if err := i.forgetOtherKeys(request.SSHHostKeys); err != nil {
			return nil, err
		}
	}
	for name, content := range request.SSHHostKeys {
		mode := keyMode(name)
		written, err := replaceFile(i.root+"/etc/ssh/"+name, content, mode)
		if err != nil {
			return nil, err
		}
		if mode == 0o644 {
			answer.SSHHostKeys[name] = written
		}
	}
	if i.quiet {
		// Copies of this machine will have another id, and their kernels have to hear of it.
		if err := writeFile(i.root+generationEvent, "enable\n", 0, 0); err != nil {
			return nil, err
		}
		i.quiet = false
	}
	address, err := i.setNetwork(request.Network)
	if err != nil {
		return nil, err
	}
	i.blank = nil // from now on the guest's programs may change the files
	answer.Address = address.String()
	if err := i.remember(names); err != nil {
		return nil, err
	}
	answer.Machine = i.machineID()
	random := make([]byte, 32)
	// From the kernel's pool: unix.Getrandom would take the bytes from one in the agent's own memory.
	if n, _, number := syscall.Syscall(unix.SYS_GETRANDOM, uintptr(unsafe.Pointer(&random[0])), 32, 0); n != 32 {
		return nil, fmt.Errorf("getrandom: %w", number)
	}
	answer.Random = hex.EncodeToString(random)
	answer.TimeNs = time.Now().UnixNano()
	return answer, nil
}

func (i *identity) applyNames(names *remembered, answer *identityAnswer) error {
	var system unix.Utsname
	if err := unix.Uname(&system); err != nil {
		return fmt.Errorf("uname: %w", err)
	}
	if unix.ByteSliceToString(system.Nodename[:]) != names.Hostname {
		if err := syscall.Sethostname([]byte(names.Hostname)); err != nil {
			return fmt.Errorf("set the hostname: %w", err)
		}
		unix.Uname(&system)
	}
	if _, err := replaceFile(i.root+"/etc/hostname", names.Hostname+"\n", 0o644); err != nil {
		return err
	}
	hosts, err := readFile(i.root + "/etc/hosts")
	if err != nil && !os.IsNotExist(err) {
		return err
	}
	if i.blank != nil {
		hosts = i.blank.hosts
	}
	if _, err := replaceFile(i.root+"/etc/hosts", hostsWith(hosts, names.Hostname), 0o644); err != nil {
		return err
	}
	machineID, err := replaceFile(i.root+"/etc/machine-id", names.MachineID+"\n", 0o444)
	if err != nil {
		return err
	}
	if _, err := replaceFile(i.root+"/etc/resolv.conf", names.Network.resolvers(), 0o644); err != nil {
		return err
	}
	answer.Hostname, answer.Kernel = unix.ByteSliceToString(system.Nodename[:]), unix.ByteSliceToString(system.Release[:])
	answer.MachineID = strings.TrimSpace(machineID)
	return nil
}

func (i *identity) remember(names *remembered) error {
	if _, err := replaceFile(i.root+rememberedFile, padded(names.appendTo(nil)), 0o600); err != nil {
		return err
	}
	i.machine.Store(&names.Machine)
	return nil
}

// padded gives what is remembered of every machine the same length, for replaceFile.
func padded(content []byte) string {
	const length = 512
	return string(content) + strings.Repeat(" ", max(0, length-len(content)))
}

// resume gives a rebooted guest its names and network back; the host does not have to notice the reboot.
func (i *identity) resume() {
	content, err := os.ReadFile(i.root + rememberedFile)
	if os.IsNotExist(err) || string(content) == blank {
		return
	}
	var names remembered
	if err == nil {
		err = decodeJSON(content, &names)
	}
	if err == nil {
		err = names.check()
	}
	if err != nil {
		log.Printf("identity saved before the reboot is unreadable: %v", err)
		return
	}
	deadline := time.Now().Add(nicDeadline)
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		err := i.resumeOnce(&names)
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			log.Printf("cannot apply the identity saved before the reboot: %v", err)
			return
		}
		time.Sleep(pause)
	}
}

func (i *identity) resumeOnce(names *remembered) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.given {
		return nil // the host was faster, and its word is newer
	}
	i.machine.Store(&names.Machine)
	if names.BootID == i.bootID {
		return nil // only the agent was restarted
	}
	if err := i.applyNames(names, &identityAnswer{}); err != nil {
		return err
	}
	if _, err := i.setNetwork(names.Network); err != nil {
		return err
	}
	stored := *names
	stored.BootID = i.bootID
	return i.remember(&stored)
}

func (r *identityRequest) check() error {
	if _, err := hex.DecodeString(r.Nonce); err != nil || r.Nonce == "" {
		return invalid("nonce must be hex")
	}
	names := remembered{Machine: r.Machine, Hostname: r.Hostname, MachineID: r.MachineID, Network: r.Network}
	if err := names.check(); err != nil {
		return err
	}
	if r.TimeNs < 1_000_000_000*int64(time.Second/time.Nanosecond) {
		return invalid("time_ns is before 2001")
	}
	var err error
	if r.entropy, err = base64.StdEncoding.DecodeString(r.Entropy); err != nil || len(r.entropy) != 64 {
		return invalid("entropy must be 64 bytes in base64")
	}
	for name := range r.SSHHostKeys {
		if !isHostKey(name) {
			return invalid("ssh_host_keys has an invalid file name %s", printable(name))
		}
	}
	return nil
}

func (n *remembered) check() error {
	if n.Machine == "" || len(n.Machine) > 64 || strings.Trim(n.Machine, hostnameBytes+"_.") != "" {
		return invalid("machine must be 1 to 64 letters and digits")
	}
	if !isHostname(n.Hostname) {
		return invalid("hostname is not a valid host name")
	}
	if id, err := hex.DecodeString(n.MachineID); err != nil || len(id) != 16 || strings.ToLower(n.MachineID) != n.MachineID {
		return invalid("machine_id must be 32 lower-case hex digits")
	}
	if n.Network == nil {
		return invalid("network is missing")
	}
	return n.Network.check()
}
