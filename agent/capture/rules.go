package capture

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	goiptables "github.com/coreos/go-iptables/iptables"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const (
	chain = "CTRLMESH-OUTPUT"

	// lockTimeout is how long to wait for iptables' own lock, in seconds. It is the node's, not the pod's.
	lockTimeout = 10
)

// natTable is the nat table of one address family, in whatever network
// namespace the calling thread is.
type natTable struct {
	family int // 4 or 6
	ipt    *goiptables.IPTables
	// saver and restorer are the programs that list and change the table as one,
	// which ipt cannot.
	saver, restorer string
	err             error // why one is missing
}

// openNATTables finds the programs of a variant of iptables, once for all pods.
// Without the one for IPv6, only pods without IPv6 can be captured.
func openNATTables(variant string) ([2]natTable, error) {
	tables := [2]natTable{{family: 4}, {family: 6}}
	for i, program := range []string{"iptables", "ip6tables"} {
		if variant != "" {
			program += "-" + variant
		}
		tables[i].ipt, tables[i].err = goiptables.New(
			goiptables.IPFamily(goiptables.Protocol(i)), goiptables.Timeout(lockTimeout), goiptables.Path(program))
		if tables[i].err == nil {
			tables[i].restorer, tables[i].err = exec.LookPath(program + "-restore")
		}
		if tables[i].err == nil {
			tables[i].saver, tables[i].err = exec.LookPath(program + "-save")
		}
		if tables[i].err != nil {
			tables[i].err = fmt.Errorf("%s: %w", program, tables[i].err)
		}
	}
	return tables, tables[0].err
}

// rule is a rule of our chain, as iptables spells it after "-A CHAIN".
type rule []string

var jump = rule{"-j", chain}

var markRule = rule{"-m", "mark", "--mark", fmt.Sprintf("%#x", Mark), "-j", "RETURN"}

func redirectRule(to netip.AddrPort, port uint16) rule {
	prefix := netip.PrefixFrom(to.Addr(), to.Addr().BitLen())
	return rule{"-d", prefix.String(), "-p", "tcp", "-m", "tcp", "--dport", strconv.Itoa(int(to.Port())),
		"-j", "REDIRECT", "--to-ports", strconv.Itoa(int(port))}
}

// port returns where the rule redirects to, 0 if nowhere.
func (r rule) port() uint16 {
	i := slices.Index(r, "--to-ports")
	if i < 0 || i+1 == len(r) {
		return 0
	}
	port, _ := strconv.ParseUint(r[i+1], 10, 16)
	return uint16(port)
}

// mayExist is false only if the table surely has no chain of ours. It starts no
// program: of a pod that is captured for the first time, that is all there is to ask.
func (t natTable) mayExist() bool {
	legacy := map[int]string{4: "ip_tables_names", 6: "ip6_tables_names"}[t.family]
	names, err := os.ReadFile("/proc/thread-self/net/" + legacy)
	if err == nil && slices.Contains(strings.Fields(string(names)), "nat") || err != nil && !errors.Is(err, os.ErrNotExist) {
		return true
	}

	const getChain = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETCHAIN
	request := nl.NewNetlinkRequest(getChain, 0)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: map[int]uint8{4: unix.NFPROTO_IPV4, 6: unix.NFPROTO_IPV6}[t.family]})
	request.AddData(nl.NewRtAttr(unix.NFTA_CHAIN_TABLE, nl.ZeroTerminated("nat")))
	request.AddData(nl.NewRtAttr(unix.NFTA_CHAIN_NAME, nl.ZeroTerminated(chain)))
	_, err = request.Execute(unix.NETLINK_NETFILTER, 0)
	for _, absent := range []error{unix.ENOENT, unix.EPROTONOSUPPORT, unix.EOPNOTSUPP, unix.EINVAL} {
		if errors.Is(err, absent) {
			return false
		}
	}
	return true
}

