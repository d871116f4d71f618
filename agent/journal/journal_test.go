package journal

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// socket is that of the agent that served last.
var socket = [2]int64{1, 2}

// newJournal is the journal of an agent that serves.
func newJournal(t testing.TB, dir string) *Journal {
	t.Helper()
	j := unused(t, dir)
	j.Serving(socket)
	return j
}

// unused is the journal of an agent that does not serve yet.
func unused(t testing.TB, dir string) *Journal {
	t.Helper()
	j, err := Create(dir)
	require.NoError(t, err)
	t.Cleanup(j.Abandon)
	return j
}

// next returns the journal of the agent after, and what it knows of pods before.
func next(t *testing.T, dir string) (j *Journal, complete bool, pods map[string]<-chan struct{}) {
	t.Helper()
	j = unused(t, dir)
	earlier, complete, err := j.Earlier(socket)
	require.NoError(t, err)
	j.Serving(socket)
	pods = map[string]<-chan struct{}{}
	for _, e := range earlier {
		pods[e.UID] = e.Over
	}
	return j, complete, pods
}

func requireOpen(t *testing.T, over <-chan struct{}, d time.Duration) {
	t.Helper()
	require.NotNil(t, over)
	select {
	case <-over:
		t.Fatal("a write may be in flight")
	case <-time.After(d):
	}
}

func requireOver(t *testing.T, over <-chan struct{}) {
	t.Helper()
	select {
	case <-over:
	case <-time.After(30 * time.Second):
		t.Fatal("nothing is in flight")
	}
}

func TestMissingJournalIsNotComplete(t *testing.T) {
	_, complete, pods := next(t, t.TempDir())
	require.False(t, complete)
	require.Empty(t, pods)
}

func TestOnlyTheLastAgentsJournalIsComplete(t *testing.T) {
	dir := t.TempDir()
	killed := unused(t, dir)
	killed.Abandon()
	_, complete, err := unused(t, dir).Earlier(socket)
	require.NoError(t, err)
	require.False(t, complete, "its agent never served")

	served := newJournal(t, dir)
	p := served.Pod("a") // else the journal is removed
	p.Unseen(time.Hour)
	p.Begin()
	served.Abandon()
	third := unused(t, dir)
	for _, last := range [][2]int64{{1, 3}, {2, 2}, {}} {
		_, complete, err = third.Earlier(last)
		require.NoError(t, err)
		require.False(t, complete, "another agent served after it")
	}
	_, complete, err = third.Earlier(socket)
	require.NoError(t, err)
	require.True(t, complete)
}

func TestJournalWithoutWritesIsRemoved(t *testing.T) {
	dir := t.TempDir()
	j := newJournal(t, dir)
	p := j.Pod("a")
	p.Begin()
	p.End()
	j.Abandon()
	_, complete, pods := next(t, dir)
	require.True(t, complete)
	require.Empty(t, pods)
	require.Eventually(t, func() bool {
		_, err := os.Stat(j.path)
		return os.IsNotExist(err)
	}, 30*time.Second, time.Millisecond, "it is of no use any more")
}

func TestWritesOfExitedAgentEndByDeadline(t *testing.T) {
	const unseen = 300 * time.Millisecond
	dir := t.TempDir()
	j := newJournal(t, dir)
	p := j.Pod("a")
	p.Unseen(unseen)
	p.Unseen(time.Millisecond) // what began before goes on as long
	p.Begin()
	j.Pod("b")
	j.Abandon()

	began := time.Now()
	second, complete, pods := next(t, dir)
	require.True(t, complete)
	require.Len(t, pods, 1)
	second.Abandon() // it dies as well

	_, complete, again := next(t, dir)
	require.True(t, complete)
	requireOver(t, again["a"])
	require.GreaterOrEqual(t, time.Since(began), unseen)
	requireOver(t, pods["a"])
}

func TestDeadlineOfLostWriteOutlivesTheAgent(t *testing.T) {
	const left = 300 * time.Millisecond
	dir := t.TempDir()
	j := newJournal(t, dir)
	p := j.Pod("a")
	p.Unseen(time.Hour) // counts for no write whose loss was seen
	began := time.Now()
	p.Begin()
	p.Lose(left)
	j.Abandon()
	_, _, pods := next(t, dir)
	requireOver(t, pods["a"])
	require.GreaterOrEqual(t, time.Since(began), left)
}

func TestWritesOfDrainingAgentEndWithIt(t *testing.T) {
	dir := t.TempDir()
	j := newJournal(t, dir)
	a, b := j.Pod("a"), j.Pod("b")
	a.Begin()
	_, complete, pods := next(t, dir)
	require.True(t, complete)
	requireOpen(t, pods["b"], 2*pollInterval)
	b.Close()
	requireOver(t, pods["b"])
	a.Close()
	requireOpen(t, pods["a"], 2*pollInterval)
	require.NoError(t, j.Retire())
	require.FileExists(t, j.path, "a write is in flight")
	a.End()
	requireOver(t, pods["a"])
	require.NoError(t, j.Retire())
	require.NoFileExists(t, j.path)
}

const killedDir = "CTRLMESH_TEST_JOURNAL"

// TestWritesOfKilledProcessAreRead kills a process that runs this test as well.
func TestWritesOfKilledProcessAreRead(t *testing.T) {
	if dir := os.Getenv(killedDir); dir != "" {
		j, err := Create(dir)
		require.NoError(t, err)
		j.Serving(socket)
		p := j.Pod("a")
		p.Unseen(time.Hour)
		p.Begin()
		j.Pod("b")
		_, _ = os.Stdout.WriteString("ready\n")
		select {}
	}
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], "-test.run=^TestWritesOfKilledProcessAreRead$")
	cmd.Env = append(os.Environ(), killedDir+"="+dir)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	_, err = bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)

	_, complete, pods := next(t, dir)
	require.True(t, complete)
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	requireOver(t, pods["b"])
	requireOpen(t, pods["a"], 2*pollInterval)
}

