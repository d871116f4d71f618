package relist

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// named is a policy under which clients see other objects than under any other.
type named struct {
	string
	tunnels, keeps bool
}

func (p *named) Affects(next Policy, _ Resource) bool { return p != next }
func (p *named) Redivides(next Policy) bool           { return p != next }
func (p *named) KeepsCaches() bool                    { return p.keeps }
func (p *named) PassesThrough() bool                  { return p.tunnels }
func (p *named) DropsEvents(Resource) bool            { return false }

var (
	pods     = Resource{GroupResource: schema.GroupResource{Resource: "pods"}}
	allPods  = Words{Path: "/pods"}.View()
	anything = func(Policy) bool { return true }
)

// history is a ledger whose policies are named a, b, c and so on.
type history struct {
	*Ledger
	t      *testing.T
	policy *named
}

func newHistory(t *testing.T) *history {
	h := &history{Ledger: NewLedger(), t: t, policy: &named{string: "a"}}
	h.Change(h.policy, time.Time{}, func() {})
	return h
}

// next puts the next policy in force, edited.
func (h *history) next(edit ...func(*named)) {
	p := &named{string: string(h.policy.string[0] + 1)}
	for _, f := range edit {
		f(p)
	}
	h.policy = p
	h.Change(p, time.Now(), func() {})
}

func (h *history) enter() *Ticket { return h.Enter(h.policy, pods, allPods, func(error) {}) }

// open opens a watch of a complete cache.
func (h *history) open() *Ticket {
	w := h.enter()
	w.Filled()
	return w
}

func (h *history) list() { h.Enter(h.policy, pods, allPods, nil).Listed() }

// requireResumes requires that a watch from a version goes on in some way, and for a
// supplement the policies that its cache may have been filled under.
func (h *history) requireResumes(version string, how Continuation, under string) *Ticket {
	h.t.Helper()
	w := h.enter()
	got, before := w.Resume(h.policy, version)
	names := ""
	for _, p := range before {
		names += p.(*named).string
	}
	require.Equal(h.t, how, got)
	require.Equal(h.t, under, names)
	return w
}

func TestSupplementStartsFromThePolicyOfTheCache(t *testing.T) {
	h := newHistory(t)
	h.open()
	h.next()
	h.requireResumes("5", Supplemented, "a").Filled()
	h.next()
	h.requireResumes("7", Supplemented, "b").Filled()
}

func TestCacheThatWasAwayForTwoChanges(t *testing.T) {
	h := newHistory(t)
	h.open()
	h.next()
	h.next()
	h.requireResumes("5", Supplemented, "a")
}

// The client may not have read any of it.
func TestSupplementIsRepeatedAtItsVersion(t *testing.T) {
	h := newHistory(t)
	h.open()
	h.next()
	w := h.requireResumes("5", Supplemented, "a")
	w.Filled()
	w.Leave()
	w = h.requireResumes("5", Supplemented, "a")
	w.Filled()
	w.Leave()
	h.requireResumes("6", Plain, "")
}

// It resumes from the version of an old object that was in the part.
func TestClientThatReadPartOfSupplementLists(t *testing.T) {
	h := newHistory(t)
	h.open()
	h.next()
	h.requireResumes("15", Supplemented, "a").Leave()
	h.requireResumes("7", Expired, "").Leave()
	h.requireResumes("7", Expired, "").Leave() // the response was lost
	h.list()
	h.requireResumes("16", Plain, "")
}

// Of a quiet resource the version does not change between two policies.
func TestUnconfirmedCacheIsBetweenPolicies(t *testing.T) {
	h := newHistory(t)
	h.open()
	h.next()
	h.requireResumes("5", Supplemented, "a").Filled()
	h.next()
	h.requireResumes("5", Supplemented, "ab").Filled()
	h.next()
	h.requireResumes("5", Supplemented, "abc").Filled()
	h.next()
	h.requireResumes("6", Supplemented, "d").Filled()
	for range maxPolicies {
		h.next()
		h.enter().Resume(h.policy, "6")
	}
	h.next()
	h.requireResumes("6", Expired, "")
}

func TestCacheThatWasAwayAfterItsSupplement(t *testing.T) {
	for version, under := range map[string]string{"5": "ab", "7": "b"} {
		h := newHistory(t)
		h.open()
		h.next()
		h.requireResumes("5", Supplemented, "a").Filled()
		h.next()
		h.next()
		h.requireResumes(version, Supplemented, under)
	}
}

func TestSlowSupplementIsRepeatedForASecondRequest(t *testing.T) {
	h := newHistory(t)
	h.open()
	h.next()
	first := h.requireResumes("5", Supplemented, "a")
	second := h.requireResumes("5", Supplemented, "a")
	first.Leave()
	require.True(t, h.CatchingUp("", anything))
	second.Filled()
	h.Age(Deciding)
	require.False(t, h.CatchingUp("", anything))
}

func TestPolicyChangesBeforeARequestResumes(t *testing.T) {
	h := newHistory(t)
	h.next()
	h.list()
	w := h.enter()
	h.next()
	how, _ := w.Resume(h.policy, "5")
	require.Equal(t, Over, how)
	w.Leave()
	h.requireResumes("5", Supplemented, "b")
}

// Another list with the same words may be one of a client without the cache, or of the same
// program that has started anew.
func TestClientListsIfAnotherHasListedSince(t *testing.T) {
	h := newHistory(t)
	h.open()
	h.next()
	h.list()
	h.requireResumes("5", Expired, "").Leave()
	h.list()
	w := h.requireResumes("5", Plain, "")
	w.Filled()
	h.next()
	h.requireResumes("6", Supplemented, "b")
}