// list returns the rules of all chains, by one program run.
func (t natTable) list() (map[string][]rule, error) {
	if t.err != nil {
		return nil, t.err
	}
	var stderr bytes.Buffer
	command := exec.Command(t.saver, "-t", "nat")
	command.Stderr = &stderr
	saved, err := command.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", t.saver, err, bytes.TrimSpace(stderr.Bytes()))
	}
	chains := map[string][]rule{}
	for line := range strings.Lines(string(saved)) {
		if name, ok := strings.CutPrefix(line, ":"); ok {
			name, _, _ = strings.Cut(name, " ")
			chains[name] = nil
		} else if line, ok := strings.CutPrefix(line, "-A "); ok {
			name, spec, _ := strings.Cut(line, " ")
			chains[name] = append(chains[name], strings.Fields(spec))
		}
	}
	return chains, nil
}

// port returns where our chain redirects to, 0 if nowhere.
func (t natTable) port() (uint16, error) {
	if !t.mayExist() {
		return 0, nil
	}
	chains, err := t.list()
	return portOfRules(chains[chain]), err
}

// portOfRules is the first port that a rule redirects to, 0 if none does.
func portOfRules(rules []rule) uint16 {
	for _, r := range rules {
		if port := r.port(); port != 0 {
			return port
		}
	}
	return 0
}

// withoutJumps takes all jumps to our chain out of OUTPUT.
func withoutJumps(output []rule) string {
	var b strings.Builder
	for _, r := range output {
		if slices.Equal(r, jump) {
			fmt.Fprintf(&b, "-D OUTPUT %s\n", strings.Join(jump, " "))
		}
	}
	return b.String()
}

// sync makes our chain redirect the table's share of the destinations to port,
// and OUTPUT go through it first, all at once. If the chain leads to another
// port, nothing is done unless seize.
func (t natTable) sync(destinations []netip.AddrPort, port uint16, seize bool) error {
	wanted := []rule{markRule}
	for _, d := range destinations {
		if d.Addr().Is4() == (t.family == 4) {
			wanted = append(wanted, redirectRule(d, port))
		}
	}
	slices.SortFunc(wanted[1:], slices.Compare[rule])
	if t.err != nil && len(wanted) == 1 {
		return nil // needless here
	}
	var chains map[string][]rule
	if t.mayExist() {
		var err error
		if chains, err = t.list(); err != nil {
			return err
		}
	}
	rules, exists := chains[chain]
	output := chains["OUTPUT"]
	switch {
	case !exists && len(wanted) == 1:
		return nil
	case !seize && slices.ContainsFunc(rules, func(r rule) bool { return r.port() != 0 && r.port() != port }):
		return nil
	case slices.EqualFunc(rules, wanted, slices.Equal[rule]) && len(output) > 0 && slices.Equal(output[0], jump):
		return nil
	}

	// Naming a chain empties it; no packet sees it so, for all is committed together.
	var b strings.Builder
	fmt.Fprintf(&b, "*nat\n:%s - [0:0]\n", chain)
	for _, r := range wanted {
		fmt.Fprintf(&b, "-A %s %s\n", chain, strings.Join(r, " "))
	}
	fmt.Fprintf(&b, "%s-I OUTPUT 1 %s\nCOMMIT\n", withoutJumps(output), strings.Join(jump, " "))
	return t.restore(b.String())
}

// restore changes the table by one program run, and as one.
func (t natTable) restore(rules string) error {
	if t.err != nil {
		return t.err
	}
	command := exec.Command(t.restorer, "--noflush", fmt.Sprintf("--wait=%d", lockTimeout))
	command.Stdin = strings.NewReader(rules)
	if said, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", t.restorer, err, bytes.TrimSpace(said))
	}
	return nil
}

// remove removes our chain and the jumps to it, at once. It is no error if they
// are not there. Unless port is 0, a chain that leads elsewhere stays.
func (t natTable) remove(port uint16) error {
	if t.err != nil || !t.mayExist() {
		return nil // without the program no rules could have been made
	}
	chains, err := t.list()
	rules, exists := chains[chain]
	if err != nil || !exists || port != 0 && portOfRules(rules) != port {
		return err
	}
	return t.restore(fmt.Sprintf("*nat\n:%[1]s - [0:0]\n%[2]s-X %[1]s\nCOMMIT\n", chain, withoutJumps(chains["OUTPUT"])))
}
