// Package iptables redirects connections by the nat table of a network namespace, and
// refuses UDP by its filter table. Its functions act in the network namespace of the
// calling thread.
package iptables

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

	"github.com/ctrlmesh/ctrlmesh/agent/capture/program"
	"github.com/ctrlmesh/ctrlmesh/agent/capture/redirect"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// Mark is the mark (SO_MARK) of the agent's own sockets, which the rules let pass. It can be
// forged by a process that has CAP_NET_ADMIN or CAP_NET_RAW in the pod's network namespace:
// only the trust in the mesh CA alone stops those. BPF does not use it.
const Mark = 0x6d657368 // "mesh"

const (
	// Chain is the name of our chain in each table.
	Chain = "CTRLMESH-OUTPUT"

	// The tables that have a chain of ours.
	nat    = "nat"
	filter = "filter" // only for egress
)

var waitOption = fmt.Sprintf("--wait=%d", int(program.Time.Seconds()))

// Table are the tables of one address family, in whatever network namespace the
// calling thread is.
type Table struct {
	Family   int                  // 4 or 6
	commands *goiptables.IPTables // list and delete
	// lister lists a chain while a pod is captured, restorer changes a table as one.
	lister, restorer string
	err              error // why they do not exist
}

// OpenTables finds the programs of iptables, once for all pods. They must be those of
// nftables. Without those for IPv6, only pods without IPv6 can be captured.
func OpenTables() ([2]Table, error) {
	tables := [2]Table{{Family: 4}, {Family: 6}}
	for i, protocol := range []goiptables.Protocol{goiptables.ProtocolIPv4, goiptables.ProtocolIPv6} {
		name := []string{"iptables", "ip6tables"}[i]
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
func (t Table) within(ctx context.Context, f func(*goiptables.IPTables) error) error {
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

var jump = rule{"-j", Chain}

var markRule = rule{"-m", "mark", "--mark", fmt.Sprintf("%#x", Mark), "-j", "RETURN"}

func redirectRule(to netip.AddrPort, port uint16) rule {
	prefix := netip.PrefixFrom(to.Addr(), to.Addr().BitLen())
	return rule{"-d", prefix.String(), "-p", "tcp", "-m", "tcp", "--dport", strconv.Itoa(int(to.Port())),
		"-j", "REDIRECT", "--to-ports", strconv.Itoa(int(port))}
}

// stayRule exempts connections within the pod.
var stayRule = rule{"-o", "lo", "-j", "RETURN"}

// egressRule redirects connections that no redirectRule matches.
func egressRule(at, port uint16) rule {
	return rule{"-p", "tcp", "-m", "tcp", "--dport", strconv.Itoa(int(at)), "-j", "REDIRECT", "--to-ports", strconv.Itoa(int(port))}
}

func (t Table) refuseRule(at uint16) rule {
	with := map[int]string{4: "icmp-port-unreachable", 6: "icmp6-port-unreachable"}[t.Family]
	return rule{"-p", "udp", "-m", "udp", "--dport", strconv.Itoa(int(at)), "-j", "REJECT", "--reject-with", with}
}

// line returns the line that adds the rule.
func (r rule) line() string { return "-A " + Chain + " " + strings.Join(r, " ") }

// value returns the number after an option; 0 if there is none.
func (r rule) value(option string) uint16 {
	i := slices.Index(r, option)
	if i < 0 || i+1 == len(r) {
		return 0
	}
	number, _ := strconv.ParseUint(r[i+1], 10, 16)
	return uint16(number)
}

// Lead is where rules redirect to.
type Lead struct {
	Port   uint16   // for apiservers; 0 if they are not redirected
	Egress uint16   // for other hosts; 0 if they are not redirected
	Ports  []uint16 // of other hosts
}

// leadsOf reads the lines that list our chain.
func leadsOf(lines []string) (l Lead) {
	for _, line := range lines {
		r := rule(strings.Fields(line))
		to := r.value("--to-ports")
		switch {
		case to == 0:
		case slices.Contains(r, "-d"):
			l.Port = cmp.Or(l.Port, to)
		case r.value("--dport") != 0:
			l.Egress = cmp.Or(l.Egress, to)
			l.Ports = append(l.Ports, r.value("--dport"))
		}
	}
	slices.Sort(l.Ports)
	l.Ports = slices.Compact(l.Ports)
	return l
}

// isAnothers reports whether rules redirect to another port than these.
func (l Lead) isAnothers(port uint16, e *redirect.Egress) bool {
	if l.Port != 0 {
		return l.Port != port
	}
	return l.Egress != 0 && (e == nil || l.Egress != e.Port)
}

// MayExist reports whether the nat table may have a chain of ours.
func (t Table) MayExist() bool { return t.mayExist(nat) }

// Lead returns where our chain redirects to.
func (t Table) Lead(ctx context.Context) (Lead, error) {
	if !t.mayExist(nat) {
		return Lead{}, nil
	}
	var lines []string
	err := t.within(ctx, func(commands *goiptables.IPTables) (err error) {
		lines, err = commands.List(nat, Chain)
		return err
	})
	var exit *goiptables.Error
	if errors.As(err, &exit) && exit.ExitStatus() == 1 {
		return Lead{}, nil // the chain does not exist; the message depends on the variant
	}
	return leadsOf(lines), failure.Wrap(err, "listing chain %s", Chain)
}

// Left returns the lines that list our chain in the nat table; nil if it does not exist.
func (t Table) Left(ctx context.Context) ([]string, error) {
	if t.err != nil || !t.mayExist(nat) {
		return nil, t.err
	}
	return t.list(ctx, nat)
}

// list returns the lines that make our chain. It runs iptables directly, because the
// commands run it through the agent's binary, which takes several times as long to start.
func (t Table) list(ctx context.Context, table string) ([]string, error) {
	out, err := program.Run(ctx, "", t.lister, "-t", table, "-S", Chain, waitOption)
	return strings.Split(strings.TrimSuffix(out, "\n"), "\n"), err
}

// SyncOptions say how a table is changed.
type SyncOptions struct {
	// Seize replaces rules that redirect to another port, which are another agent's. Else they stay.
	Seize bool
	// Left are the rules of an earlier agent, as [Table.Left] returned them: where they look right, nothing is
	// written. Nil: all is.
	Left []string
}

// Sync makes our chain redirect the table's share of the destinations to port, and the
// ports of egress to its port, and OUTPUT go through it first, all at once. UDP to those
// ports is refused before, and until after.
func (t Table) Sync(ctx context.Context, destinations []netip.AddrPort, port uint16, e *redirect.Egress, how SyncOptions) error {
	wanted, refused := t.rulesFor(destinations, port, e)
	if t.err != nil && len(wanted) == 1 {
		return nil // no rules are necessary
	}
	exists := t.mayExist(nat)
	if exists && !how.Seize {
		// Rules that cannot be read are not an agent's, and are replaced.
		if l, err := t.Lead(ctx); err == nil && l.isAnothers(port, e) {
			return nil
		}
	}
	if e != nil && (how.Left == nil || !t.refuses(ctx, refused)) {
		if err := t.put(ctx, filter, refused, t.mayExist(filter)); err != nil {
			return err
		}
	}
	if (exists || len(wanted) > 1) && !t.holds(nat, wanted, how.Left) {
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
func (t Table) rulesFor(destinations []netip.AddrPort, port uint16, e *redirect.Egress) (redirected, refused []rule) {
	redirected, refused = []rule{markRule}, []rule{markRule, stayRule}
	for _, d := range destinations {
		if d.Addr().Is4() == (t.Family == 4) {
			redirected = append(redirected, redirectRule(d, port))
		}
	}
	if e == nil {
		return redirected, refused
	}
	redirected = append(redirected, stayRule)
	for _, at := range e.Ports {
		redirected = append(redirected, egressRule(at, e.Port))
		refused = append(refused, t.refuseRule(at))
	}
	return redirected, refused
}

// holds reports whether our chain, listed as lines, has these rules, as far as iptables shows them, and OUTPUT
// goes through it first.
func (t Table) holds(table string, rules []rule, lines []string) bool {
	wanted := []string{"-N " + Chain}
	for _, r := range rules {
		wanted = append(wanted, r.line())
	}
	return slices.Equal(lines, wanted) && t.jumpsFirst(table)
}

// refuses reports whether the filter table holds these rules.
func (t Table) refuses(ctx context.Context, rules []rule) bool {
	if t.err != nil || !t.mayExist(filter) {
		return false
	}
	lines, err := t.list(ctx, filter)
	return err == nil && t.holds(filter, rules, lines)
}

// put makes the rules those of our chain in the table, and OUTPUT go through it first. That takes the kernel some
// ten times as long as to list the chain.
func (t Table) put(ctx context.Context, table string, rules []rule, exists bool) error {
	// Naming a chain empties it. All is committed together, so no packet sees it empty.
	var b strings.Builder
	fmt.Fprintf(&b, "*%s\n:%s - [0:0]\n", table, Chain)
	for _, r := range rules {
		b.WriteString(r.line() + "\n")
	}
	deleteJump := fmt.Sprintf("-D OUTPUT %s\n", strings.Join(jump, " ")) // fails if there is none
	insert := fmt.Sprintf("-I OUTPUT 1 %s\nCOMMIT\n", strings.Join(jump, " "))
	if exists && t.Restore(ctx, b.String()+deleteJump+insert) == nil {
		return nil
	}
	// There is no jump, or there are too many rules to find it. A second jump has no
	// effect, and inserting one at the top does not read the others.
	return t.Restore(ctx, b.String()+insert)
}

// Restore changes the table by one program run, and as one.
func (t Table) Restore(ctx context.Context, rules string) error {
	if t.err != nil {
		return t.err
	}
	_, err := program.Run(ctx, rules, t.restorer, "--noflush", waitOption)
	return err
}

// Remove removes our chains and the jumps to them. It is no error if they do not exist.
// Unless port is 0, chains that redirect elsewhere stay.
func (t Table) Remove(ctx context.Context, port uint16, e *redirect.Egress) error {
	if port != 0 && t.err == nil {
		if l, err := t.Lead(ctx); err != nil || l.isAnothers(port, e) {
			return err
		}
	}
	return errors.Join(t.drop(ctx, nat), t.drop(ctx, filter))
}

// drop removes our chain from a table that may have it. It fails only if the chain still has
// an effect.
func (t Table) drop(ctx context.Context, table string) error {
	if t.err != nil || !t.mayExist(table) {
		return nil // without the program no rules could have been made
	}
	// An empty chain has no effect. Emptying it does not read OUTPUT.
	if err := t.Restore(ctx, fmt.Sprintf("*%s\n:%s - [0:0]\nCOMMIT\n", table, Chain)); err != nil {
		return err
	}
	for range 2 { // jumps; put leaves no more
		_ = t.within(ctx, func(commands *goiptables.IPTables) error { return commands.Delete(table, "OUTPUT", jump...) })
		// It fails while there is a jump.
		if t.within(ctx, func(commands *goiptables.IPTables) error { return commands.DeleteChain(table, Chain) }) == nil {
			break
		}
	}
	return nil
}
