package command

import (
	"context"
	"fmt"
	"time"
)

// progress says what a command waits for.
type progress struct {
	*environment
	// said is the last line. Only changes are printed.
	said string
}

// say writes a line about progress, unless it repeats the last one. The standard output of -o json and
// yaml has the result alone.
func (p *progress) say(what, text string) {
	line := what + ": " + text
	if line == p.said {
		return
	}
	p.said = line
	out := p.Out
	if p.output != "table" {
		out = p.ErrOut
	}
	fmt.Fprintln(out, line)
}

// pause waits for the next poll. It returns false if the context ends first.
func (e *environment) pause(ctx context.Context) bool { return sleep(ctx, e.poll) }

// sleep waits for d. It returns false if the context ends first.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
