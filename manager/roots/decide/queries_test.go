package decide

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/query"
)

func TestQueriesAreExpanded(t *testing.T) {
	for name, test := range map[string]struct {
		query, namespace, shard string
		pods                    []string
		want                    string
	}{
		"no variables":      {`label_replace(up, "a", "$1", "b", "(.*)$")`, "ns", "s", []string{"p"}, `label_replace(up, "a", "$1", "b", "(.*)$")`},
		"each variable":     {`{namespace="$namespace", shard='$shard', pod=~"$pods"}`, "ns", "op-0-canary", []string{"op-0", "op-1"}, `{namespace="ns", shard='op-0-canary', pod=~"(?:op-0|op-1)"}`},
		"several times":     {`$shard/$shard`, "ns", "s", nil, `s/s`},
		"no second time":    {`$shard`, "ns", "$pods", nil, `\x24pods`},
		"names with dots":   {"{shard=`$shard`, pod=~`x-$pods`}", "ns", "a.b", []string{"a.b-0"}, "{shard=`a.b`, pod=~`x-(?:a[.]b-0)`}"},
		"hostile shard":     {`{shard="$shard"}`, "ns", "\"} or vector(0) # `'\\\n", nil, `{shard="\x22\x7d\x20or\x20vector\x280\x29\x20\x23\x20\x60\x27\x5c\x0a"}`},
		"hostile namespace": {`{namespace='$namespace'}`, "'", "s", nil, `{namespace='\x27'}`},
		"hostile pods":      {`{pod=~"$pods"}`, "ns", "s", []string{`.*`, `a|b`, `")`}, `{pod=~"(?:[.]\\x2a|a\\x7cb|\\x22\\x29)"}`},
	} {
		t.Run(name, func(t *testing.T) {
			got, problem := expand(test.query, test.namespace, test.shard, podsPattern(test.pods))
			require.Empty(t, problem)
			require.Equal(t, test.want, got)
		})
	}
}

func TestExpandedQueriesAreBounded(t *testing.T) {
	pods := podsPattern([]string{strings.Repeat("p", 250), strings.Repeat("q", 250)})
	_, problem := expand(strings.Repeat("$pods ", 30), "ns", "s", pods)
	require.Empty(t, problem)
	text, problem := expand(strings.Repeat("$pods ", 40), "ns", "s", pods)
	require.Empty(t, text)
	require.Equal(t, "with the names of its pods it exceeds 16 KiB: use $pods less often, or match $shard", problem)
}

func TestAnswersAreJudged(t *testing.T) {
	after := time.Unix(1e9, 0)
	number := func(values ...float64) query.Answer {
		return query.Answer{At: after, Numbers: len(values), Min: values[0], Max: values[len(values)-1]}
	}
	from, to := new(v1alpha1.Decimal("-0.5")), new(v1alpha1.Decimal("5"))
	for name, test := range map[string]struct {
		least, most    *v1alpha1.Decimal
		answer         query.Answer
		age            time.Duration
		exceeds, lacks string
	}{
		"within both":      {from, to, number(-0.5, 5), 0, "", ""},
		"above":            {from, to, number(0, 7.3), 0, `query "q" is 7.3, and at most 5 is allowed`, ""},
		"infinite":         {from, to, number(0, math.Inf(1)), 0, `query "q" is +Inf, and at most 5 is allowed`, ""},
		"below":            {from, to, number(-0.6, 0), 0, `query "q" is -0.6, and at least -0.5 is required`, ""},
		"no upper bound":   {from, nil, number(1e9), 0, "", ""},
		"no lower bound":   {nil, to, number(-1e9), 0, "", ""},
		"never":            {from, to, query.Answer{}, 0, "", "its result counts from 01:46:40 on"},
		"problem":          {from, to, query.Answer{At: after, Problem: "it is empty"}, 0, "", "it is empty"},
		"early problem":    {from, to, query.Answer{At: after.Add(-1), Problem: "it is empty"}, 0, "", "it is empty"},
		"early":            {from, to, query.Answer{At: after.Add(-1), Numbers: 1, Min: 6, Max: 6}, 0, "", "its result counts from 01:46:40 on"},
		"NaN, and within":  {from, to, query.Answer{At: after, Numbers: 1, Problem: "it is NaN"}, 0, "", "it is NaN"},
		"NaN, and above":   {from, to, query.Answer{At: after, Numbers: 1, Max: 6, Problem: "it is NaN"}, 0, `query "q" is 6, and at most 5 is allowed`, ""},
		"not yet outdated": {from, to, number(6), answerAge, `query "q" is 6, and at most 5 is allowed`, ""},
		"outdated":         {from, to, number(6), answerAge + 1, "", "it has not been evaluated for 2m0s"},
		"outdated problem": {from, to, query.Answer{At: after, Problem: "it is empty"}, answerAge + 1, "", "it has not been evaluated for 2m0s"},
		"outdated, within": {from, to, number(0), time.Hour, "", "it has not been evaluated for 2m0s"},
	} {
		t.Run(name, func(t *testing.T) {
			exceeds, lacks := judgeAnswer(v1alpha1.AnalysisQuery{Name: "q", Min: test.least, Max: test.most}, test.answer, after, after.Add(test.age))
			require.Equal(t, test.exceeds, exceeds)
			require.Equal(t, test.lacks, lacks)
		})
	}
}
