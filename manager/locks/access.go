package locks

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// Access is the permission of ServiceAccounts to use locks.
type Access struct {
	// Namespace of the locks, and of the Role and RoleBinding.
	Namespace string
	// Role is the name of both.
	Role string
	// Resource is leases, configmaps or endpoints.
	Resource string
	// Names of the locks; none: all in the namespace.
	Names []string
	Verbs []string
	// Accounts are ServiceAccounts.
	Accounts []types.NamespacedName
}

// UseVerbs are the verbs that a client of a lock needs once the lock exists.
var UseVerbs = []string{"get", "update", "patch"}

// Commands returns what an administrator can run to grant the access.
func (a Access) Commands() string {
	resource := a.Resource
	if resource == Leases {
		resource = "leases.coordination.k8s.io"
	}
	var names, accounts strings.Builder
	for _, n := range a.Names {
		fmt.Fprintf(&names, " --resource-name=%s", n)
	}
	for _, account := range a.Accounts {
		fmt.Fprintf(&accounts, " --serviceaccount=%s:%s", account.Namespace, account.Name)
	}
	return fmt.Sprintf("kubectl -n %[1]s create role %[2]s --verb=%[3]s --resource=%[4]s%[5]s && kubectl -n %[1]s create rolebinding %[2]s --role=%[2]s%[6]s",
		a.Namespace, a.Role, strings.Join(a.Verbs, ","), resource, names.String(), accounts.String())
}

// CreateCommand returns a command that creates an empty lock, which any client may acquire.
func CreateCommand(resource string, name types.NamespacedName) string {
	apiVersion, kind := kinds[resource].ToAPIVersionAndKind()
	return fmt.Sprintf(`echo '{"apiVersion":%q,"kind":%q,"metadata":{"namespace":%q,"name":%q}}' | kubectl create -f -`, apiVersion, kind, name.Namespace, name.Name)
}
