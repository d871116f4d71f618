package rules

import (
	"time"
	_ "time/tzdata" // agents have it too

	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// Fault renders a rule of a FaultInjection.
func (r *Renderer) Fault(in *v1alpha1.HTTPFaultInjection, path *field.Path) *meshv1.FaultRule {
	out := &meshv1.FaultRule{Name: in.Name, Seed: in.Seed}
	if in.Count != nil && *in.Count > 0 {
		out.Count = uint64(*in.Count)
	}
	if in.Match != nil {
		r.matches(out, in.Match, path.Child("match"))
	}
	if in.EffectiveTime != nil {
		out.EffectiveTime = r.effective(in.EffectiveTime, path.Child("effectiveTime"))
	}
	if f := in.Delay; f != nil {
		out.Delay = &meshv1.Delay{FixedNs: int64(r.duration(f.FixedDelay, maxDelay, false, path.Child("delay", "fixedDelay"))), Percent: r.percent(f.Percent, path.Child("delay", "percent"))}
	}
	if f := in.Abort; f != nil {
		if f.HTTPStatus < 200 || f.HTTPStatus > 599 {
			r.invalid(path.Child("abort", "httpStatus"), f.HTTPStatus, "must be from 200 to 599")
		}
		out.Abort = &meshv1.Abort{Status: uint32(f.HTTPStatus), Reason: f.Reason, Percent: r.percent(f.Percent, path.Child("abort", "percent"))}
	}
	if f := in.Reset; f != nil {
		out.Reset_ = &meshv1.Reset{Percent: r.percent(f.Percent, path.Child("reset", "percent")), AfterAnswer: f.AfterAnswer}
	}
	if f := in.Truncate; f != nil {
		out.Truncate = &meshv1.Truncate{AfterBytes: uint64(max(f.AfterBytes, 0)), Percent: r.percent(f.Percent, path.Child("truncate", "percent"))}
	}
	if f := in.SlowBody; f != nil {
		if f.BytesPerSecond < 1 {
			r.invalid(path.Child("slowBody", "bytesPerSecond"), f.BytesPerSecond, "must be at least 1")
		}
		out.SlowBody = &meshv1.SlowBody{BytesPerSecond: uint64(max(f.BytesPerSecond, 0)), Percent: r.percent(f.Percent, path.Child("slowBody", "percent"))}
	}
	if f := in.StaleList; f != nil {
		out.StaleList = &meshv1.StaleList{AgeNs: int64(r.duration(f.Age, maxInterval, true, path.Child("staleList", "age"))), Percent: r.percent(f.Percent, path.Child("staleList", "percent"))}
	}
	if in.Watch != nil {
		out.Watch = r.watch(in.Watch, path.Child("watch"))
	}
	return out
}

// matches renders the requests that a rule applies to.
func (r *Renderer) matches(out *meshv1.FaultRule, m *v1alpha1.FaultMatch, path *field.Path) {
	for i, m := range m.Resources {
		out.Resources = append(out.Resources, &meshv1.ResourceMatch{
			Clusters:  m.Clusters,
			ApiGroups: m.APIGroups, Resources: m.Resources, Verbs: m.Verbs, Namespaces: m.Namespaces, Names: m.Names, Scope: r.scope(m.Scope, m.Namespaces, path.Child("resources").Index(i)),
			Headers: headersOf(m.Headers),
		})
	}
	out.Paths = pathsOf(m.NonResourceRules)
	for i, m := range m.HTTPMatch {
		path := path.Child("httpMatch").Index(i)
		out.Http = append(out.Http, &meshv1.HttpMatch{
			Host:    r.text(m.Host, path.Child("host"), true),
			Path:    pathOf(r.text(m.Path, path.Child("path"), false)),
			Methods: methodsOf(m.Method),
			Headers: headersOf(m.Headers),
		})
	}
}

func (r *Renderer) watch(in *v1alpha1.FaultWatch, path *field.Path) *meshv1.WatchFault {
	out := &meshv1.WatchFault{}
	after := func(d v1alpha1.Duration, path *field.Path) int64 {
		if d == "" {
			return 0
		}
		return int64(r.duration(d, maxInterval, false, path))
	}
	if f := in.Gone; f != nil {
		out.Gone = &meshv1.WatchFault_Gone{Percent: r.percent(f.Percent, path.Child("gone", "percent")), AfterNs: after(f.After, path.Child("gone", "after"))}
	}
	if f := in.Cut; f != nil {
		out.Cut = &meshv1.WatchFault_Cut{Percent: r.percent(f.Percent, path.Child("cut", "percent")), AfterNs: after(f.After, path.Child("cut", "after"))}
	}
	if f := in.Stall; f != nil {
		out.Stall = &meshv1.WatchFault_Stall{Percent: r.percent(f.Percent, path.Child("stall", "percent")), AfterNs: after(f.After, path.Child("stall", "after")), LastsNs: after(f.Lasts, path.Child("stall", "lasts"))}
	}
	if f := in.Delay; f != nil {
		out.Delay = &meshv1.WatchFault_Late{Percent: r.percent(f.Percent, path.Child("delay", "percent")), ByNs: int64(r.duration(f.FixedDelay, maxDelay, false, path.Child("delay", "fixedDelay")))}
	}
	if f := in.Duplicate; f != nil {
		out.Duplicate = &meshv1.WatchFault_Duplicate{Percent: r.percent(f.Percent, path.Child("duplicate", "percent"))}
	}
	if f := in.Drop; f != nil {
		out.Drop = &meshv1.WatchFault_Drop{Percent: r.percent(f.Percent, path.Child("drop", "percent")), MadeUpAfterNs: int64(defaultMadeUpAfter)}
		if f.MadeUpAfter != "" {
			out.Drop.MadeUpAfterNs = int64(r.duration(f.MadeUpAfter, maxDelay, true, path.Child("drop", "madeUpAfter")))
		}
	}
	return out
}

func (r *Renderer) effective(in *v1alpha1.EffectiveTimeRange, path *field.Path) *meshv1.EffectiveTime {
	out := &meshv1.EffectiveTime{TimeZone: in.TimeZone}
	if in.StartTime != "" || in.EndTime != "" {
		out.Start, out.End = r.timeOfDay(in.StartTime, path.Child("startTime")), r.timeOfDay(in.EndTime, path.Child("endTime"))
		if in.StartTime == in.EndTime {
			r.invalid(path.Child("endTime"), in.EndTime, "is startTime: leave both out for all day")
		}
	}
	out.DaysOfWeek = r.numbers(in.DaysOfWeek, 0, 6, path.Child("daysOfWeek"))
	out.DaysOfMonth = r.numbers(in.DaysOfMonth, 1, 31, path.Child("daysOfMonth"))
	out.Months = r.numbers(in.Months, 1, 12, path.Child("months"))
	// "Local" would mean the time zone of the process that reads it.
	if _, err := time.LoadLocation(in.TimeZone); err != nil || in.TimeZone == "Local" {
		r.invalid(path.Child("timeZone"), in.TimeZone, "no such time zone: write a name of the IANA database, such as Europe/Berlin")
	}
	return out
}

func (r *Renderer) timeOfDay(s string, path *field.Path) uint32 {
	t, err := time.Parse(time.TimeOnly, s)
	if err != nil || len(s) != len(time.TimeOnly) {
		r.invalid(path, s, `must be a time of day, such as "08:30:00"`)
	}
	return uint32(t.Hour()*3600 + t.Minute()*60 + t.Second())
}

func (r *Renderer) numbers(in []int, least, most int, path *field.Path) (out []uint32) {
	for i, n := range in {
		if n < least || n > most {
			r.invalid(path.Index(i), n, "must be from %d to %d", least, most)
			continue
		}
		out = append(out, uint32(n))
	}
	return out
}
