package locks

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// Free changes an object of a lock as its holder would on a graceful exit. It does nothing if
// another client has written the object since: version is its resourceVersion, as the holder
// wrote it. resource is one of Leases, ConfigMaps and Endpoints.
func Free(ctx context.Context, c client.Client, resource string, name types.NamespacedName, holder, version string) (freed bool, err error) {
	is := empty(resource, name)
	err = c.Get(ctx, name, is)
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("reading %s %s: %w", resource, name, err)
	}
	r, isLock, err := recordOf(resource, is)
	if err != nil || !isLock || r.holder != holder || is.GetResourceVersion() != version {
		return false, err
	}
	patch, err := write(resource, versionOf(is), r, release, "", time.Now())
	if err != nil {
		return false, err
	}
	err = c.Patch(ctx, is, client.RawPatch(types.MergePatchType, patch))
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return false, nil
	}
	return err == nil, failure.Wrap(err, "writing %s %s", resource, name)
}
