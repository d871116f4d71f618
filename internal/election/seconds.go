// Package election reads the leader-election records of clients in all languages.
package election

import (
	"fmt"
	"strconv"
	"strings"
)

// Seconds is a duration of a record in JSON. The official Python client writes it as a string,
// all others as a number.
type Seconds int64

// UnmarshalJSON implements json.Unmarshaler.
func (s *Seconds) UnmarshalJSON(text []byte) error {
	if string(text) == "null" {
		return nil
	}
	n, err := strconv.ParseInt(strings.Trim(string(text), `"`), 10, 64)
	if err != nil {
		return fmt.Errorf("reading seconds %s: %w", text, err)
	}
	*s = Seconds(n)
	return nil
}
