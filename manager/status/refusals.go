package status

import (
	"fmt"
	"net/http"
	"path"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/locks"
	"github.com/ctrlmesh/ctrlmesh/manager/push"
)

// accessPrefix begins the names of Roles that administrators are advised to create. Those of
// the mesh have another prefix, so that it can still create its own.
const accessPrefix = "ctrlmesh-shard-"

// refusal is an error that the apiserver lastingly answers to a member's requests for a lock of
// its shard.
type refusal struct {
	push.LockRefusal
	member LedMember
	// object is the lock as the apiserver knows it.
	object types.NamespacedName
}

// refusals returns the errors that keep members from the shard's locks. Those of the lock unled
// precede, and of them those that are forbidden. unled may be nil.
func (s Led) refusals(unled *meshv1.Lock) (out []refusal) {
	for _, m := range s.Members {
		for _, r := range m.Refusals {
			i := slices.IndexFunc(s.Locks, func(l *meshv1.Lock) bool { return l.GetNamespace() == r.Namespace && l.GetName() == r.Name })
			if i >= 0 {
				out = append(out, refusal{r, m, types.NamespacedName{Namespace: r.Namespace, Name: s.Locks[i].GetUpstreamName()}})
			}
		}
	}
	rank := func(r refusal) (rank int) {
		if r.Namespace != unled.GetNamespace() || r.Name != unled.GetName() {
			rank += 2
		}
		if r.Code != http.StatusForbidden {
			rank++
		}
		return rank
	}
	slices.SortStableFunc(out, func(a, b refusal) int { return rank(a) - rank(b) })
	return out
}

// refused describes which member the apiserver refuses a lock of the shard, and what to do
// about it: "; ...". It is empty if it refuses none.
func (s Led) refused(unled *meshv1.Lock) string {
	all := s.refusals(unled)
	if len(all) == 0 {
		return ""
	}
	r := all[0]
	same := collect.Filter(all, func(o refusal) bool {
		return o.Namespace == r.Namespace && o.Resource == r.Resource && o.Verb == r.Verb && o.Code == r.Code
	})
	pods := unique(collect.Map(same, func(o refusal) string { return o.member.Name }))
	others := ""
	if len(pods) > 1 {
		others = fmt.Sprintf(" and %d more", len(pods)-1)
	}
	why := ""
	if r.Message != "" {
		why = ": " + r.Message
	}
	return fmt.Sprintf("; the apiserver answers %d to pod %s%s for \"%s %s %s\"%s%s",
		r.Code, r.member.Name, others, r.Verb, r.Resource, r.object, why, s.advice(r, same))
}

// advice returns what to do about a refusal, which same are instances of: "; ...".
func (s Led) advice(r refusal, same []refusal) string {
	switch {
	case r.Code == http.StatusUnauthorized:
		return "; the token of its ServiceAccount is not valid"
	case r.Code == http.StatusForbidden && r.byOthers():
		return "; this is not RBAC: change the admission policy, webhook or quota that forbids it"
	case r.Code == http.StatusForbidden:
		return "; run " + s.access(r, same).Commands()
	case r.Code == http.StatusNotFound && r.Verb == "create":
		return fmt.Sprintf("; create namespace %s", r.Namespace)
	case r.Code == http.StatusNotFound:
		return "; the operator does not create it: run " + locks.CreateCommand(r.Resource, r.object)
	}
	return ""
}

// byOthers reports whether the apiserver says that something else than the authorizer forbids
// the request.
func (r refusal) byOthers() bool {
	return r.Message != "" && !strings.Contains(r.Message, " cannot "+r.Verb+" resource ")
}

// access returns the permission that refusals of one verb and resource ask for. RBAC cannot
// permit the creation of an object by its name.
func (s Led) access(r refusal, same []refusal) locks.Access {
	a := locks.Access{
		Namespace: r.Namespace, Role: fmt.Sprintf("%s%s.%s-%s", accessPrefix, s.Config.Namespace, path.Base(s.Name), r.Resource), Resource: r.Resource,
		Accounts: unique(collect.Map(same, func(o refusal) types.NamespacedName {
			return types.NamespacedName{Namespace: s.Config.Namespace, Name: o.member.Account}
		})),
	}
	if r.Verb == "create" {
		a.Role, a.Verbs = a.Role+"-create", []string{"create"}
		return a
	}
	a.Names, a.Verbs = unique(collect.Map(same, func(o refusal) string { return o.object.Name })), slices.Clone(locks.UseVerbs)
	if !slices.Contains(a.Verbs, r.Verb) {
		a.Verbs = append(a.Verbs, r.Verb)
	}
	return a
}

// unique returns the values without repetitions, in their order.
func unique[T comparable](in []T) (out []T) {
	for _, v := range in {
		if !slices.Contains(out, v) {
			out = append(out, v)
		}
	}
	return out
}
