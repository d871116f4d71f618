// Package platform has the administrator's settings: what ShardingConfigs, which the
// users of a namespace write, may divide and have stamped, and how the apiserver was
// started.
package platform

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
)

const (
	// ConfigMap is the name, in the mesh's namespace, of the one with the settings.
	ConfigMap = "ctrlmesh-platform"
	// Key is the key of its data that has them, in YAML.
	Key = "platform.yaml"
)

// Names of settings, as messages and documents spell them.
const (
	StampingExcludedResources  = "stamping.excludedResources"
	StampingExcludedNamespaces = "stamping.excludedNamespaces"
	ShardingExcludedResources  = "sharding.excludedResources"
	ShardingNamespaces         = "sharding.namespaces"
	APIServerRequestTimeout    = "apiserver.requestTimeout"
	APIServerAddresses         = "apiserver.addresses"
	LocksGrantAccess           = "locks.grantAccess"
)

// Bounds of the apiserver's request timeout.
const (
	minRequestTimeout = time.Second
	// MaxRequestTimeout counts while none is known.
	MaxRequestTimeout = time.Hour
)

// Settings of the administrator. A list that is absent has its default; one that is
// empty is empty.
type Settings struct {
	Stamping Stamping `json:"stamping"`
	Sharding Sharding `json:"sharding"`
	// APIServer is what the mesh must know of the apiserver's flags.
	APIServer APIServer `json:"apiserver"`
	// Locks is what the mesh does about the locks of shards.
	Locks Locks `json:"locks"`
}

// Locks is what the mesh does about the locks of shards.
type Locks struct {
	// GrantAccess is whether an account that may update its operator's lock is permitted, by
	// a Role, to update those of its shards.
	GrantAccess bool `json:"grantAccess"`
}

// APIServer is how the apiserver was started.
type APIServer struct {
	// RequestTimeout is its --request-timeout: how long a request may go on taking effect
	// after its connection was lost. A handover waits that long for requests whose end was
	// not seen. A whole number of seconds.
	RequestTimeout *metav1.Duration `json:"requestTimeout"`
	// Addresses are where clients reach it beside its Service and endpoints, such as a load
	// balancer's: HOST or HOST:PORT, by default port 443.
	Addresses []Address `json:"addresses"`
}

// Stamping limits which objects get the mesh's labels.
type Stamping struct {
	// ExcludedResources are never stamped. Each is RESOURCE for the core group,
	// RESOURCE.GROUP, or *.GROUP.
	ExcludedResources []string `json:"excludedResources"`
	// ExcludedNamespaces are those whose objects are never stamped.
	ExcludedNamespaces []string `json:"excludedNamespaces"`
}

// Sharding limits what ShardingConfigs divide.
type Sharding struct {
	// ExcludedResources are never divided.
	ExcludedResources []string `json:"excludedResources"`
	// Namespaces are those in which there may be ShardingConfigs, with "*" for any
	// characters.
	Namespaces []string `json:"namespaces"`
}

// Default returns the settings of a mesh whose administrator wrote none.
func Default() *Settings {
	return &Settings{
		Stamping: Stamping{
			ExcludedResources:  []string{"secrets", "leases.coordination.k8s.io"},
			ExcludedNamespaces: []string{"kube-system", "kube-node-lease"},
		},
		Sharding:  Sharding{ExcludedResources: []string{}, Namespaces: []string{"*"}},
		APIServer: APIServer{RequestTimeout: &metav1.Duration{Duration: meshv1.DefaultRequestTimeout}},
		Locks:     Locks{GrantAccess: true},
	}
}

// own is what no settings allow to divide or stamp: the mesh's own kinds.
var own = schema.GroupResource{Group: v1alpha1.GroupName, Resource: "*"}

// Parse reads the data of the ConfigMap, strictly: a field that it does not know could
// be meant to forbid something.
func Parse(data map[string]string) (*Settings, error) {
	for key := range data {
		if key != Key {
			return nil, fmt.Errorf("unknown key %q: the settings are in %s", key, Key)
		}
	}
	s := &Settings{Locks: Default().Locks}
	if err := yaml.UnmarshalStrict([]byte(data[Key]), s); err != nil {
		return nil, fmt.Errorf("parsing %s: %w", Key, err)
	}
	defaults := Default()
	orDefault(&s.Stamping.ExcludedResources, defaults.Stamping.ExcludedResources)
	orDefault(&s.Stamping.ExcludedNamespaces, defaults.Stamping.ExcludedNamespaces)
	orDefault(&s.Sharding.ExcludedResources, defaults.Sharding.ExcludedResources)
	orDefault(&s.Sharding.Namespaces, defaults.Sharding.Namespaces)
	if s.APIServer.RequestTimeout == nil {
		s.APIServer.RequestTimeout = defaults.APIServer.RequestTimeout
	}
	if err := s.validate(); err != nil {
		return nil, err
	}
	return s, nil
}

