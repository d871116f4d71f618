package fault

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

func TestEffectiveTime(t *testing.T) {
	const hour = 3600
	at := func(h, m, s uint32) uint32 { return h*hour + m*60 + s }
	for _, c := range []struct {
		what    string
		when    *meshv1.EffectiveTime
		in, out []string
	}{
		{"always", nil, []string{"2026-11-21T00:00:00Z"}, nil},
		{"all day", &meshv1.EffectiveTime{}, []string{"2026-11-21T00:00:00Z", "2026-11-21T23:59:59Z"}, nil},
		{"by day", &meshv1.EffectiveTime{Start: at(9, 0, 0), End: at(17, 30, 0)},
			[]string{"2026-11-21T09:00:00Z", "2026-11-21T17:29:59Z"},
			[]string{"2026-11-21T08:59:59Z", "2026-11-21T17:30:00Z", "2026-11-21T00:00:00Z"}},
		{"overnight", &meshv1.EffectiveTime{Start: at(22, 0, 0), End: at(6, 0, 0)},
			[]string{"2026-11-21T22:00:00Z", "2026-11-22T00:00:00Z", "2026-11-22T05:59:59Z"},
			[]string{"2026-11-21T21:59:59Z", "2026-11-22T06:00:00Z"}},
		// 2026-11-20 is a Friday.
		{"the night of Friday", &meshv1.EffectiveTime{Start: at(22, 0, 0), End: at(6, 0, 0), DaysOfWeek: []uint32{5}},
			[]string{"2026-11-20T23:00:00Z", "2026-11-21T05:00:00Z"},
			[]string{"2026-11-20T05:00:00Z", "2026-11-21T23:00:00Z"}},
		{"the last night of a month", &meshv1.EffectiveTime{Start: at(22, 0, 0), End: at(6, 0, 0), DaysOfMonth: []uint32{31}, Months: []uint32{12}},
			[]string{"2026-12-31T22:00:00Z", "2027-01-01T05:00:00Z"},
			[]string{"2026-12-31T05:00:00Z", "2027-01-01T22:00:00Z", "2026-10-31T22:00:00Z"}},
		{"until midnight", &meshv1.EffectiveTime{Start: at(18, 0, 0), DaysOfWeek: []uint32{0, 6}},
			[]string{"2026-11-21T18:00:00Z", "2026-11-21T23:59:59Z"},
			[]string{"2026-11-21T00:00:00Z", "2026-11-20T18:00:00Z"}},
		{"days", &meshv1.EffectiveTime{DaysOfWeek: []uint32{0}, DaysOfMonth: []uint32{22}},
			[]string{"2026-11-22T12:00:00Z"}, []string{"2026-11-29T12:00:00Z", "2026-12-22T12:00:00Z"}},
		{"a zone's day", &meshv1.EffectiveTime{DaysOfMonth: []uint32{22}, TimeZone: "Asia/Tokyo"},
			[]string{"2026-11-21T15:00:00Z", "2026-11-22T14:59:59Z"}, []string{"2026-11-21T14:59:59Z", "2026-11-22T15:00:00Z"}},
		{"summer and winter", &meshv1.EffectiveTime{Start: at(9, 0, 0), End: at(10, 0, 0), TimeZone: "Europe/Berlin"},
			[]string{"2026-07-01T07:30:00Z", "2026-12-01T08:30:00Z"}, []string{"2026-07-01T08:30:00Z", "2026-12-01T07:30:00Z"}},
		// Clocks go from 02:00 to 03:00 on 2026-03-29.
		{"an hour that is left out", &meshv1.EffectiveTime{Start: at(2, 0, 0), End: at(3, 0, 0), TimeZone: "Europe/Berlin"},
			[]string{"2026-03-28T01:30:00Z", "2026-03-30T00:30:00Z"}, []string{"2026-03-29T00:59:59Z", "2026-03-29T01:00:00Z", "2026-03-29T01:30:00Z"}},
		// They go from 03:00 back to 02:00 on 2026-10-25.
		{"an hour that comes twice", &meshv1.EffectiveTime{Start: at(2, 0, 0), End: at(3, 0, 0), TimeZone: "Europe/Berlin"},
			[]string{"2026-10-25T00:30:00Z", "2026-10-25T01:30:00Z"}, []string{"2026-10-24T23:59:59Z", "2026-10-25T02:00:00Z"}},
		{"a night that is longer", &meshv1.EffectiveTime{Start: at(22, 0, 0), End: at(6, 0, 0), DaysOfWeek: []uint32{6}, TimeZone: "Europe/Berlin"},
			[]string{"2026-10-24T20:00:00Z", "2026-10-25T04:59:59Z"}, []string{"2026-10-24T19:59:59Z", "2026-10-25T05:00:00Z"}},
		// Beirut has no midnight on 2026-03-29.
		{"a day that starts at one", &meshv1.EffectiveTime{DaysOfMonth: []uint32{29}, TimeZone: "Asia/Beirut"},
			[]string{"2026-03-28T22:00:00Z"}, []string{"2026-03-28T21:59:59Z"}},
	} {
		t.Run(c.what, func(t *testing.T) {
			s, err := newSchedule(c.when)
			require.NoError(t, err)
			for want, times := range map[bool][]string{true: c.in, false: c.out} {
				for _, text := range times {
					at, err := time.Parse(time.RFC3339, text)
					require.NoError(t, err)
					require.Equal(t, want, s.has(at), text)
				}
			}
		})
	}
}
