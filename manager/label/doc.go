// Package label gives the objects that configurations divide the labels that
// they are divided by.
//
// New and changed objects are stamped at admission, by a webhook whose rules
// follow the configurations. It may be skipped: the manager is not on the path.
// What slipped by, and what existed before, is found by the Sweeper, which lists
// metadata of objects without the labels. Nothing is watched.
package label
