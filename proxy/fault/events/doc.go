// Package events injects faults into the events of a watch, in the encodings that
// proxy/filter reads. It keeps the watch protocol: a client that applies the events it
// reads, resumes from the last version it read and lists again after a 410 arrives at the
// true state.
//
// The events of one object never change their order. A delayed event, or a stall, holds
// up all events after it. A client that resumes meanwhile misses none of them, because
// they are later than the last event that it read. Only a dropped event makes a gap:
// later events pass, and a client that resumes from one of these would miss the dropped
// event for good. The gap ends when the dropped event is delivered late, or when a later
// event of the same object passes. Every client accepts that later event whatever it
// knows of the object: a modification counts as an addition, a deletion as a removal.
// While a gap is open no bookmark passes. Before the bookmark that ends the initial
// events, the dropped events are delivered. Other bookmarks are left out, since no client
// relies on them. Gap knows the versions from which a watch must not resume.
//
// Events that are held back are taken from an account. Above its limit no further events
// are held back.
package events
