// Package events harms the events of a watch, in what encodings proxy/filter reads, and
// keeps the protocol: a client that applies what it reads, resumes from the version it
// read last and lists when it is told 410 comes to the truth.
//
// Of one object events never change their order. A delayed event, or a stall, holds up
// all that come after it. So whoever resumes while events are held up misses none: they
// are later than what was read. A dropped event alone makes a gap: later ones pass, and
// one who resumes from one of these would miss it for good. It is over when the event is
// made up for, or a later one of its object passes, which every client takes whatever it
// knows of the object: to be modified means to be added, and to be deleted to be gone.
// While a gap is open no bookmark passes: the one that ends the initial events has what
// was dropped made up for before it, and others, which nobody counts on, are left out.
// Gap says which versions must not be resumed from.
//
// What is held back is taken from an account. Beyond it nothing is held back any more.
package events
