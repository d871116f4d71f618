// Package manager is the control plane.
//
// One replica, the leader, runs the controllers and serves the agents. All replicas
// serve admission.
//
// Data flows one way. Events of objects trigger the policy controller, which compiles all
// configurations and pods anew and hands the result to the push server. The other
// controllers follow from its result. See package controllers for what each of them does.
package manager
