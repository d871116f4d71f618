package compile

import (
	"strconv"
	"strings"

	"github.com/ctrlmesh/ctrlmesh/manager/handover"
)

// Root is what is known of a configuration with spec.root, as it is written:
// nobody may be told of what is not. One that is being deleted is compiled as one
// that is disabled. The pods of a root that is not known are refused.
type Root struct {
	State handover.State
	// Namespaces are those that exist, for method Labels.
	Namespaces []string
}

// Serial is the serial that the version of a member's policy begins with. It is
// not ok for the versions of other pods' policies.
func Serial(version string) (serial int64, ok bool) {
	number, _, ok := strings.Cut(version, "-")
	if !ok {
		return 0, false
	}
	serial, err := strconv.ParseInt(number, 10, 64)
	return serial, err == nil
}
