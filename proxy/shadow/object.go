package shadow

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/sample"
)

const (
	// maxSize bounds an object, as Size counts it.
	maxSize = 4 << 20
	// maxDepth bounds the fields below fields. What is below is one value.
	maxDepth = 64
	// fieldSize is what a field takes in memory besides its path, in bytes.
	fieldSize = 64
)

// Object is an object as it is compared.
type Object struct {
	Name, UID, Version string
	Deleting           bool
	values             values
	size               int
}

// Size returns what the object takes in memory, in bytes.
func (o *Object) Size() int { return o.size }

// values are hashes of the scalar values of an object, by path. Items of lists have keys if all
// have a different name or type, and indices otherwise: "status.conditions[Ready].reason".
type values map[string]value

// value is a scalar value.
type value struct {
	hash uint64
	at   int64 // of a time: in nanoseconds since 1970; else 0
}

// equals reports whether two values are equal. Times are if they differ by a window at most.
func (v value) equals(w value, window time.Duration) bool {
	return v.hash == w.hash || v.at != 0 && w.at != 0 && time.Duration(v.at-w.at).Abs() <= window
}

// seed is the same for all hashes of a process.
var seed = maphash.MakeSeed()

// set are fields that the apiserver sets, or that say nothing about the object.
var set = []string{
	"apiVersion", "kind", "metadata.managedFields", "metadata.resourceVersion", "metadata.generation",
	"metadata.uid", "metadata.creationTimestamp", "metadata.selfLink",
}

// allocated are fields that the apiserver allocates anew for each object that is created.
var allocated = []string{"spec.clusterIP", "spec.clusterIPs", "spec.ports[].nodePort", "spec.healthCheckNodePort"}

var errLarge = errors.New("the object has too many fields to be compared")

// Parse reads an object, except for the ignored fields: paths as in [Change.Paths].
func Parse(raw []byte, ignored []string) (*Object, error) {
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber()
	var tree map[string]any
	if err := decoder.Decode(&tree); err != nil {
		return nil, fmt.Errorf("reading an object: %w", err)
	}
	meta, _ := tree["metadata"].(map[string]any)
	if meta == nil {
		return nil, errors.New("reading an object: it has no metadata")
	}
	o := &Object{values: values{}}
	o.Name, _ = meta["name"].(string)
	o.UID, _ = meta["uid"].(string)
	o.Version, _ = meta["resourceVersion"].(string)
	o.Deleting = meta["deletionTimestamp"] != nil
	if o.add("", tree, 0); o.size > maxSize {
		return nil, errLarge
	}
	o.values.drop(set)
	o.values.drop(ignored)
	return o, nil
}

// add adds the values of a tree, except for those that say the same as if they were absent. It
// ends if they take too much.
func (o *Object) add(path string, tree any, depth int) {
	if o.size += len(path); o.size > maxSize {
		return
	}
	switch tree := tree.(type) {
	case nil:
		return
	case map[string]any:
		if depth < maxDepth {
			for key, v := range tree {
				o.add(strings.TrimPrefix(path+"."+key, "."), v, depth+1)
			}
			return
		}
	case []any:
		if depth < maxDepth {
			keys := keysOf(tree)
			for i, v := range tree {
				o.add(path+"["+keys[i]+"]", v, depth+1)
			}
			return
		}
	}
	o.values[path] = valueOf(tree)
	o.size += fieldSize
}

// keysOf returns what distinguishes the items of a list.
func keysOf(list []any) []string {
	for _, by := range []string{"name", "type"} {
		seen := map[string]bool{}
		keys := make([]string, 0, len(list))
		for _, item := range list {
			object, _ := item.(map[string]any)
			key, _ := object[by].(string)
			if key == "" || seen[key] || strings.Contains(key, "]") {
				break
			}
			seen[key] = true
			keys = append(keys, key)
		}
		if len(keys) == len(list) {
			return keys
		}
	}
	keys := make([]string, len(list))
	for i := range list {
		keys[i] = strconv.Itoa(i)
	}
	return keys
}

func valueOf(tree any) value {
	text, _ := json.Marshal(tree) // decoded from JSON, so it encodes
	v := value{hash: maphash.Bytes(seed, text)}
	if s, ok := tree.(string); ok && len(s) <= len(time.RFC3339Nano) {
		if at, err := time.Parse(time.RFC3339, s); err == nil {
			v.at = at.UnixNano()
		}
	}
	return v
}

// drop removes fields by path, with all below them.
func (v values) drop(paths []string) {
	if len(paths) == 0 {
		return
	}
	maps.DeleteFunc(v, func(path string, _ value) bool {
		path = general(path)
		return slices.ContainsFunc(paths, func(of string) bool {
			rest, ok := strings.CutPrefix(path, of)
			return ok && (rest == "" || rest[0] == '.' || rest[0] == '[')
		})
	})
}

// general returns a path without what distinguishes items of lists.
func general(path string) string {
	if !strings.Contains(path, "[") {
		return path
	}
	var out strings.Builder
	for path != "" {
		head, rest, ok := strings.Cut(path, "[")
		out.WriteString(head)
		if !ok {
			break
		}
		out.WriteString("[]")
		_, path, _ = strings.Cut(rest, "]")
	}
	return out.String()
}

// Change is what a write changes of an object: the value of each field after it, nil if it
// removes the field.
type Change map[string]*value

// Between returns what a write changes of an object.
func Between(before, after *Object) Change {
	out := Change{}
	for path, v := range after.values {
		if was, ok := before.values[path]; !ok || was != v {
			out[path] = &v
		}
	}
	for path := range before.values {
		if _, ok := after.values[path]; !ok {
			out[path] = nil
		}
	}
	return out
}

// Creation returns what the creation of an object asks for: its existence, and the fields of the
// body that the apiserver has taken as they are, or, if the body is nil, all except for those that
// it allocates.
func Creation(body, created *Object) Change {
	after := maps.Clone(created.values)
	if body == nil {
		after.drop(allocated)
	} else {
		maps.DeleteFunc(after, func(path string, v value) bool { return body.values[path] != v })
	}
	change := Between(&Object{}, &Object{values: after})
	change[existence] = &value{}
	return change
}

// existence is the path that says whether there is an object.
const existence = ""

// Deletion returns what the deletion of an object changes.
func Deletion() Change { return Change{existence: nil} }

// shows reports whether an object has a value, or lacks it if want is nil. Times may differ by a
// window. o is nil if there is no object.
func (o *Object) shows(path string, want *value, window time.Duration) bool {
	switch {
	case path == existence:
		return want != nil && o != nil || want == nil && (o == nil || o.Deleting)
	case o == nil:
		return want == nil
	}
	is, ok := o.values[path]
	return want == nil && !ok || want != nil && ok && is.equals(*want, window)
}

// Paths returns the paths of the fields of a change, sorted and bounded, with "[]" for each item
// of a list; none if there should be an object, or should be none.
func (c Change) Paths() []string {
	if _, ok := c[existence]; ok {
		return nil
	}
	var out []string
	for path := range c {
		path = general(path)
		out = append(out, strings.ToValidUTF8(path[:min(len(path), meshv1.MaxFieldPath)], ""))
	}
	return sample.Least(meshv1.MaxShadowFields, out)
}
