// Package parallel works on the elements of a slice, some at the same time.
package parallel

import "golang.org/x/sync/errgroup"

// Each calls f for each element, for at most limit at the same time. It returns their errors, in order.
func Each[T any](in []T, limit int, f func(T) error) []error {
	errs := make([]error, len(in))
	var g errgroup.Group
	g.SetLimit(limit)
	for i, one := range in {
		g.Go(func() error {
			errs[i] = f(one)
			return nil
		})
	}
	_ = g.Wait() // no function fails
	return errs
}
