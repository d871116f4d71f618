package label

import (
	"context"
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/sharding"
)

// Visit labels the objects of namespaces that were labelled a moment ago: now, and again when all
// apiservers have seen the labels.
func (s *Sweeper) Visit(namespaces ...string) {
	for _, n := range namespaces {
		s.queue().Add(n)
	}
}

// visits labels the objects of the namespaces in the queue until the context ends.
func (s *Sweeper) visits(ctx context.Context) {
	q := s.queue()
	defer context.AfterFunc(ctx, q.ShutDown)()
	again := map[string]bool{}
	for {
		namespace, ended := q.Get()
		if ended {
			return
		}
		if err := s.visit(ctx, namespace); err != nil {
			s.log().Warn("failed to label the objects of a namespace", "namespace", namespace, "error", err) // the next repeat finds them
		}
		q.Done(namespace)
		if again[namespace] = !again[namespace]; again[namespace] {
			q.AddAfter(namespace, againAfter)
		} else {
			delete(again, namespace)
		}
	}
}

func (s *Sweeper) visit(ctx context.Context, namespace string) (failed error) {
	s.mu.Lock()
	found, _ := s.resolve(Listed(s.configs...))
	s.mu.Unlock()
	for _, gvr := range found {
		for _, selector := range mislabelled(namespace) {
			err := s.stampAll(ctx, gvr, namespace, selector)
			if err == nil {
				continue
			}
			if err = explain(gvr, err); !errors.Is(err, errForbidden) { // which the status shows
				failed = errors.Join(failed, err)
			}
		}
	}
	return failed
}

// mislabelled are selectors for the objects of a namespace that lack a label, or have another's: the
// creator of the namespace may have labelled it.
func mislabelled(namespace string) []string {
	bucket := sharding.BucketLabel(namespace)
	return []string{
		fmt.Sprintf("%s!=%s", v1alpha1.NamespaceLabel, namespace),
		fmt.Sprintf("%s=%s,%s!=%s", v1alpha1.NamespaceLabel, namespace, v1alpha1.ShardingHashLabel, bucket),
	}
}

// stampAll labels the objects of a namespace that a selector matches.
func (s *Sweeper) stampAll(ctx context.Context, gvr schema.GroupVersionResource, namespace, selector string) error {
	options := metav1.ListOptions{LabelSelector: selector, Limit: pageSize}
	for {
		if err := s.Limiter.Wait(ctx); err != nil { // many namespaces may be labelled at once
			return err
		}
		list, err := s.Metadata.Resource(gvr).Namespace(namespace).List(ctx, options)
		if err != nil {
			return err
		}
		if _, err := s.stamp(ctx, gvr, s.mine(list.Items)); err != nil {
			return err
		}
		if options.Continue = list.Continue; options.Continue == "" {
			return nil
		}
	}
}
