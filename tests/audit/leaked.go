package audit

// Leaked are the requests of which no access line tells.
func Leaked(requests []Request, lines []Access) []Request {
	known := make(map[string]bool, len(lines))
	for _, l := range lines {
		known[l.ID] = true
	}
	var out []Request
	for _, r := range requests {
		if !known[r.ID] {
			out = append(out, r)
		}
	}
	return out
}
