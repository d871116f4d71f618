// Package e2e contains the end-to-end tests: on the real cluster of tests/cluster,
// with ctrlmesh installed as a user would install it. `make e2e` sets up both and
// runs them.
//
// A test creates what it needs in namespaces of its own ([namespace]), which are deleted
// when it ends, so the tests can be run again on the same cluster. Nothing is mocked, and
// nothing sleeps: tests poll for conditions ([until]). They run on busy machines too, so they
// bound from above only what they also measure: by the order of events, by the times at which
// a request was sent and received, or by a client that the test does not disturb.
//
// Most tests look at the cluster from inside of pods: tests/operators/probe is an
// image with a client of its own, kubectl and a shell, and runs as a member of the
// mesh and, for comparison, outside of it. Other tests connect from inside a pod ([from]),
// so that any Go client can act as the pod.
//
// Some tests change the mesh itself: they scale the manager to zero, kill agents, and roll
// out others (mesh_test.go). They undo this, and no other test runs in parallel with them.
// Of the others, those that take long call t.Parallel, and run after all that do not.
package e2e
