package capture

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	goiptables "github.com/coreos/go-iptables/iptables"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/ctrlmesh/ctrlmesh/agent/capture/program"
)

const (
	chain = "CTRLMESH-OUTPUT"

	// The tables that have a chain of ours.
	nat    = "nat"
	filter = "filter" // only for egress
)

var waitOption = fmt.Sprintf("--wait=%d", int(program.Time.Seconds()))

// natTable are the tables of one address family, in whatever network namespace the
// calling thread is.
type natTable struct {
	family   int                  // 4 or 6
	commands *goiptables.IPTables // list and delete
	// lister lists a chain while a pod is captured, restorer changes a table as one.
	lister, restorer string
	err              error // why they are not there
}

// openNATTables finds the programs of a variant of iptables, once for all pods.
// Without those for IPv6, only pods without IPv6 can be captured.
func openNATTables(variant string) ([2]natTable, error) {
	tables := [2]natTable{{family: 4}, {family: 6}}
	for i, protocol := range []goiptables.Protocol{goiptables.ProtocolIPv4, goiptables.ProtocolIPv6} {
		name := []string{"iptables", "ip6tables"}[i]
		if variant != "" {
			name += "-" + variant
		}
		t := &tables[i]
		if t.lister, t.err = exec.LookPath(name); t.err == nil {
			t.restorer, t.err = exec.LookPath(name + "-restore")
		}
		if t.err != nil {
			continue
		}
		var err error
		if t.commands, err = goiptables.New(goiptables.IPFamily(protocol), goiptables.Timeout(int(program.Time.Seconds())), goiptables.Path(name+program.Suffix)); err != nil {
			// Never exec.ErrNotFound: there may be rules, because iptables is installed.
			t.err = fmt.Errorf("probing %s, which must be a link to this binary: %s", name+program.Suffix, err.Error())
		}
	}
	return tables, tables[0].err
}

// within calls f with the commands, each of which may take as long as ctx allows, in
// whole seconds, and at most [program.Time].
func (t natTable) within(ctx context.Context, f func(*goiptables.IPTables) error) error {
	if err := cmp.Or(t.err, ctx.Err()); err != nil {
		return err
	}
	left := program.Time
	if deadline, ok := ctx.Deadline(); ok {
		left = min(left, time.Until(deadline))
	}
	commands := *t.commands
	goiptables.Timeout(1 + int((left-1)/time.Second))(&commands)
	return f(&commands)
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

// stayRule leaves alone what does not leave the pod.
var stayRule = rule{"-o", "lo", "-j", "RETURN"}

// egressRule is for what no redirectRule is for.
func egressRule(at, port uint16) rule {
	return rule{"-p", "tcp", "-m", "tcp", "--dport", strconv.Itoa(int(at)), "-j", "REDIRECT", "--to-ports", strconv.Itoa(int(port))}
}

func refuseRule(at uint16) rule {
	return rule{"-p", "udp", "-m", "udp", "--dport", strconv.Itoa(int(at)), "-j", "REJECT"}
}

// value is the number after an option, 0 without.
func (r rule) value(option string) uint16 {
	i := slices.Index(r, option)
	if i < 0 || i+1 == len(r) {
		return 0
	}
	number, _ := strconv.ParseUint(r[i+1], 10, 16)
	return uint16(number)
}

// lead is where rules redirect to.
type lead struct {
	port   uint16   // for apiservers, 0 if nowhere
	egress uint16   // for others, 0 if nowhere
	ports  []uint16 // of others
}

// leadsOf reads the lines that list our chain.
func leadsOf(lines []string) (l lead) {
	for _, line := range lines {
		r := rule(strings.Fields(line))
		to := r.value("--to-ports")
		switch {
		case to == 0:
		case slices.Contains(r, "-d"):
			l.port = cmp.Or(l.port, to)
		case r.value("--dport") != 0:
			l.egress = cmp.Or(l.egress, to)
			l.ports = append(l.ports, r.value("--dport"))
		}
	}
	slices.Sort(l.ports)
	l.ports = slices.Compact(l.ports)
	return l
}

// isAnothers tells whether rules lead elsewhere than to port, or to nowhere.
func (l lead) isAnothers(port uint16, e *egress) bool {
	if l.port != 0 {
		return l.port != port
	}
	return l.egress != 0 && (e == nil || l.egress != e.port)
}

// mayExist is false only if the table surely has no chain of ours. It starts no
// program: of a pod that is captured for the first time, that is all there is to ask.
func (t natTable) mayExist(table string) bool {
	const getChain = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETCHAIN
	request := nl.NewNetlinkRequest(getChain, 0)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: map[int]uint8{4: unix.NFPROTO_IPV4, 6: unix.NFPROTO_IPV6}[t.family]})
	request.AddData(nl.NewRtAttr(unix.NFTA_CHAIN_TABLE, nl.ZeroTerminated(table)))
	request.AddData(nl.NewRtAttr(unix.NFTA_CHAIN_NAME, nl.ZeroTerminated(chain)))
	_, err := request.Execute(unix.NETLINK_NETFILTER, 0)
	for _, absent := range []error{unix.ENOENT, unix.EPROTONOSUPPORT, unix.EOPNOTSUPP, unix.EINVAL} {
		if errors.Is(err, absent) {
			return false
		}
	}
	return true
}

