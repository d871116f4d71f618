// Package reviews runs tests/operators/reviewer on a cluster, in two versions that divide
// namespaces under one configuration, and finds out which version answers reviews.
package reviews
