// Package e2e holds the end-to-end tests: on the real cluster of tests/cluster,
// with ctrlmesh installed as a user would install it. `make e2e` sets up both and
// runs them.
//
// A test makes what it needs in namespaces of its own ([namespace]), which go when
// it ends, so the tests can be run again on the same cluster. Nothing is mocked, and
// nothing sleeps: what takes its time is awaited ([until]).
//
// Most tests look at the cluster from inside of pods: tests/operators/probe is an
// image with a client of its own, kubectl and a shell, and runs as a member of the
// mesh and, for comparison, outside of it. Others speak for a pod: their connections
// are made inside of it ([from]), so that any Go client can be the pod's.
//
// Some tests change the mesh itself: they take the manager away, kill agents, and roll
// others out (mesh_test.go). They undo that, and no other test runs beside them. Tests
// that leave the mesh alone run in parallel: those of TestTraffic and of TestRoots
// beside each other, and those that call t.Parallel themselves after all others.
package e2e
