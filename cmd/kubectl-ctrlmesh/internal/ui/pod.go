package ui

import (
	"cmp"
	"context"

	"k8s.io/apimachinery/pkg/types"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/adoption"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/advise"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/answer"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/explain"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/tap"
)

// maxRequests bounds the requests of a pod that its page shows.
const maxRequests = 25

// podView is what the page of a pod shows.
type podView struct {
	Policy explain.Policy
	// Asked is the request that the user asked about, and Verbs are the ones to choose from.
	Asked answer.Request
	Verbs []string
	// Verdict is nil if nothing was asked, or if Problem says why there is none.
	Verdict *explain.Verdict
	Problem string
	// Requests are the last ones, or else Unseen says why they are unknown.
	Requests []tap.Line
	Unseen   string
}

func (s *Server) pod(ctx context.Context, in parameters) (string, any, error) {
	name := types.NamespacedName{Namespace: in.path["namespace"], Name: in.path["name"]}
	pod, err := answer.AboutPod(ctx, s.Reader, name)
	if err != nil {
		return "", nil, err
	}
	policy, err := pod.Policy()
	if err != nil {
		return "", nil, err
	}
	out := podView{Policy: policy, Verbs: explain.Verbs, Asked: asked(name, in)}
	if out.Asked.Target != "" {
		if verdict, err := pod.Explain(ctx, out.Asked); err != nil {
			out.Problem = err.Error()
		} else {
			out.Verdict = &verdict
		}
	}
	if out.Requests, err = pod.Requests(ctx, maxRequests); err != nil {
		out.Unseen = err.Error()
	}
	return name.Name, out, nil
}

// asked returns the request that a user asks about.
func asked(pod types.NamespacedName, in parameters) answer.Request {
	out := answer.Request{Target: in.query.Get("resource"), Object: in.query.Get("name"), All: in.query.Get("all") != ""}
	out.Pod, out.Verb = pod, cmp.Or(in.query.Get("verb"), explain.Verbs[0])
	if !out.All {
		out.Namespace = in.query.Get("namespace")
	}
	return out
}

// adviceView is what the page of advice shows.
type adviceView struct {
	Namespace, Workload string
	advise.Advice
}

func (s *Server) advice(ctx context.Context, in parameters) (string, any, error) {
	argument := in.path["kind"] + "/" + in.path["name"]
	target, err := adoption.ParseTarget(argument)
	if err != nil {
		return "", nil, err
	}
	advice, err := answer.Adviser{Reader: s.Reader, Namespace: in.path["namespace"], Workload: target}.Advise(ctx)
	return "Advice about " + argument, adviceView{in.path["namespace"], argument, advice}, err
}
