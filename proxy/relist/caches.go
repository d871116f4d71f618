package relist

import (
	"hash/maphash"
	"slices"
	"time"
)

const (
	// maxPolicies bounds the policies that caches may have been filled under.
	maxPolicies = 16
	// maxRefused bounds the versions that are known to have got 410.
	maxRefused = 16
)

// caches are those of one view, whose set of objects changed. They cannot be distinguished,
// so what is noted here is true of each of them.
type caches struct {
	owed  int       // caches that have not resumed: a watch of each was ended
	since time.Time // of the last change, or resumption

	// under are the policies that a cache may have been filled under, or is between if a
	// supplement came in part: oldest first.
	under   []Policy
	unknown bool // under is not all of them
	// at is the highest version at which a watch was supplemented; "": none was. A cache that
	// resumes from there may not have read any of that. One that resumes from beyond has,
	// because its watch had the supplement first; so it was filled under those from confirmed
	// on. One that resumes from before has read a part, and is ahead of its version.
	at        string
	confirmed int
	// listed means that some client has listed since the change. It may not be one of these.
	listed  bool
	again   bool     // a supplement was sent under the policy in force, at the version at
	refused []uint64 // the last versions that got 410, hashed
}

// lastsOver reports whether what is known of caches matters after another change. open means
// that one of them has a watch open.
func (c *caches) lastsOver(open bool) bool {
	if !open && (c.again || c.refused != nil) {
		c.unknown = true // one that has resumed owes nothing
	}
	return !longAgo(c.since) && (c.owed > 0 || c.at != "" && open)
}

// expire notes that a policy is replaced under which a watch was open.
func (c *caches) expire(old Policy, unknown bool) {
	if c.owed > 0 { // not all have been supplemented
		c.confirmed = 0
	}
	c.under = append(c.under, old)
	c.unknown = c.unknown || unknown || len(c.under) > maxPolicies
	if c.unknown {
		c.under, c.confirmed = nil, 0
	}
	c.listed, c.again, c.since = false, false, time.Now()
}

// resume says how the watch of one of the caches goes on from a version. old means that the
// change was long ago, and alone that no other watch of them is open: one that repeats a
// request does not stand for another cache.
func (c *caches) resume(version string, old, alone bool) (Continuation, []Policy) {
	beyond := c.at == "" || later(version, c.at)
	switch {
	case slices.Contains(c.refused, hashOf(version)):
		if old {
			return Plain, nil
		}
		return Expired, nil
	case c.owed == 0 && (beyond || longAgo(c.since)):
		return Plain, nil
	}
	repeats := c.again && alone && version == c.at
	if c.since = time.Now(); c.owed > 0 && !repeats {
		c.owed--
	}
	if c.unknown || c.listed || !number(version) || !beyond && version != c.at {
		c.refuse(version)
		return Expired, nil
	}
	return Supplemented, c.supplement(version, beyond)
}

// supplement returns the policies under which a cache may have been filled that resumes from
// a version, which may be beyond that of the last supplement.
func (c *caches) supplement(version string, beyond bool) []Policy {
	if beyond {
		c.under, c.confirmed = c.under[c.confirmed:], 0
	}
	c.again = true
	if c.at = version; c.owed == 0 {
		c.confirmed = len(c.under)
	}
	return slices.Clip(c.under)
}

// refuse notes that a watch from a version got 410.
func (c *caches) refuse(version string) {
	if len(c.refused) == maxRefused {
		c.refused = slices.Delete(c.refused, 0, 1)
	}
	c.refused = append(c.refused, hashOf(version))
}

// list notes that a client has listed. If one was made to, it is the client of these caches.
func (c *caches) list() {
	if c.refused != nil {
		*c = caches{since: c.since}
		return
	}
	c.listed = true
}

// forgetPolicies has all caches list that resume.
func (s *resource) forgetPolicies() {
	for _, c := range s.caches {
		c.unknown = true
	}
}

func hashOf(version string) uint64 { return maphash.String(seed, version) }
