package sysdump

import (
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// redacted stands for what was left out.
const redacted = "REDACTED"

// keptAnnotations are parts of the keys of annotations whose values are kept. Those of others may hold
// anything.
var keptAnnotations = []string{"kusionstack.io/", "kruise.io/", "kubernetes.io/", "k8s.io/"}

// applied is a copy of a whole object.
const applied = "kubectl.kubernetes.io/last-applied-configuration"

// clean removes from an object what does not explain the state of the mesh, and what may be a secret.
// own says that it is of the mesh, whose arguments are known to have none.
func clean(o *unstructured.Unstructured, own bool) {
	o.SetManagedFields(nil)
	unstructured.RemoveNestedField(o.Object, "status", "images") // of a node, and long
	walk(o.Object, own)
}

// walk cleans a value within an object, and all within it.
func walk(value any, own bool) any {
	switch v := value.(type) {
	case string:
		return scrub(v)
	case []any:
		for i := range v {
			v[i] = walk(v[i], own)
		}
	case map[string]any:
		delete(v, "openAPIV3Schema") // of a definition, and long
		for key, within := range v {
			v[key] = field(key, within, own)
		}
	}
	return value
}

// field cleans the value of a field.
func field(key string, value any, own bool) any {
	switch key {
	case "env", "httpHeaders": // names and values
		for _, one := range list(value) {
			if pair, ok := one.(map[string]any); ok && pair["value"] != nil {
				pair["value"] = redacted
			}
		}
	case "command", "args":
		if words := list(value); !own && words != nil {
			return arguments(words)
		}
	case "annotations":
		if all, ok := value.(map[string]any); ok {
			delete(all, applied)
			for key := range all {
				if !slices.ContainsFunc(keptAnnotations, func(part string) bool { return strings.Contains(key, part) }) {
					all[key] = redacted
				}
			}
		}
	}
	return walk(value, own)
}

func list(value any) []any {
	words, _ := value.([]any)
	return words
}

// arguments keeps the names of flags, and the program.
func arguments(words []any) []any {
	out := make([]any, len(words))
	for i, w := range words {
		word, _ := w.(string)
		name, _, valued := strings.Cut(word, "=")
		switch {
		case !strings.HasPrefix(word, "-") && i > 0, strings.ContainsAny(name, " \n"):
			out[i] = redacted
		case valued:
			out[i] = name + "=" + redacted
		default:
			out[i] = word
		}
	}
	return out
}

// secrets are what no text may have, wherever it is: keys, tokens, and passwords of URLs.
var secrets = []*regexp.Regexp{
	regexp.MustCompile(`(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)`),
	regexp.MustCompile(`\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*`),
	regexp.MustCompile(`(?i)\b(bearer|basic) +[A-Za-z0-9._~+/=-]{8,}`),
}

var userinfo = regexp.MustCompile(`://[^/@\s"']+@`)

// scrub replaces secrets within a text.
func scrub(text string) string {
	for _, s := range secrets {
		text = s.ReplaceAllLiteralString(text, redacted)
	}
	return userinfo.ReplaceAllLiteralString(text, "://"+redacted+"@")
}
