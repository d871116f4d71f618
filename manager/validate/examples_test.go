package validate

import (
	"bytes"
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

// The examples of fields have all that there are, and each value that a field may have,
// if only in a comment; and they are taken without a warning in pods that trust the
// egress CA.
func TestExamplesShowEveryField(t *testing.T) {
	trusting := func() bool { return true }
	for kind, judge := range map[string]func(*testing.T, []byte){
		"CircuitBreaker": func(t *testing.T, o []byte) {
			c := &v1alpha1.CircuitBreaker{}
			require.NoError(t, yaml.UnmarshalStrict(o, c))
			require.Empty(t, Breaker(c))
			require.Empty(t, breakerWarnings(c, trusting))
		},
		"FaultInjection": func(t *testing.T, o []byte) {
			f := &v1alpha1.FaultInjection{}
			require.NoError(t, yaml.UnmarshalStrict(o, f))
			require.Empty(t, Injection(f))
			require.Empty(t, injectionWarnings(f, trusting))
		},
		"ShardingConfig": func(t *testing.T, o []byte) {
			c := &v1alpha1.ShardingConfig{}
			require.NoError(t, yaml.UnmarshalStrict(o, c))
			require.Empty(t, Config(c))
		},
	} {
		t.Run(kind, func(t *testing.T) {
			of := newCRD(t, strings.ToLower(kind)+"s")
			text, err := os.ReadFile("../../deploy/examples/" + strings.ToLower(kind) + "-fields.yaml")
			require.NoError(t, err)
			shown := map[string]bool{}
			for doc := range bytes.SplitSeq(text, []byte("\n---\n")) {
				o := map[string]any{}
				require.NoError(t, yaml.Unmarshal(doc, &o))
				require.Equal(t, kind, o["kind"])
				fields(o["spec"], "spec", shown)
				require.Empty(t, of.admit(o))
				admitted, err := json.Marshal(o)
				require.NoError(t, err)
				judge(t, admitted)
				judge(t, doc)
			}
			spec := of.Structural.Properties["spec"]
			demand(t, &spec, "spec", shown, string(text))
		})
	}
}

// fields notes which there are in a value.
func fields(v any, at string, shown map[string]bool) {
	shown[at] = true
	switch v := v.(type) {
	case map[string]any:
		for k, v := range v {
			fields(v, at+"."+k, shown)
		}
	case []any:
		for _, v := range v {
			fields(v, at, shown)
		}
	}
}

// demand has all fields of a schema shown. What label selectors are made of is known, and of
// lists of verbs some suffice.
func demand(t *testing.T, s *schema.Structural, at string, shown map[string]bool, text string) {
	if strings.HasSuffix(strings.ToLower(at), "selector") && s.Properties["matchLabels"].Type != "" {
		return
	}
	for name, p := range s.Properties {
		if !shown[at+"."+name] {
			t.Errorf("%s.%s is not shown", at, name)
		}
		demand(t, &p, at+"."+name, shown, text)
	}
	if s.Items != nil && s.Items.Properties != nil {
		demand(t, s.Items, at, shown, text)
	}
	if s.ValueValidation == nil {
		return
	}
	for _, value := range s.ValueValidation.Enum {
		word := value.Object.(string)
		if ok, _ := regexp.MatchString(`\b`+regexp.QuoteMeta(word)+`\b`, text); !ok {
			t.Errorf("%s: %s is not shown", at, word)
		}
	}
}
