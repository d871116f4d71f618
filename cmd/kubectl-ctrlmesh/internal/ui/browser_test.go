package ui

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/meshtest"
)

var pictures = flag.String("pictures", "", "directory in which to write pictures of the pages")

// tab is a tab of a browser without a screen, which speaks the Chrome DevTools Protocol over a pipe:
// messages in JSON that end with a zero byte.
type tab struct {
	*testing.T
	to      *os.File
	from    *bufio.Reader
	session string
	last    int // id
}

// newTab starts Debian's chromium.
func newTab(t *testing.T) *tab {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		t.Skip("needs Debian's package chromium: make pages installs it")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	reads, to, err := os.Pipe()
	require.NoError(t, err)
	from, writes, err := os.Pipe()
	require.NoError(t, err)
	browser := exec.CommandContext(ctx, path, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1000,560", "--remote-debugging-pipe", "--user-data-dir="+t.TempDir())
	browser.ExtraFiles = []*os.File{reads, writes} // 3 and 4
	browser.Stderr = new(strings.Builder)          // a pipe, so that Wait waits for its processes, which write into its directory, too
	browser.WaitDelay = time.Minute
	require.NoError(t, browser.Start())
	t.Cleanup(func() {
		cancel()
		_ = browser.Wait() // it was killed
		for _, f := range browser.ExtraFiles {
			_ = f.Close()
		}
	})
	b := &tab{T: t, to: to, from: bufio.NewReader(from)}
	var target struct{ TargetID string }
	b.call(&target, "Target.createTarget", map[string]any{"url": "about:blank"})
	var attached struct{ SessionID string }
	b.call(&attached, "Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true})
	b.session = attached.SessionID
	return b
}

// call calls a method, and skips events until its result.
func (b *tab) call(result any, method string, params map[string]any) {
	b.Helper()
	require.NoError(b, b.try(result, method, params))
}

// try is call for methods that may fail.
func (b *tab) try(result any, method string, params map[string]any) error {
	b.last++
	request := map[string]any{"id": b.last, "method": method, "params": params}
	if b.session != "" {
		request["sessionId"] = b.session
	}
	text, err := json.Marshal(request)
	if err == nil {
		_, err = b.to.Write(append(text, 0))
	}
	for err == nil {
		var answer struct {
			ID     int
			Result json.RawMessage
			Error  *struct{ Message string }
		}
		if text, err = b.from.ReadBytes(0); err == nil {
			err = json.Unmarshal(text[:len(text)-1], &answer)
		}
		switch {
		case err != nil || answer.ID != b.last:
		case answer.Error != nil:
			return errors.New(answer.Error.Message)
		default:
			return json.Unmarshal(answer.Result, result)
		}
	}
	return fmt.Errorf("%s: the browser has ended: %w", method, err)
}

// shows opens an address, and waits until a condition of the page holds.
func (b *tab) shows(url, condition string) {
	b.Helper()
	b.call(new(any), "Page.navigate", map[string]any{"url": url})
	var is struct{ Result struct{ Value any } }
	for deadline := time.Now().Add(time.Minute); is.Result.Value != true; time.Sleep(50 * time.Millisecond) {
		err := b.try(&is, "Runtime.evaluate", map[string]any{"expression": condition}) // it fails while another page loads
		if time.Now().After(deadline) {
			_ = b.try(&is, "Runtime.evaluate", map[string]any{"expression": "document.documentElement.outerHTML"})
			require.FailNow(b, "the page is another one", "%s: %v: %v", condition, err, is.Result.Value)
		}
	}
}

// picture writes what is shown to a file, if pictures are wanted.
func (b *tab) picture(name string) {
	b.Helper()
	if *pictures == "" {
		return
	}
	var shot struct{ Data []byte }
	b.call(&shot, "Page.captureScreenshot", map[string]any{"format": "png"})
	require.NoError(b, os.WriteFile(filepath.Join(*pictures, name+".png"), shot.Data, 0o644)) // it is committed
}

// A real browser runs the script under the policy of the pages, and shows them.
func TestPagesInABrowser(t *testing.T) {
	c := meshtest.Healthy(t)
	observed(c)
	logs(t, c)
	c.Counts()
	var passed atomic.Int64 // beside what passes with each reading
	clock := c.Clock
	c.Clock = func() time.Time { return clock().Add(time.Duration(passed.Load())) }
	b, _ := open(t, c)
	page := newTab(t)
	const live = `document.getElementById("state")?.textContent === "live"`
	page.shows(b.url, live+` && document.querySelectorAll("main a").length === 4`)
	page.picture("ui-overview")
	page.shows(b.url+"/operators/operator-demo/operator-demo?key=team-42", live+` && document.querySelectorAll("meter").length === 2`)
	page.picture("ui-operator")
	page.shows(b.url+"/pods/operator-demo/od-1?verb=update&resource=foos&namespace=team-42", live+` && document.getElementById("verdict").textContent.startsWith("403") && document.querySelectorAll("tbody tr").length === 3`)
	page.picture("ui-pod")
	page.shows(b.url+"/costs", `document.body.textContent.includes("Measuring")`)
	passed.Add(int64(costsEvery))
	page.shows(b.url+"/costs", `document.querySelectorAll("tbody tr").length === 4`)
	page.picture("ui-costs")
	page.shows(b.url+"/advice/operator-demo/statefulset/tally", `document.querySelector("code").textContent.startsWith("kubectl ctrlmesh adopt")`)
}
