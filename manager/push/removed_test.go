package push

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// sent returns the uids of the Removes that are sent next.
func (s *Server) sent(node string, st *stream) (uids []string) {
	for {
		switch m := s.next(node, st); {
		case m == nil:
			return uids
		case m.GetRemove() != nil:
			uids = append(uids, m.GetRemove().Uid)
		}
	}
}

func TestPodThatTheManagerDoesNotKnowIsRemoved(t *testing.T) {
	for name, early := range map[string]bool{"connected before the first policies": true, "and after": false} {
		t.Run(name, func(t *testing.T) {
			s := &Server{Changed: func() {}, Counted: func() {}}
			if !early {
				s.Set(cluster1, policies("a@n1=1-x"))
			}
			st := s.join("n1", nil, &meshv1.Hello{Node: "n1", Versions: map[string]string{"a": "1-x", "lost": "2-x", "unsettled": ""}, Namespaces: map[string]string{"lost": "ns"}}, nil)
			if early {
				require.Empty(t, s.Removed())
				s.Set(cluster1, policies("a@n1=1-x"))
			}
			require.Equal(t, []Removed{{Node: "n1", Namespace: "ns", UID: "lost"}, {Node: "n1", UID: "unsettled"}}, s.Removed())
			require.ElementsMatch(t, []string{"lost", "unsettled"}, s.sent("n1", st))
			s.ack("n1", st, &meshv1.Ack{Uid: "lost", Version: "2-x"})
			require.Len(t, s.Removed(), 2, "that is of a policy")
			s.ack("n1", st, &meshv1.Ack{Uid: "lost", Error: "the agent ends"})
			require.Len(t, s.Removed(), 2)
			s.ack("n1", st, &meshv1.Ack{Uid: "lost"})
			require.Equal(t, []Removed{{Node: "n1", UID: "unsettled"}}, s.Removed())
			s.Set(cluster1, policies("a@n1=1-x", "unsettled@n1=1"))
			require.Empty(t, s.Removed(), "it has a policy")
		})
	}
}

func TestRemovedPodIsConfirmedByAllAgents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Server{Changed: func() {}, Counted: func() {}}
		s.Set(cluster1, policies("a@n1=1-x"))
		one := s.join("n1", nil, &meshv1.Hello{Node: "n1"}, nil)
		two := s.join("n1", nil, &meshv1.Hello{Node: "n1"}, nil)
		s.Set(cluster1, policies())
		s.ack("n1", two, &meshv1.Ack{Uid: "a"})
		require.Equal(t, []Removed{{Node: "n1", UID: "a"}}, s.Removed())
		s.leave("n1", one)
		s.leave("n1", two)
		left := time.Now()
		time.Sleep(time.Minute)
		require.Equal(t, []Removed{{Node: "n1", UID: "a", Left: left}}, s.Removed())
		next := s.join("n1", nil, &meshv1.Hello{Node: "n1"}, nil)
		require.Equal(t, []Removed{{Node: "n1", UID: "a"}}, s.Removed())
		require.Equal(t, []string{"a"}, s.sent("n1", next))
		s.ack("n1", next, &meshv1.Ack{Uid: "a"})
		require.Empty(t, s.Removed())
		s.leave("n1", next)
		time.Sleep(meshv1.LostWrite)
	})
}

func TestRemovedPodsAreForgottenInTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Server{Changed: func() {}, Counted: func() {}}
		s.Set(cluster1, policies("a@n1=1-x"))
		s.Set(cluster1, policies())
		require.Equal(t, []Removed{{Node: "n1", UID: "a", Left: time.Now()}}, s.Removed())
		time.Sleep(removedFor + time.Second)
		s.Set(cluster1, policies())
		require.Empty(t, s.Removed())
		require.Empty(t, s.nodes)
	})
}

func TestRemovedPodsAreBounded(t *testing.T) {
	s := &Server{Changed: func() {}, Counted: func() {}}
	s.Set(cluster1, policies("a@n1=1-x"))
	many := map[string]string{}
	for i := range 2 * maxRemoved {
		many[fmt.Sprint(i)] = "1-x"
	}
	st := s.join("n1", nil, &meshv1.Hello{Node: "n1", Versions: many}, nil)
	require.Len(t, s.Removed(), maxRemoved)
	s.sent("n1", st)
	s.Set(cluster1, policies())
	require.Equal(t, []string{"a"}, s.sent("n1", st), "the agent hears of it all the same")
}

func TestAckOfAnEarlierRemoveDoesNotCount(t *testing.T) {
	s := &Server{Changed: func() {}, Counted: func() {}}
	s.Set(cluster1, policies("a@n1=1-x"))
	st := s.join("n1", nil, &meshv1.Hello{Node: "n1"}, nil)
	s.sent("n1", st)
	s.Set(cluster1, policies())
	require.Equal(t, []string{"a"}, s.sent("n1", st))
	s.Set(cluster1, policies("a@n1=2-x"))
	s.sent("n1", st)
	s.Set(cluster1, policies())
	s.ack("n1", st, &meshv1.Ack{Uid: "a"})
	require.NotEmpty(t, s.Removed())
	s.sent("n1", st)
	s.ack("n1", st, &meshv1.Ack{Uid: "a"})
	require.Empty(t, s.Removed())
}

func TestUIDsThatNoPodHasAreIgnored(t *testing.T) {
	s := &Server{Changed: func() {}, Counted: func() {}}
	s.Set(cluster1, policies("a@n1=1-x"))
	s.join("n1", nil, &meshv1.Hello{Node: "n1", Versions: map[string]string{strings.Repeat("x", maxUID+1): ""}}, nil)
	require.Empty(t, s.Removed())
}

func TestNodesOfWhichNoAgentHasConnected(t *testing.T) {
	s := &Server{Changed: func() {}, Counted: func() {}}
	s.Set(cluster1, policies("a@n1=1-x", "b@n2=1-x"))
	require.Equal(t, []string{"n1", "n2", "n3"}, s.Unconnected([]string{"n1", "n2", "n3"}))
	st := s.join("n1", nil, &meshv1.Hello{Node: "n1"}, nil)
	require.Equal(t, []string{"n2"}, s.Unconnected([]string{"n1", "n2"}))
	s.leave("n1", st)
	require.Empty(t, s.Unconnected([]string{"n1"}))
}

// A node that was scaled down does not delay handovers for long.
func TestRemovedPodsActUntilTheirRequestsHaveEnded(t *testing.T) {
	now, timeout := time.Now(), time.Minute
	removed := func(ago time.Duration) Removed { return Removed{Left: now.Add(-ago)} }
	require.False(t, Removed{}.Over(now, timeout), "an agent has yet to confirm it")
	require.False(t, removed(timeout).Over(now, timeout))
	require.True(t, removed(timeout+meshv1.LostWrite).Over(now, timeout))
}
