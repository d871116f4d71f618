package capture

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	goiptables "github.com/coreos/go-iptables/iptables"
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
	err    error // why there is no ipt
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
		if tables[i].err != nil {
			tables[i].err = fmt.Errorf("%s: %w", program, tables[i].err)
		}
	}
	return tables, tables[0].err
}

// rule is a rule of our chain, as iptables spells it after "-A CHAIN".
type rule []string

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

// list returns the rules of a chain, and whether it exists.
func (t natTable) list(name string) ([]rule, bool, error) {
	if t.err != nil {
		return nil, false, t.err
	}
	// What is said of a chain that is not there depends on the variant; that it is not among all chains, not.
	chains, err := t.ipt.ListChains("nat")
	if err != nil {
		return nil, false, fmt.Errorf("list chains: %w", err)
	}
	if !slices.Contains(chains, name) {
		return nil, false, nil
	}
	lines, err := t.ipt.List("nat", name)
	if err != nil {
		return nil, false, fmt.Errorf("list chain %s: %w", name, err)
	}
	var rules []rule
	for _, line := range lines {
		if spec, ok := strings.CutPrefix(line, "-A "+name+" "); ok {
			rules = append(rules, strings.Fields(spec))
		}
	}
	return rules, true, nil
}

// port returns where our chain redirects to, 0 if nowhere.
func (t natTable) port() (uint16, error) {
	rules, _, err := t.list(chain)
	for _, r := range rules {
		if port := r.port(); port != 0 {
			return port, err
		}
	}
	return 0, err
}

// sync makes our chain redirect the table's share of the destinations to port,
// and OUTPUT go through it first. New rules come before those they replace, and
// those go one by one: there is no moment without. If the chain leads to
// another port, nothing is done unless seize.
func (t natTable) sync(destinations []netip.AddrPort, port uint16, seize bool) error {
	wanted := []rule{markRule}
	for _, d := range destinations {
		if d.Addr().Is4() == (t.family == 4) {
			wanted = append(wanted, redirectRule(d, port))
		}
	}
	if t.err != nil && len(wanted) == 1 {
		return nil // needless here
	}
	rules, exists, err := t.list(chain)
	if err != nil {
		return err
	}
	if !exists {
		if len(wanted) == 1 {
			return nil
		}
		if err := t.ipt.NewChain("nat", chain); err != nil {
			return fmt.Errorf("make chain %s: %w", chain, err)
		}
	}
	if !seize && slices.ContainsFunc(rules, func(r rule) bool { return r.port() != 0 && r.port() != port }) {
		return nil
	}

	contains := func(rules []rule, r rule) bool {
		return slices.ContainsFunc(rules, func(s rule) bool { return slices.Equal(r, s) })
	}
	for i, r := range wanted {
		if contains(rules, r) {
			continue
		}
		if err := t.ipt.Insert("nat", chain, min(i, 1)+1, r...); err != nil {
			return fmt.Errorf("insert rule: %w", err)
		}
	}
	for _, r := range rules {
		if contains(wanted, r) {
			continue
		}
		if err := t.ipt.Delete("nat", chain, r...); err != nil {
			return fmt.Errorf("delete rule: %w", err)
		}
	}
	return t.jump()
}

// jump makes our chain the first that OUTPUT goes to.
func (t natTable) jump() error {
	toUs := rule{"-j", chain}
	rules, _, err := t.list("OUTPUT")
	if err != nil {
		return err
	}
	if len(rules) > 0 && slices.Equal(rules[0], toUs) {
		return nil
	}
	if err := t.ipt.Insert("nat", "OUTPUT", 1, toUs...); err != nil {
		return fmt.Errorf("insert jump: %w", err)
	}
	for i, r := range slices.Backward(rules) {
		if slices.Equal(r, toUs) {
			if err := t.ipt.DeleteById("nat", "OUTPUT", i+2); err != nil {
				return fmt.Errorf("delete second jump: %w", err)
			}
		}
	}
	return nil
}

// remove removes our chain and the jump to it. It is no error if they are not there.
func (t natTable) remove() error {
	if t.err != nil {
		return nil // and no rules that could have been made
	}
	_, exists, err := t.list(chain)
	if err != nil || !exists {
		return err
	}
	if err := t.ipt.DeleteIfExists("nat", "OUTPUT", "-j", chain); err != nil {
		return fmt.Errorf("delete jump: %w", err)
	}
	if err := t.ipt.ClearAndDeleteChain("nat", chain); err != nil {
		return fmt.Errorf("delete chain %s: %w", chain, err)
	}
	return nil
}
