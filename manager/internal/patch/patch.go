// Package patch makes the JSON patches of admission reviews.
package patch

import (
	"maps"
	"slices"
	"strings"

	"gomodules.xyz/jsonpatch/v2"
)

// Strings sets labels or annotations, which are at a path, and removes those whose value is
// empty.
func Strings(path string, have, want map[string]string) (ops []jsonpatch.JsonPatchOperation) {
	want = maps.Clone(want)
	maps.DeleteFunc(want, func(k, v string) bool { return have[k] == v })
	if have == nil {
		return []jsonpatch.JsonPatchOperation{jsonpatch.NewOperation("add", path, want)}
	}
	for _, k := range slices.Sorted(maps.Keys(want)) {
		at := path + "/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(k)
		if want[k] == "" {
			ops = append(ops, jsonpatch.NewOperation("remove", at, nil))
		} else { // "add" replaces a member that is there
			ops = append(ops, jsonpatch.NewOperation("add", at, want[k]))
		}
	}
	return ops
}
