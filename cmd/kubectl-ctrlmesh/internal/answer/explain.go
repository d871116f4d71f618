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

// Explain returns what the mesh does with a request.
func Explain(ctx context.Context, r snapshot.Reader, q Request) (explain.Verdict, error) {
	if err := q.find(r); err != nil {
		return explain.Verdict{}, err
	}
	var more []snapshot.Part
	if lock.Kind(q.Resource.Group, q.Resource.Name) {
		more = append(more, snapshot.Locks)
	}
	s, err := aboutPod(ctx, r, q.Pod, more...)
	if err != nil {
		return explain.Verdict{}, err
	}
	for i := range s.Configs {
		if c := &s.Configs[i]; q.Name != "" && c.Spec.Root != nil && operator.KeyOf(c) == v1alpha1.KeyObject {
			q.UID, q.Unread = r.UIDOf(ctx, q.Resource.GroupVersionKind(), q.Namespace, q.Name)
			break
		}
	}
	if ctx.Err() != nil {
		return explain.Verdict{}, ctx.Err()
	}
	return explain.Of(s, &q.Request)
}

// Policy returns what the mesh does with the requests of a pod.
func Policy(ctx context.Context, r snapshot.Reader, pod types.NamespacedName) (explain.Policy, error) {
	s, err := aboutPod(ctx, r, pod)
	if err != nil {
		return explain.Policy{}, err
	}
	return explain.PolicyOf(s)
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

// aboutPod reads what the policy of a pod follows from.
func aboutPod(ctx context.Context, r snapshot.Reader, pod types.NamespacedName, more ...snapshot.Part) (*snapshot.Snapshot, error) {
	in := pod.Namespace
	s, err := r.ReadAll(ctx, append(rulesIn(in), snapshot.Single(in, pod.Name), snapshot.Configs(in), snapshot.Members(in))...)
	if err != nil {
		return nil, err
	}
	if s.Subjects.Pod == nil {
		return nil, fmt.Errorf("there is no pod %s in namespace %s: name another namespace by -n", pod.Name, in)
	}
	return s, r.Extend(ctx, s, append(more, snapshot.Programs, snapshot.Settings, snapshot.Namespaces)...)
}
