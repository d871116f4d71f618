// Package answer reads the cluster for questions about one pod or workload. Commands and pages ask it.
//
//	explain.go   what the mesh does with the requests of a pod
//	requests.go  the last requests of a pod
//	owner.go     who owns a key, and who may write it
//	advise.go    whether an operator can be divided
package answer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/explain"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/operator"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
)

// Request is a request that a pod would send, as a user describes it.
type Request struct {
	explain.Request
	// Target is the resource, RESOURCE or RESOURCE/SUBRESOURCE, and the name of the object or "". The
	// fields Resource and Name follow from it.
	Target, Object string
	// All: it is for the objects of all namespaces.
	All bool
}

// Pod is what was read about a pod, for all questions about it.
type Pod struct {
	name   types.NamespacedName
	reader snapshot.Reader
	s      *snapshot.Snapshot
}

// AboutPod reads what the policy of a pod follows from.
func AboutPod(ctx context.Context, r snapshot.Reader, name types.NamespacedName) (Pod, error) {
	in := name.Namespace
	s, err := r.ReadAll(ctx, append(rulesIn(in), snapshot.Single(in, name.Name), snapshot.Configs(in), snapshot.Members(in))...)
	if err != nil {
		return Pod{}, err
	}
	if s.Subjects.Pod == nil {
		return Pod{}, fmt.Errorf("there is no pod %s in namespace %s: name another namespace by -n", name.Name, in)
	}
	return Pod{name, r, s}, r.Extend(ctx, s, snapshot.Programs, snapshot.Settings, snapshot.Namespaces)
}

// Policy returns what the mesh does with the requests of the pod.
func (p Pod) Policy() (explain.Policy, error) { return explain.PolicyOf(p.s) }

// Explain returns what the mesh does with a request of the pod.
func (p Pod) Explain(ctx context.Context, q Request) (explain.Verdict, error) {
	if err := q.find(p.reader); err != nil {
		return explain.Verdict{}, err
	}
	return p.explain(ctx, &q.Request)
}

// Explain returns what the mesh does with a request. It finds the resource before it reads the pod.
func Explain(ctx context.Context, r snapshot.Reader, q Request) (explain.Verdict, error) {
	if err := q.find(r); err != nil {
		return explain.Verdict{}, err
	}
	p, err := AboutPod(ctx, r, q.Pod)
	if err != nil {
		return explain.Verdict{}, err
	}
	return p.explain(ctx, &q.Request)
}

func (p Pod) explain(ctx context.Context, q *explain.Request) (explain.Verdict, error) {
	if lock.Kind(q.Resource.Group, q.Resource.Name) {
		if err := p.reader.Extend(ctx, p.s, snapshot.Locks); err != nil {
			return explain.Verdict{}, err
		}
	}
	for i := range p.s.Configs {
		if c := &p.s.Configs[i]; q.Name != "" && c.Spec.Root != nil && operator.KeyOf(c) == v1alpha1.KeyObject {
			q.UID, q.Unread = p.reader.UIDOf(ctx, q.Resource.GroupVersionKind(), q.Namespace, q.Name)
			break
		}
	}
	if ctx.Err() != nil {
		return explain.Verdict{}, ctx.Err()
	}
	return explain.Of(p.s, q)
}

// find fills in what the request is about.
func (q *Request) find(r snapshot.Reader) error {
	lists, failed, err := r.Served()
	if err != nil {
		return err
	}
	var named string
	if q.Resource, named, err = explain.Find(lists, q.Target); err != nil {
		return errors.Join(err, failed)
	}
	if q.Object != "" {
		if has := explain.Subresources(lists, q.Resource); named != "" {
			return fmt.Errorf("%s has no subresource %s: it has %s", q.Resource, named, cmp.Or(strings.Join(has, ", "), "none"))
		}
		named = q.Object
	}
	q.Name = named
	switch {
	case !q.Resource.Namespaced && q.Namespace != "":
		return fmt.Errorf("%s are in no namespace: leave out --object-namespace", q.Resource)
	case q.Resource.Namespaced && !q.All && q.Namespace == "":
		q.Namespace = q.Pod.Namespace
	}
	return q.Check()
}
