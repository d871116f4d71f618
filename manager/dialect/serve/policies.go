package serve

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	kruise "github.com/ctrlmesh/ctrlmesh/api/kruise/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/collect"
	"github.com/ctrlmesh/ctrlmesh/manager/dialect"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/bounds"
	"github.com/ctrlmesh/ctrlmesh/manager/internal/invalid"
	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
)

// Policy is a TrafficPolicy and the CircuitBreakers that it stands for.
type Policy struct {
	*kruise.TrafficPolicy
	Breakers []*v1alpha1.CircuitBreaker
	// Remainder names the parts that have no effect.
	Remainder []string
	// Problem says why none has; empty if some has.
	Problem string
}

// Policies reads and translates all TrafficPolicies.
func Policies(ctx context.Context, r client.Reader) ([]Policy, error) {
	var policies kruise.TrafficPolicyList
	if err := r.List(ctx, &policies); err != nil {
		return nil, fmt.Errorf("listing TrafficPolicies: %w", err)
	}
	if len(policies.Items) == 0 {
		return nil, nil
	}
	var apps kruise.VirtualAppList
	if err := r.List(ctx, &apps); err != nil {
		return nil, fmt.Errorf("listing VirtualApps: %w", err)
	}
	byNamespace := map[string][]*kruise.VirtualApp{}
	for i := range apps.Items {
		app := &apps.Items[i]
		byNamespace[app.Namespace] = append(byNamespace[app.Namespace], app)
	}
	var out []Policy
	for i := range policies.Items {
		p := &policies.Items[i]
		t, errs := dialect.TrafficPolicy(p, byNamespace[p.Namespace])
		out = append(out, policyOf(p, t, errs))
	}
	return out, nil
}

func policyOf(p *kruise.TrafficPolicy, t dialect.Translation, errs field.ErrorList) Policy {
	out := Policy{TrafficPolicy: p, Remainder: slices.Clone(t.Remainder)}
	for _, err := range errs {
		if !strings.HasPrefix(err.Field, dialect.Targets.String()) {
			out.Problem = invalid.Message(errs)
			return out
		}
		// A VirtualApp that has changed since must not lift what concerns others.
		out.Remainder = append(out.Remainder, err.Error())
	}
	out.Breakers = t.Breakers
	if len(out.Breakers) == 0 {
		out.Problem = strings.Join(append(slices.Clone(t.Warnings), out.Remainder...), "; ")
	}
	return out
}

// PolicyPath is where PolicyWebhook is served.
const PolicyPath = "/validate-trafficpolicy"

// PolicyWebhook is the admission of TrafficPolicies.
type PolicyWebhook struct{ Reader client.Reader }

// Handle implements admission.Handler.
func (w PolicyWebhook) Handle(ctx context.Context, req admission.Request) admission.Response {
	p := &kruise.TrafficPolicy{}
	if err := bounds.Unmarshal(kruise.GroupName+"_trafficpolicies", req.Object.Raw, p); err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	if p.DeletionTimestamp != nil {
		return admission.Allowed("") // so that finalizers can be removed
	}
	p.Namespace = req.Namespace
	var apps kruise.VirtualAppList
	if err := w.Reader.List(ctx, &apps, client.InNamespace(req.Namespace)); err != nil {
		return admission.Errored(http.StatusInternalServerError, fmt.Errorf("listing VirtualApps: %w", err))
	}
	t, errs := dialect.TrafficPolicy(p, collect.Pointers(apps.Items))
	if len(errs) > 0 {
		metrics.AdmissionRefusals.WithLabelValues("trafficpolicy", "Invalid").Inc()
		return admission.Denied(invalid.Message(errs))
	}
	return admission.Allowed("").WithWarnings(append(t.Warnings, t.Remainder...)...)
}
