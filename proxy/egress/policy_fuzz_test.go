package egress

import (
	"net/http"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/proxy/fault"
	"github.com/ctrlmesh/ctrlmesh/proxy/limit"
	"github.com/ctrlmesh/ctrlmesh/proxy/match"
)

// FuzzPolicy compiles any message, and decides about some requests: invalid messages are
// refused, and nothing panics.
func FuzzPolicy(f *testing.F) {
	text := func(s string) *meshv1.TextMatch { return &meshv1.TextMatch{Kind: &meshv1.TextMatch_Regexp{Regexp: s}} }
	seed, err := proto.Marshal(&meshv1.Traffic{
		Egress:   &meshv1.Egress{Ports: []uint32{80}},
		NoFaults: []string{"quiet"},
		Breakers: []*meshv1.Breaker{{Name: "b",
			Rules: []*meshv1.LimitRule{{
				Name: "r", Key: "k", Resources: []*meshv1.ResourceMatch{{Verbs: []string{"get"}}},
				Paths: []*meshv1.PathMatch{{Paths: []string{"/a*"}}}, Http: []*meshv1.HttpMatch{{Host: text("a.*")}},
				Bucket: &meshv1.Bucket{Burst: 1, Limit: 1, IntervalNs: 1}, MaxInFlight: 1, Share: &meshv1.Share{Index: 1, Of: 3},
				Backoff: &meshv1.Backoff{Failures: 1, BaseNs: 1, MaxNs: 2},
				Trip:    &meshv1.Trip{WindowNs: 9, MinRequests: 1, ErrorPercent: 5}, Recovery: &meshv1.Recovery{SleepingWindowNs: 1},
			}},
			Intercepts: []*meshv1.InterceptRule{{Name: "i", Http: []*meshv1.HttpMatch{{Path: text("/v1.*")}}}},
		}},
		Injections: []*meshv1.Injection{{Name: "f", Rules: []*meshv1.FaultRule{{
			Name: "r", Key: "k", Seed: proto.Int64(1), Delay: &meshv1.Delay{FixedNs: 1, Percent: 50},
			Abort: &meshv1.Abort{Status: 500, Percent: 5}, EffectiveTime: &meshv1.EffectiveTime{Start: 5, End: 2, TimeZone: "UTC"},
			Watch: &meshv1.WatchFault{Drop: &meshv1.WatchFault_Drop{Percent: 9, MadeUpAfterNs: 1}},
		}}}},
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Fuzz(func(t *testing.T, data []byte) {
		m := &meshv1.Traffic{}
		if proto.Unmarshal(data, m) != nil {
			return
		}
		now := time.Unix(4e9, 0)
		store := limit.NewStore()
		limits, err := limit.Compile(m, store, now)
		if err != nil {
			limits = nil
		}
		faults, err := fault.Compile(m, fault.NewStore("pod"), now)
		if err != nil {
			faults = nil
		}
		p, err := Compile(m, limits, faults)
		if err != nil {
			p = nil
		}
		request := &match.HTTP{Scheme: "https", Host: "a.example.com", Port: 443, Method: "GET", Path: "/v1/a", Header: http.Header{}}
		opaque := &match.HTTP{Scheme: "https", Host: "a.example.com", Port: 443, Opaque: true}
		limits.Enforce(now)
		faults.Enforce(now)
		for _, asked := range []*match.HTTP{request, opaque, {Port: 443, Opaque: true}} {
			p.denied(asked)
			p.surely(asked)
			p.denies(asked, match.Unseen)
			p.blind(asked)
			p.deep(asked.Host)
			p.decrypts(*asked)
			for i := range 8 { // turns come and go
				ticket, _ := limits.TakeHTTP(now.Add(time.Duration(i)), limit.Ticket{}, "curl", *asked)
				ticket.Done(now.Add(time.Duration(i)), limit.Outcome{Failed: i%2 == 0, Took: time.Second})
			}
			faults.DecideHTTP(now, nil, *asked)
		}
		limits.TakePath(now, "get", "/a", "curl")
		faults.DecidePath(now, "get", "/a")
		for _, verb := range []string{"get", "watch"} {
			kind, object := match.Kind{Verb: verb, Resource: "pods"}, &match.Object{Namespace: "ns", Name: "a"}
			faults.OfKind(kind).Decide(now, object)
			if of := limits.OfKind(kind); of != nil {
				of.Take(now, object, "curl")
			}
		}
		exported, err := store.Export(now)
		if err != nil {
			t.Fatal(err)
		}
		if err := limit.NewStore().Import(exported, now); err != nil {
			t.Fatalf("what is exported is not imported: %v", err)
		}
	})
}
