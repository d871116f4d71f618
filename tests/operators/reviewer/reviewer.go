package main

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	v2 "github.com/ctrlmesh/ctrlmesh/tests/operators/reviewer/v2"
)

// reviewer is the webhooks of one process.
type reviewer struct{ v2.Reviewer }

// Default implements admission.Defaulter.
func (r reviewer) Default(_ context.Context, p *v2.Paper) error {
	r.Mark(p)
	return nil
}

// ValidateCreate implements admission.Validator.
func (r reviewer) ValidateCreate(_ context.Context, p *v2.Paper) (admission.Warnings, error) {
	return admission.Warnings{r.Warning()}, r.Refusal(p)
}

// ValidateUpdate implements admission.Validator.
func (r reviewer) ValidateUpdate(ctx context.Context, _, p *v2.Paper) (admission.Warnings, error) {
	return r.ValidateCreate(ctx, p)
}

// ValidateDelete implements admission.Validator.
func (reviewer) ValidateDelete(context.Context, *v2.Paper) (admission.Warnings, error) {
	return nil, nil
}
