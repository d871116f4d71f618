package fault

import (
	"fmt"
	"time"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

const day = 24 * 60 * 60

// schedule is a compiled EffectiveTime. It uses the wall clock of its time zone: when
// daylight saving time changes, an hour may occur twice or not at all.
type schedule struct {
	zone       *time.Location
	start, end uint32 // seconds of the day
	// Bits of days and months; 0: all.
	week, month, months uint32
}

// newSchedule compiles a message. A nil schedule contains all times.
func newSchedule(m *meshv1.EffectiveTime) (*schedule, error) {
	if m == nil {
		return nil, nil
	}
	s := &schedule{zone: time.UTC, start: m.GetStart(), end: m.GetEnd()}
	if s.start >= day || s.end > day {
		return nil, fmt.Errorf("invalid time of day: %d to %d seconds exceed a day", s.start, s.end)
	}
	if name := m.GetTimeZone(); name != "" {
		zone, err := time.LoadLocation(name)
		if err != nil || name == "Local" { // the zone of the node, which differs between nodes
			return nil, fmt.Errorf("unknown time zone %q: use a name of the IANA database, such as Europe/Berlin", name)
		}
		s.zone = zone
	}
	for _, of := range []struct {
		what      string
		values    []uint32
		low, high uint32
		bits      *uint32
	}{
		{"day of week", m.GetDaysOfWeek(), 0, 6, &s.week},
		{"day of month", m.GetDaysOfMonth(), 1, 31, &s.month},
		{"month", m.GetMonths(), 1, 12, &s.months},
	} {
		for _, v := range of.values {
			if v < of.low || v > of.high {
				return nil, fmt.Errorf("%s %d is not between %d and %d", of.what, v, of.low, of.high)
			}
			*of.bits |= 1 << v
		}
	}
	return s, nil
}

// has reports whether a time is within the schedule.
func (s *schedule) has(t time.Time) bool {
	if s == nil {
		return true
	}
	t = t.In(s.zone)
	clock := uint32(t.Hour()*60*60 + t.Minute()*60 + t.Second())
	switch {
	case s.start == 0 && s.end == 0:
		return s.on(t, 0)
	case s.start < s.end:
		return s.start <= clock && clock < s.end && s.on(t, 0)
	}
	// The time spans midnight: it belongs to the day on which it starts.
	return clock >= s.start && s.on(t, 0) || clock < s.end && s.on(t, -1)
}

// on reports whether the schedule contains the day of t, shifted by off days.
func (s *schedule) on(t time.Time, off int) bool {
	year, month, date := t.Date()
	d := time.Date(year, month, date+off, 0, 0, 0, 0, time.UTC) // in UTC, where each day has a midnight
	in := func(bits uint32, v int) bool { return bits == 0 || bits&(1<<v) != 0 }
	return in(s.week, int(d.Weekday())) && in(s.month, d.Day()) && in(s.months, int(d.Month()))
}
