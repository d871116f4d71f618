package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// reply is the result of a member's client that lists the ConfigMaps of all namespaces:
// objects, or the reason of the refusal.
type reply struct {
	at         time.Time
	namespaces []string // of the objects, sorted
	refused    string
}

// askScript lists in a loop, with a new connection each time, and prints one line per list:
// gonet's exit code and output. $1 is the interval; if it is empty, it lists once.
const askScript = `set -f; sa=` + account + `
host=$KUBERNETES_SERVICE_HOST; case $host in *:*) host="[$host]"; esac
while :; do
	out=$(gonet get -t 20s -token $sa/token -ca $sa/ca.crt \
		-H "Accept: application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1" \
		https://$host:$KUBERNETES_SERVICE_PORT/api/v1/configmaps 2>&1)
	echo $? $out
	[ "$1" ] || exit 0
	sleep $1
done`

func parseReply(line string) reply {
	a := reply{at: time.Now()}
	code, text, _ := strings.Cut(line, " ")
	if code != "0" {
		a.refused = text
		return a
	}
	var list struct {
		Items []metav1.PartialObjectMetadata
	}
	_, body, _ := strings.Cut(text, "{")
	if err := json.Unmarshal([]byte("{"+body), &list); err != nil {
		a.refused = fmt.Sprintf("not a list: %v: %.200s", err, line)
		return a
	}
	for _, item := range list.Items {
		a.namespaces = append(a.namespaces, item.Namespace)
	}
	slices.Sort(a.namespaces)
	a.namespaces = slices.Compact(a.namespaces)
	return a
}

// ask asks once.
func (m *member) ask(ctx context.Context) (reply, error) {
	out, _, err := cluster.Exec(ctx, m.Namespace, m.Name, "", "sh", "-c", askScript)
	return parseReply(out), err
}

// check returns an error unless the reply is exactly the shard's.
func (m *member) check(a reply) error {
	if a.refused != "" {
		return errors.New(a.refused)
	}
	if !slices.Equal(a.namespaces, []string{m.owns}) {
		return fmt.Errorf("%s sees %v, not %s alone", m.Name, a.namespaces, m.owns)
	}
	return nil
}

// works waits until the member sees exactly what its shard owns.
func (m *member) works(t *testing.T) {
	t.Helper()
	until(t, m.Name+" to work", func(ctx context.Context) error {
		a, err := m.ask(ctx)
		if err != nil {
			return err
		}
		return m.check(a)
	})
}

// refused waits until the member is refused for the given reason.
func (m *member) refused(t *testing.T, why string) {
	t.Helper()
	until(t, m.Name+" to be refused", func(ctx context.Context) error {
		a, err := m.ask(ctx)
		if err == nil && !strings.Contains(a.refused, why) {
			err = fmt.Errorf("it is not: %+v", a)
		}
		return err
	})
}

// replies are the replies that a member's client got so far.
type replies struct {
	member *member
	mu     sync.Mutex
	all    []reply
	stop   func()
}

// pause is the pause of a client that lists all the time between two lists.
const pause = 50 * time.Millisecond

// asking starts a client in the member that lists all the time, on new connections.
func (m *member) asking(t *testing.T) *replies {
	t.Helper()
	as := &replies{member: m}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- cluster.ExecLines(ctx, m.Namespace, m.Name, func(line string) {
			as.mu.Lock()
			defer as.mu.Unlock()
			as.all = append(as.all, parseReply(line))
		}, "sh", "-c", askScript, "sh", fmt.Sprint(pause.Seconds()))
	}()
	as.stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-done)
	})
	t.Cleanup(as.stop)
	return as
}

// await waits for a reply after the given time that satisfies wanted.
func (as *replies) await(t *testing.T, what string, after time.Time, wanted func(reply) bool) reply {
	t.Helper()
	var found reply
	until(t, what, func(context.Context) error {
		as.mu.Lock()
		defer as.mu.Unlock()
		i := slices.IndexFunc(as.all, func(a reply) bool { return a.at.After(after) && wanted(a) })
		if i < 0 {
			return fmt.Errorf("not among %d replies", len(as.all))
		}
		found = as.all[i]
		return nil
	})
	return found
}

// between returns how many replies the client got between two times.
func (as *replies) between(from, to time.Time) (n int) {
	as.mu.Lock()
	defer as.mu.Unlock()
	for _, a := range as.all {
		if a.at.After(from) && a.at.Before(to) {
			n++
		}
	}
	return n
}

func isGood(a reply) bool    { return a.refused == "" }
func isRefused(a reply) bool { return a.refused != "" }

// neverUnsharded stops the client, and fails if any reply had more in it than the shard
// owns. It returns how many lists succeeded and how many were refused.
func (as *replies) neverUnsharded(t *testing.T) (good, refused int) {
	t.Helper()
	as.stop()
	as.mu.Lock()
	defer as.mu.Unlock()
	for _, a := range as.all {
		if a.refused != "" {
			refused++
			continue
		}
		require.NoError(t, as.member.check(a), never)
		good++
	}
	return good, refused
}
