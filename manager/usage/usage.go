// Package usage keeps what operators request while their requests pass unchanged, for their owners, who
// may edit it. It is pure.
package usage

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/manager/layout"
)

const (
	// ConfigMap is the name of the record in each namespace with such an operator.
	ConfigMap = "ctrlmesh-usage"
	// Label marks the record.
	Label = v1alpha1.GroupName + "/usage"
	// Keep is how long the usage of a pod is kept after its last request.
	Keep = 48 * time.Hour
	// maxWorkloads bounds the workloads of a namespace, and maxPods the pods of each, with one for each
	// agent that served it.
	maxWorkloads = 16
	maxPods      = 8
	// maxBytes bounds the encoded usage of one workload. All of a namespace fit into one ConfigMap.
	maxBytes = 56 << 10
)

// Record is what the workloads of a namespace requested, by key.
type Record map[string]*meshv1.WorkloadUsage

// Key returns the key of a workload.
func Key(w layout.Workload) string { return strings.ToLower(w.Kind) + "." + w.Name }

// Decode returns the record in the data of a ConfigMap, without what cannot be decoded, and without names
// that nothing can have.
func Decode(data map[string]string) Record {
	out := Record{}
	for key, text := range data {
		of := &meshv1.WorkloadUsage{}
		if len(text) <= maxBytes && (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal([]byte(text), of) == nil {
			out[key] = bounded(of)
		}
	}
	return out
}

// bounded returns what users may see of a record.
func bounded(of *meshv1.WorkloadUsage) *meshv1.WorkloadUsage {
	out := &meshv1.WorkloadUsage{}
	for _, p := range of.GetPods()[:min(len(of.GetPods()), maxPods)] {
		if is := Bounded(p.GetUsage()); is != nil && namesObject(p.GetUid()) && namesObject(p.GetName()) {
			out.Pods = append(out.Pods, &meshv1.PodUsage{Uid: p.GetUid(), Name: p.GetName(), Usage: is})
		}
	}
	return out
}

// Encode returns the data of a ConfigMap.
func (r Record) Encode() (map[string]string, error) {
	out := map[string]string{}
	for key, of := range r {
		text, err := encode(of)
		if err != nil {
			return nil, err
		}
		out[key] = text
	}
	return out, nil
}

// encode leaves out the oldest pods if it is too long.
func encode(of *meshv1.WorkloadUsage) (string, error) {
	for n := len(of.GetPods()); ; n-- {
		text, err := protojson.Marshal(&meshv1.WorkloadUsage{Pods: of.GetPods()[:n]})
		if err != nil || len(text) <= maxBytes || n == 0 {
			return string(text), err
		}
	}
}

// Update replaces what is known of a pod as its agent, which began to count at since_ms, reports it.
func (r Record) Update(key string, pod *meshv1.PodUsage) {
	of := r[key]
	if of == nil {
		of = &meshv1.WorkloadUsage{}
		r[key] = of
	}
	of.Pods = append(slices.DeleteFunc(of.Pods, func(p *meshv1.PodUsage) bool {
		return p.GetUid() == pod.GetUid() && p.GetUsage().GetSinceMs() == pod.GetUsage().GetSinceMs()
	}), pod)
}

// Prune removes what is older than Keep, and what is more than the bounds: the oldest first.
func (r Record) Prune(now time.Time) {
	for key, of := range r {
		of.Pods = slices.DeleteFunc(of.Pods, func(p *meshv1.PodUsage) bool { return now.Sub(last(p)) > Keep })
		slices.SortFunc(of.Pods, func(a, b *meshv1.PodUsage) int {
			return cmp.Or(last(b).Compare(last(a)), strings.Compare(a.GetUid(), b.GetUid()))
		})
		if of.Pods = of.Pods[:min(len(of.Pods), maxPods)]; len(of.Pods) == 0 {
			delete(r, key)
		}
	}
	for len(r) > maxWorkloads {
		oldest := ""
		for key, of := range r {
			if oldest == "" || cmp.Or(last(of.Pods[0]).Compare(last(r[oldest].Pods[0])), strings.Compare(key, oldest)) < 0 {
				oldest = key
			}
		}
		delete(r, oldest)
	}
}

// Equal reports whether two records have the same content.
func (r Record) Equal(other Record) bool {
	return maps.EqualFunc(r, other, func(a, b *meshv1.WorkloadUsage) bool { return proto.Equal(a, b) })
}

// last is when a pod sent its last request.
func last(p *meshv1.PodUsage) time.Time { return time.UnixMilli(p.GetUsage().GetLastMs()) }
