// Package controllers is the common part of the manager's controllers.
//
// Each controller is one function that reconciles. It runs on the leader, on a workqueue: when a
// source that it reads has changed, when it has failed, and at regular intervals. Controllers do
// not call each other. They share State. The table in wiring_test.go, which
// docs/design.md#the-wiring-of-the-manager shows, says what each controller does, what wakes it,
// and what it reads, writes and sends.
package controllers
