package kube

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/tests/audit"
)

func TestMarkIsBeginningOfLine(t *testing.T) {
	for content, want := range map[string]int64{"": 0, "one": 0, "one\n": 4, "one\ntw": 4, "one\ntwo\n": 8} {
		c, write := emptyLog(t)
		write(content)
		m, err := c.Mark()
		require.NoError(t, err)
		require.Equal(t, want, m.offset, "%q", content)
	}
}

func TestMarkWithoutAuditLogIsAnError(t *testing.T) {
	_, err := (&Cluster{Root: t.TempDir()}).Mark()
	require.ErrorContains(t, err, "reading the audit log")
}

func TestReplacedAuditLogIsAnError(t *testing.T) {
	c, write := emptyLog(t)
	write("one\n")
	m, err := c.Mark()
	require.NoError(t, err)
	require.NoError(t, os.Rename(c.AuditLog(), c.AuditLog()+".old"))
	require.NoError(t, os.WriteFile(c.AuditLog(), []byte("two\nthree\n"), 0o600))
	_, err = c.RequestLog(m, audit.Callers{}).Requests()
	require.ErrorContains(t, err, "reading the audit log: it was replaced since the mark")
}

func TestRequestLogReadsOnlyWhatIsNew(t *testing.T) {
	c, write := emptyLog(t)
	event := func(id string, code int) string {
		return fmt.Sprintf(`{"auditID":%q,"stage":"ResponseComplete","verb":"get","responseStatus":{"code":%d},"requestReceivedTimestamp":%q,`+
			`"user":{"username":"system:serviceaccount:ns:sa","extra":{"authentication.kubernetes.io/pod-name":["pod"]}}}`+"\n",
			id, code, time.Now().Add(time.Minute).UTC().Format("2006-01-02T15:04:05.000000Z"))
	}
	before, after := event("before", 200), event("after", 200)
	write(before + after[:20]) // the mark is taken while a line is written
	m, err := c.Mark()
	require.NoError(t, err)
	log := c.RequestLog(m, audit.Callers{Pods: []string{"ns/pod"}})
	requireCodes := func(want map[string]int32) {
		t.Helper()
		requests, err := log.Requests()
		require.NoError(t, err)
		got := map[string]int32{}
		for _, r := range requests {
			got[r.ID] = r.Code
		}
		require.Equal(t, want, got)
	}
	requireCodes(map[string]int32{})
	write(after[20:])
	requireCodes(map[string]int32{"after": 200})
	requireCodes(map[string]int32{"after": 200})

	// What was read is not read again.
	require.NoError(t, os.WriteFile(c.AuditLog(), make([]byte, len(before)+len(after)), 0o600))
	write(event("watch", 0) + event("watch", 200))
	requireCodes(map[string]int32{"after": 200, "watch": 200})
	write(event("watch", 410)) // a later stage of the same request
	requireCodes(map[string]int32{"after": 200, "watch": 410})
}

// emptyLog returns a cluster whose audit log is empty, and a function that appends to the log.
func emptyLog(t *testing.T) (c *Cluster, write func(string)) {
	t.Helper()
	c = &Cluster{Root: t.TempDir()}
	require.NoError(t, os.Mkdir(filepath.Dir(c.AuditLog()), 0o755))
	f, err := os.OpenFile(c.AuditLog(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return c, func(text string) {
		_, err := f.WriteString(text)
		require.NoError(t, err)
	}
}
