// Package failure shortens the handling of errors.
package failure

import "fmt"

// Wrap returns err preceded by the operation that failed, nil if err is nil.
func Wrap(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), err)
}