// RequestTimeout reads the request timeout alone. It is ok if all settings are valid, or
// if the data names a valid timeout among settings of which others are invalid.
func RequestTimeout(data map[string]string) (d time.Duration, ok bool) {
	if s, err := Parse(data); err == nil {
		return s.APIServer.RequestTimeout.Duration, true
	}
	sections := map[string]any{}
	if err := yaml.UnmarshalStrict([]byte(data[Key]), &sections); err != nil {
		return 0, false
	}
	section, err := yaml.Marshal(sections["apiserver"])
	if err != nil {
		return 0, false
	}
	var s APIServer
	if err := yaml.UnmarshalStrict(section, &s); err != nil || s.RequestTimeout == nil {
		return 0, false
	}
	return s.RequestTimeout.Duration, isRequestTimeout(s.RequestTimeout.Duration)
}

func isRequestTimeout(d time.Duration) bool {
	return d >= minRequestTimeout && d <= MaxRequestTimeout && d%time.Second == 0
}

// WithRequestTimeout returns the settings with another request timeout.
func (s *Settings) WithRequestTimeout(d time.Duration) *Settings {
	out := *s
	out.APIServer.RequestTimeout = &metav1.Duration{Duration: d}
	return &out
}

func orDefault(list *[]string, absent []string) {
	if *list == nil {
		*list = absent
	}
}

func (s *Settings) validate() error {
	var errs []error
	for name, list := range map[string][]string{StampingExcludedResources: s.Stamping.ExcludedResources, ShardingExcludedResources: s.Sharding.ExcludedResources} {
		for _, r := range list {
			if gr := schema.ParseGroupResource(r); !isResource(gr) {
				errs = append(errs, fmt.Errorf("%s: invalid resource %q: write RESOURCE, RESOURCE.GROUP or *.GROUP", name, r))
			}
		}
	}
	for _, n := range s.Stamping.ExcludedNamespaces {
		if len(validation.IsDNS1123Label(n)) > 0 {
			errs = append(errs, fmt.Errorf("%s: invalid namespace %q", StampingExcludedNamespaces, n))
		}
	}
	for _, n := range s.Sharding.Namespaces {
		if strings.ReplaceAll(n, "*", "x") == "" || len(validation.IsDNS1123Label(strings.ReplaceAll(n, "*", "x"))) > 0 {
			errs = append(errs, fmt.Errorf("%s: invalid pattern %q: write a namespace, with * for any characters", ShardingNamespaces, n))
		}
	}
	if n := len(s.APIServer.Addresses); n > maxAddresses {
		errs = append(errs, fmt.Errorf("%s: %d are too many: name at most %d", APIServerAddresses, n, maxAddresses))
	}
	if d := s.APIServer.RequestTimeout.Duration; !isRequestTimeout(d) {
		errs = append(errs, fmt.Errorf("%s: invalid duration %s: write whole seconds, from %s to %s", APIServerRequestTimeout, d, minRequestTimeout, MaxRequestTimeout))
	}
	return errors.Join(errs...)
}

func isResource(gr schema.GroupResource) bool {
	if gr.Group != "" && len(validation.IsDNS1123Subdomain(gr.Group)) > 0 {
		return false
	}
	return gr.Resource == "*" && gr.Group != "" || len(validation.IsDNS1035Label(gr.Resource)) == 0
}

// Stamps reports whether objects of a resource may be stamped.
func (s *Settings) Stamps(gr schema.GroupResource) bool {
	return !excludes(s.Stamping.ExcludedResources, gr)
}

// StampsIn reports whether objects of a namespace may be stamped.
func (s *Settings) StampsIn(namespace string) bool {
	return !slices.Contains(s.Stamping.ExcludedNamespaces, namespace)
}

// Divides reports whether a resource may be divided.
func (s *Settings) Divides(gr schema.GroupResource) bool {
	return !excludes(s.Sharding.ExcludedResources, gr)
}

// ConfigsIn reports whether a namespace may have ShardingConfigs.
func (s *Settings) ConfigsIn(namespace string) bool {
	return slices.ContainsFunc(s.Sharding.Namespaces, func(pattern string) bool {
		ok, err := path.Match(pattern, namespace)
		return ok && err == nil
	})
}

// NeverStamped are the resources that are not stamped; "*" stands for all of a group.
func (s *Settings) NeverStamped() []schema.GroupResource {
	return append([]schema.GroupResource{own}, collect.Map(s.Stamping.ExcludedResources, schema.ParseGroupResource)...)
}

// Undivided are the resources that are never divided; "*" stands for all of a group.
func (s *Settings) Undivided() []schema.GroupResource {
	return append([]schema.GroupResource{own}, collect.Map(s.Sharding.ExcludedResources, schema.ParseGroupResource)...)
}

// excludes reports whether a list, or the mesh itself, excludes a resource. A group "*"
// stands for any group that is not excluded as a whole, a resource "*" for all of its
// group.
func excludes(list []string, gr schema.GroupResource) bool {
	matches := func(x schema.GroupResource) bool {
		if gr.Group == "*" {
			return gr.Resource == "*" || x.Resource == gr.Resource
		}
		return x.Group == gr.Group && (x.Resource == "*" || gr.Resource == "*" || x.Resource == gr.Resource)
	}
	return matches(own) || slices.ContainsFunc(list, func(r string) bool { return matches(schema.ParseGroupResource(r)) })
}
