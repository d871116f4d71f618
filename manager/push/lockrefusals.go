package push

import (
	"cmp"
	"net/http"
	"slices"
	"strings"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// lockVerbs are those of requests for locks.
var lockVerbs = []string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}

// lockRefusals returns the reported refusals, bounded and sorted. It omits those of locks that
// the policy does not name, and impossible ones.
func lockRefusals(policy *meshv1.PodPolicy, refusals []*meshv1.LockRefusal) (out []LockRefusal) {
	for _, r := range refusals[:min(len(refusals), meshv1.MaxLockRefusals)] {
		named := slices.ContainsFunc(policy.GetSharding().GetLocks(), func(l *meshv1.Lock) bool {
			return l.GetNamespace() == r.GetNamespace() && l.GetName() == r.GetName()
		})
		isError := r.GetCode() >= http.StatusBadRequest && r.GetCode() < 600
		if !named || !isError || !slices.Contains(lockResources, r.GetResource()) || !slices.Contains(lockVerbs, r.GetVerb()) {
			continue
		}
		message := r.GetMessage()
		out = append(out, LockRefusal{r.GetNamespace(), r.GetName(), r.GetResource(), r.GetVerb(), int(r.GetCode()), clip(message[:min(len(message), meshv1.MaxRefusalMessage)])})
	}
	slices.SortFunc(out, func(a, b LockRefusal) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name), strings.Compare(a.Resource, b.Resource))
	})
	return out
}
