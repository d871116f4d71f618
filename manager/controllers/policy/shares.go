package policy

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

const (
	// sharesPatience is how long policies wait for the shares on record, and after which
	// those that go on without ask again.
	sharesPatience = 10 * time.Second
	// pageOfBreakers are read at once; they may be large.
	pageOfBreakers = 20
)

// openBook reads the record of CircuitBreakers whose members share, or did, before their
// rules are pushed. For sharesPatience all policies wait for that. Then the rules that
// cannot be read are not shared out, and the others are pushed.
func (r *Controller) openBook(ctx context.Context, breakers []*v1alpha1.CircuitBreaker) error {
	there, unread := map[types.NamespacedName]bool{}, map[types.NamespacedName]bool{}
	for _, c := range breakers {
		name := client.ObjectKeyFromObject(c)
		there[name] = true
		if r.State.Book.Lacks(c) {
			unread[name] = true
		}
	}
	if err := r.readShares(ctx, unread); err == nil {
		r.unread = time.Time{}
	} else {
		if r.unread.IsZero() {
			r.unread = time.Now()
		}
		if err = fmt.Errorf("reading the shares on record of CircuitBreakers: %w", err); time.Since(r.unread) < sharesPatience {
			return err
		}
		r.Log.Warn("rules of scope Workload that are not shared out yet refuse all requests", "error", err)
	}
	r.State.Book.Close(func(name types.NamespacedName) bool { return there[name] })
	return nil
}

// readShares opens the book at these CircuitBreakers. It reads past the cache.
func (r *Controller) readShares(ctx context.Context, unread map[types.NamespacedName]bool) error {
	if len(unread) == 0 {
		return nil
	}
	in := map[string]bool{}
	namespace := metav1.NamespaceAll
	for name := range unread {
		in[name.Namespace] = true
		namespace = name.Namespace
	}
	if len(in) > 1 {
		namespace = metav1.NamespaceAll
	}
	var live v1alpha1.CircuitBreakerList
	for page := ""; ; page = live.Continue {
		live = v1alpha1.CircuitBreakerList{}
		if err := r.Client.List(ctx, &live, client.InNamespace(namespace), client.Limit(pageOfBreakers), client.Continue(page)); err != nil {
			return err
		}
		for i := range live.Items {
			if name := client.ObjectKeyFromObject(&live.Items[i]); unread[name] {
				r.State.Book.Open(name, live.Items[i].Status)
				delete(unread, name)
			}
		}
		if live.Continue == "" {
			break
		}
	}
	for name := range unread { // it was deleted
		r.State.Book.Open(name, v1alpha1.CircuitBreakerStatus{})
	}
	return nil
}