func TestTwoCachesOfAView(t *testing.T) {
	h := newHistory(t)
	h.open()
	h.open()
	h.next()
	h.requireResumes("5", Supplemented, "a").Filled()
	h.next() // the other has not resumed
	h.requireResumes("9", Supplemented, "ab").Filled()
	h.requireResumes("9", Supplemented, "ab").Filled()
	h.next()
	h.requireResumes("12", Supplemented, "c").Filled()
	h.requireResumes("11", Expired, "")
}

func TestCachesOfUnknownContentList(t *testing.T) {
	for name, prepare := range map[string]func(h *history){
		"no watch was open":    func(h *history) { h.next() },
		"faults made it up":    func(h *history) { h.open().Gap(); h.next() },
		"it began in no order": func(h *history) { h.open().Unordered(); h.next() },
		"a tunnel in between": func(h *history) {
			h.open()
			h.next(func(p *named) { p.tunnels = true })
			h.next()
		},
		"caches were kept": func(h *history) {
			h.next(func(p *named) { p.keeps = true })
			h.Age(ResumeWithin)
			h.open()
			h.next()
		},
		"its watch ended by itself": func(h *history) {
			h.open()
			h.next()
			w := h.requireResumes("5", Supplemented, "a")
			w.Filled()
			w.Leave()
			h.next()
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHistory(t)
			prepare(h)
			h.requireResumes("7", Expired, "").Leave()
			h.list()
			h.requireResumes("8", Plain, "")
		})
	}
}

// Its request was refused behind the ledger, by a limit, say.
func TestRepeatedRequestStandsForNoOtherCache(t *testing.T) {
	h := newHistory(t)
	h.open()
	h.open()
	h.next()
	h.requireResumes("5", Supplemented, "a").Leave()
	h.requireResumes("5", Supplemented, "a").Leave()
	h.requireResumes("9", Supplemented, "a")
}

func TestUndeliveredSupplementIsRepeatedForLong(t *testing.T) {
	h := newHistory(t)
	h.open()
	h.next()
	for range 12 {
		h.requireResumes("5", Supplemented, "a").Leave()
		h.Age(ResumeWithin / 10)
	}
}

func TestChangesBetweenTwoResumptions(t *testing.T) {
	for name, c := range map[string]func(h *history){
		"of a supplemented cache of two": func(h *history) {
			h.open()
			h.open()
			h.next()
			w := h.requireResumes("5", Supplemented, "a")
			w.Filled()
			w.Leave()
			h.next()
		},
		"of a list that another began": func(h *history) {
			h.open()
			h.next()
			list := h.Enter(h.policy, pods, allPods, nil)
			h.next()
			list.Listed()
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHistory(t)
			c(h)
			h.requireResumes("7", Expired, "")
		})
	}
}

// Another change gives more keys while the client waits to list.
func TestCatchUpOfWaitingClientIsRenewed(t *testing.T) {
	h := newHistory(t)
	h.next()
	h.requireResumes("5", Expired, "").Leave()
	h.Age(CatchUp - time.Second)
	h.next()
	h.Age(CatchUp - time.Second)
	require.True(t, h.CatchingUp("", anything))
}

func TestMemoryOfAViewIsBounded(t *testing.T) {
	h := newHistory(t)
	h.open()
	h.next()
	h.requireResumes("99999", Supplemented, "a").Filled()
	for n := range 100 {
		h.requireResumes(strconv.Itoa(n), Expired, "").Leave()
	}
	c := h.resources[pods].caches[allPods]
	require.Len(t, c.refused, maxRefused)
	for range 3 * maxPolicies {
		h.open()
		h.next()
	}
	require.LessOrEqual(t, len(h.resources[pods].caches[allPods].under), maxPolicies+1)
}

func TestFullLedgerForgetsResumedCaches(t *testing.T) {
	h := newHistory(t)
	h.Bounds.Views = 1
	h.next()
	h.list()
	h.Age(ResumeWithin)
	h.next()
	h.Enter(h.policy, pods, Words{Path: "/others"}.View(), nil).Listed()
	views, _ := h.Remembered()
	require.Equal(t, 1, views)
}

func TestVersionsThatAreNoNumbersList(t *testing.T) {
	h := newHistory(t)
	h.open()
	h.next()
	h.requireResumes("x5", Expired, "")
}

// A supplement that is under way when the next change comes brings nothing of that.
func TestCatchUpIsRenewedByTheNextChange(t *testing.T) {
	h := newHistory(t)
	h.open()
	h.next()
	h.Age(CatchUp - time.Second)
	h.requireResumes("5", Supplemented, "a")
	h.next()
	h.Age(time.Second)
	require.True(t, h.CatchingUp("", anything))
}

// The policy changes while the watch of a cache that has listed opens.
func TestCacheIsAwaitedOnce(t *testing.T) {
	h := newHistory(t)
	h.open()
	h.next()
	w := h.requireResumes("5", Supplemented, "a")
	w.Expire("5")
	w.Leave()
	h.list()
	w = h.requireResumes("9", Plain, "")
	h.next()
	w.Leave()
	h.requireResumes("9", Supplemented, "b").Filled()
	h.Age(Deciding)
	require.False(t, h.CatchingUp("", anything))
}

// Waits for one object are views of their own, and never resume.
func TestOldViewsAreForgotten(t *testing.T) {
	h := newHistory(t)
	for n := range 100 {
		h.Enter(h.policy, pods, Words{Path: "/pods", Name: string(rune('a' + n))}.View(), func(error) {})
		h.next()
		h.Age(ResumeWithin - time.Minute)
	}
	views, _ := h.Remembered()
	require.Less(t, views, 4)
}
