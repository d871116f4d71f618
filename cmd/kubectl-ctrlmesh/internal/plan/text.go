package plan

import (
	"fmt"
	"slices"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
)

// Findings reports whether a shard would not work.
func (p Preview) Findings() bool { return len(p.Problems) > 0 }

// WriteText implements render.Report.
func (p Preview) WriteText(t *render.Text) {
	t.Line("%s", p.summary())
	rows := collect.Map(p.Shards, func(s Shard) []string {
		return []string{s.title, render.Optional(s.Keys), render.Optional(s.Objects), s.Heaviest, s.pods()}
	})
	t.Table([]string{"SHARD", strings.ToUpper(unit(p.Key, 2)), "OBJECTS", "HEAVIEST", "PODS"}, rows)
	if len(p.Problems)+len(p.Locks)+len(p.Notes) > 0 {
		t.Line("")
	}
	for _, problem := range p.Problems {
		t.Line("! %s", problem)
	}
	for _, l := range p.Locks {
		t.Line("lock %s", l)
	}
	for _, note := range p.Notes {
		t.Line("? %s", note)
	}
}

func (p Preview) summary() string {
	text := p.title
	if p.Skew > 0 {
		text += fmt.Sprintf("; the heaviest has %.2f times the mean", p.Skew)
	}
	if p.Moved != nil {
		text += fmt.Sprintf("; %d %s would move", *p.Moved, unit(p.Key, *p.Moved))
	}
	return text
}

func (s Shard) pods() string {
	texts := slices.Clone(s.Pods)
	if s.Lacks > 0 {
		texts = append(texts, fmt.Sprintf("(lacks %d)", s.Lacks))
	}
	return strings.Join(texts, " ")
}