// leads returns where our chain redirects to.
func (t natTable) leads(ctx context.Context) (lead, error) {
	if !t.mayExist(nat) {
		return lead{}, nil
	}
	var lines []string
	err := t.within(ctx, func(commands *goiptables.IPTables) (err error) {
		lines, err = commands.List(nat, chain)
		return err
	})
	var exit *goiptables.Error
	if errors.As(err, &exit) && exit.ExitStatus() == 1 {
		return lead{}, nil // the chain does not exist; the message depends on the variant
	}
	if err != nil {
		return lead{}, fmt.Errorf("listing chain %s: %w", chain, err)
	}
	return leadsOf(lines), nil
}

// lastLeads is leads for the capture of a pod. It runs iptables directly, because the
// commands run it through the agent's binary, which takes several times as long to start.
func (t natTable) lastLeads(ctx context.Context) (lead, error) {
	if t.err != nil || !t.mayExist(nat) {
		return lead{}, t.err
	}
	out, err := program.Run(ctx, "", t.lister, "-t", nat, "-S", chain, waitOption)
	return leadsOf(strings.Split(out, "\n")), err
}

// sync makes our chain redirect the table's share of the destinations to port, and the
// ports of egress to its port, and OUTPUT go through it first, all at once. UDP to those
// ports is refused before, and until after. If the chain leads to another port, nothing
// is done unless seize.
func (t natTable) sync(ctx context.Context, destinations []netip.AddrPort, port uint16, e *egress, seize bool) error {
	wanted, refused := t.rulesFor(destinations, port, e)
	if t.err != nil && len(wanted) == 1 {
		return nil // needless here
	}
	exists := t.mayExist(nat)
	if exists && !seize {
		// What cannot be read is no agent's doing, and is replaced.
		if l, err := t.leads(ctx); err == nil && l.isAnothers(port, e) {
			return nil
		}
	}
	if e != nil {
		if err := t.put(ctx, filter, refused, t.mayExist(filter)); err != nil {
			return err
		}
	}
	if exists || len(wanted) > 1 {
		if err := t.put(ctx, nat, wanted, exists); err != nil {
			return err
		}
	}
	if e == nil {
		return t.drop(ctx, filter)
	}
	return nil
}

// rulesFor returns the rules of our chain in the nat and in the filter table.
func (t natTable) rulesFor(destinations []netip.AddrPort, port uint16, e *egress) (redirected, refused []rule) {
	redirected, refused = []rule{markRule}, []rule{markRule, stayRule}
	for _, d := range destinations {
		if d.Addr().Is4() == (t.family == 4) {
			redirected = append(redirected, redirectRule(d, port))
		}
	}
	if e == nil {
		return redirected, refused
	}
	redirected = append(redirected, stayRule)
	for _, at := range e.ports {
		redirected = append(redirected, egressRule(at, e.port))
		refused = append(refused, refuseRule(at))
	}
	return redirected, refused
}

// put makes the rules those of our chain in the table, and OUTPUT go through it first.
func (t natTable) put(ctx context.Context, table string, rules []rule, exists bool) error {
	// Naming a chain empties it; no packet sees it so, for all is committed together.
	var b strings.Builder
	fmt.Fprintf(&b, "*%s\n:%s - [0:0]\n", table, chain)
	for _, r := range rules {
		fmt.Fprintf(&b, "-A %s %s\n", chain, strings.Join(r, " "))
	}
	deleteJump := fmt.Sprintf("-D OUTPUT %s\n", strings.Join(jump, " ")) // fails if there is none
	insert := fmt.Sprintf("-I OUTPUT 1 %s\nCOMMIT\n", strings.Join(jump, " "))
	if exists && t.restore(ctx, b.String()+deleteJump+insert) == nil {
		return nil
	}
	// There is no jump, or too much else to find it. One too many does no harm, and
	// to put it first takes no reading of the others.
	return t.restore(ctx, b.String()+insert)
}

// restore changes the table by one program run, and as one.
func (t natTable) restore(ctx context.Context, rules string) error {
	if t.err != nil {
		return t.err
	}
	_, err := program.Run(ctx, rules, t.restorer, "--noflush", waitOption)
	return err
}

// remove removes our chains and the jumps to them. It is no error if they are not there.
// Unless port is 0, chains that lead elsewhere stay.
func (t natTable) remove(ctx context.Context, port uint16, e *egress) error {
	if t.err != nil || !t.mayExist(nat) {
		return nil // without the program no rules could have been made
	}
	if port != 0 {
		if l, err := t.leads(ctx); err != nil || l.isAnothers(port, e) {
			return err
		}
	}
	return errors.Join(t.empty(ctx, nat), t.drop(ctx, filter))
}

// drop removes our chain from a table that may have it.
func (t natTable) drop(ctx context.Context, table string) error {
	if t.err != nil || !t.mayExist(table) {
		return nil
	}
	return t.empty(ctx, table)
}

// empty removes our chain from a table. It fails only if the chain still has an effect.
func (t natTable) empty(ctx context.Context, table string) error {
	// Empty, it has no effect. That takes no reading of OUTPUT.
	if err := t.restore(ctx, fmt.Sprintf("*%s\n:%s - [0:0]\nCOMMIT\n", table, chain)); err != nil {
		return err
	}
	for range 2 { // jumps; put leaves no more
		_ = t.within(ctx, func(commands *goiptables.IPTables) error { return commands.Delete(table, "OUTPUT", jump...) })
		// It fails while there is a jump.
		if t.within(ctx, func(commands *goiptables.IPTables) error { return commands.DeleteChain(table, chain) }) == nil {
			break
		}
	}
	return nil
}
