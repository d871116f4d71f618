package resources

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/utils/set"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

const (
	// lookEvery is how often the apiserver is asked what it serves, and missingEvery while a
	// configuration names what it does not serve: a CustomResourceDefinition may be created.
	lookEvery    = time.Minute
	missingEvery = 5 * time.Second
	// freshFor is how old what is known may be when an object is admitted.
	freshFor = time.Second
)

// Catalog is what the apiserver serves, as of a moment ago. It is safe for concurrent use.
type Catalog struct {
	// Discover lists all groups and resources. It may return a part of them with a
	// [discovery.ErrGroupDiscoveryFailed].
	Discover func() ([]*metav1.APIGroup, []*metav1.APIResourceList, error)
	// Changed is called when other resources are served.
	Changed func()
	Log     *slog.Logger

	served  atomic.Pointer[Served]
	missing atomic.Bool

	mu     sync.Mutex
	looked time.Time
}

// Unknown is why named resources are unknown.
type Unknown struct {
	// Message names them; empty if there are none.
	Message string
	// Undetermined is whether that may be because discovery fails.
	Undetermined bool
}

// Unknown returns why resources that groups name are unknown.
func (c *Catalog) Unknown(groups []v1alpha1.ResourceGroup) Unknown {
	served := c.served.Load()
	if served == nil {
		return Unknown{"the resources that the apiserver serves are not known yet", true}
	}
	return Unknown{strings.Join(served.Unknown(groups), "; "), served.Undetermined(groups)}
}

// UnknownNow is Unknown for an object that may have been written right after the definition
// of its resources: it asks the apiserver before it reports one as unknown.
func (c *Catalog) UnknownNow(groups []v1alpha1.ResourceGroup) Unknown {
	if u := c.Unknown(groups); u.Message == "" {
		return u
	}
	if err := c.look(freshFor); err != nil {
		c.Log.Warn("failed to list the resources that the apiserver serves", "error", err)
	}
	return c.Unknown(groups)
}

// Expect sets whether a configuration waits for a resource, so that the catalog looks for it
// often.
func (c *Catalog) Expect(missing bool) { c.missing.Store(missing) }

// Run keeps the catalog current until the context ends.
func (c *Catalog) Run(ctx context.Context) error {
	for {
		age := lookEvery
		if c.missing.Load() || c.served.Load() == nil {
			age = missingEvery
		}
		if err := c.look(age); err != nil {
			c.Log.Warn("failed to list the resources that the apiserver serves", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(missingEvery):
		}
	}
}

// look asks the apiserver, unless it was asked within the given time.
func (c *Catalog) look(within time.Duration) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.looked) < within {
		return nil
	}
	_, lists, err := c.Discover()
	failing := set.New[string]()
	if failed, ok := discovery.GroupDiscoveryFailedErrorGroups(err); ok {
		for gv := range failed {
			failing.Insert(gv.Group)
		}
	} else if err != nil {
		return fmt.Errorf("discovering resources: %w", err)
	}
	c.looked = time.Now()
	next := ServedBy(lists, failing)
	if before := c.served.Swap(next); !next.same(before) {
		c.Changed()
	}
	return nil
}