// An agent that hangs may still serve: only its death is an end.
func TestWritesOfHungAgentDoNotEnd(t *testing.T) {
	dir := t.TempDir()
	j := newJournal(t, dir)
	j.Pod("a")
	_, _, pods := next(t, dir)
	requireOpen(t, pods["a"], 2*pollInterval)
	j.Abandon()
	requireOver(t, pods["a"])
}

func TestJournalOfAnotherBootIsRemoved(t *testing.T) {
	dir := t.TempDir()
	j := newJournal(t, dir)
	j.Pod("a").Begin()
	copy(j.mem[atBoot:], "another")
	j.Abandon()
	_, complete, pods := next(t, dir)
	require.False(t, complete)
	require.Empty(t, pods)
	require.NoFileExists(t, j.path)
}

func TestUnreadableJournalIsNotComplete(t *testing.T) {
	for name, spoil := range map[string]func(t *testing.T, j *Journal){
		"short":         func(t *testing.T, j *Journal) { require.NoError(t, os.Truncate(j.path, size)) },
		"other version": func(_ *testing.T, j *Journal) { j.mem[atVersion]++ },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			j := newJournal(t, dir)
			spoil(t, j)
			for range 2 { // while its agent lives, and after a restart of another
				other := unused(t, dir)
				_, complete, err := other.Earlier(socket)
				require.ErrorIs(t, err, errFormat)
				require.False(t, complete)
				other.Serving(socket)
				require.FileExists(t, j.path)
			}
			j.Abandon()
			last := unused(t, dir)
			_, complete, err := last.Earlier(socket)
			require.ErrorIs(t, err, errFormat)
			require.False(t, complete)
			require.FileExists(t, j.path, "nothing is recorded in its place yet")
			last.Serving(socket)
			require.NoFileExists(t, j.path)
			_, complete, _ = next(t, dir)
			require.True(t, complete)
		})
	}
}

func TestJournalInMemoryIsNotComplete(t *testing.T) {
	dir := t.TempDir()
	j := InMemory(dir)
	t.Cleanup(j.Abandon)
	_, complete, err := j.Earlier(socket)
	require.NoError(t, err)
	require.False(t, complete)
	j.Serving(socket)
	p := j.Pod("a")
	p.Begin()
	p.End()
	p.Close()
	_, complete, err = j.Earlier(socket)
	require.NoError(t, err)
	require.True(t, complete, "of its own writes it knows")
	require.NoError(t, j.Retire())
	_, complete, _ = next(t, dir)
	require.False(t, complete, "the next agent knows nothing of them")
}

// A link to nothing is listed and cannot be opened, like a journal that its agent
// removes at that moment.
func TestJournalRemovedWhileOthersAreRead(t *testing.T) {
	dir := t.TempDir()
	newJournal(t, dir)
	require.NoError(t, os.Symlink("nowhere", filepath.Join(dir, "retired"+suffix)))
	_, complete, _ := next(t, dir)
	require.True(t, complete)
}

func TestSlotsAreReused(t *testing.T) {
	dir := t.TempDir()
	j := newJournal(t, dir)
	closed := j.Pod("closed")
	for range slots - 1 {
		j.Pod("x")
	}
	closed.Close()
	closed.slot.closed().Add(-int64(reuseAfter))
	reused := j.Pod("y")
	require.Equal(t, "y", reused.slot.uid())
	require.Zero(t, reused.slot.closed().Load())
	require.Zero(t, j.mem.overflow().Load())

	beyond := j.Pod("beyond")
	beyond.Begin()
	j.Abandon()
	_, complete, _ := next(t, dir)
	require.False(t, complete)
}

func TestSlotIsNotReusedAtOnce(t *testing.T) {
	j := newJournal(t, t.TempDir())
	old := j.Pod("old")
	old.Close()
	added := j.Pod("added")
	old.Begin() // under a policy that was replaced meanwhile
	require.Zero(t, added.slot.open().Load())
	old.End()
	added.Begin()
	require.EqualValues(t, 1, added.slot.open().Load())
}

func TestLongUIDsCountAsOverflow(t *testing.T) {
	j := newJournal(t, t.TempDir())
	j.Pod(string(make([]byte, maxUID+1)))
	require.EqualValues(t, 1, j.mem.overflow().Load())
}

func TestUnfinishedJournalsAreRemoved(t *testing.T) {
	dir := t.TempDir()
	files := map[string]*os.File{}
	for _, name := range []string{"making", "locked", "killed"} {
		f, err := os.Create(filepath.Join(dir, name+newSuffix))
		require.NoError(t, err)
		t.Cleanup(func() { _ = f.Close() })
		files[name] = f
		if name != "making" {
			long := time.Now().Add(-time.Hour)
			require.NoError(t, os.Chtimes(f.Name(), long, long))
		}
	}
	_, err := tryLock(files["locked"])
	require.NoError(t, err)
	_, complete, _ := next(t, dir)
	require.False(t, complete)
	require.FileExists(t, files["making"].Name())
	require.FileExists(t, files["locked"].Name())
	require.NoFileExists(t, files["killed"].Name())
}

// What the request path pays for each write.
func BenchmarkWrite(b *testing.B) {
	p := newJournal(b, b.TempDir()).Pod("a")
	for b.Loop() {
		p.Begin()
		p.End()
	}
}
