// Package manager is the control plane.
//
// Data flows one way. The informers' events wake the policies loop, which
// compiles all configurations and pods anew and hands the result to the push
// server; that is cheap, because it grows with operators and not with objects.
// The other loops follow from its result: the trust bundles in namespaces, the
// stamping of labels, the status of configurations. Two loops are also listened to:
// which keys are whose, as that of roots has written it, goes into the policies, and
// whose share of a rule is how large, as that of traffic has; and what agents say of
// those goes back. Each loop is one function that makes the world as it should be, run
// again when poked, when it failed, and every so often.
//
// One replica, the leader, runs the loops and serves the agents. All replicas
// serve admission.
package manager
