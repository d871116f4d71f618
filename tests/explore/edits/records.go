package edits

import (
	"encoding/json"
	"fmt"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/manager/handover"
	"github.com/ctrlmesh/ctrlmesh/manager/roots/decide"
)

// record is the recorded state of a root as a manager knows it, with the evidence.
type record struct {
	state  handover.State
	acting *v1alpha1.ActingSpec
	locks  []v1alpha1.LockStatus
	// written is the number of the record as it is written: without evidence.
	written recordID
}

// recordID is the number of a record.
type recordID int32

const (
	unread recordID = iota
	empty           // that of a new root
)

// records are numbered.
type records struct {
	all []record
	ids map[string]recordID
}

func newRecords() *records {
	r := &records{all: make([]record, 1), ids: map[string]recordID{}}
	state, _ := decide.Load(nil)
	r.number(record{state: state})
	return r
}

func (r *records) number(one record) recordID {
	// Such types always marshal, and maps are printed in order.
	key, _ := json.Marshal([]any{decide.Save(one.state), one.acting, one.locks, fmt.Sprint(one.state.Evidence)})
	id, ok := r.ids[string(key)]
	if !ok {
		id = recordID(len(r.all))
		r.ids[string(key)] = id
		r.all = append(r.all, one)
		written := one
		written.state.Evidence = handover.Evidence{}
		r.all[id].written = r.number(written)
	}
	return id
}

// stored returns a record as decisions take it.
func (r record) stored() decide.Stored {
	s := decide.Stored{State: r.state, Acting: r.acting, ReadAt: now}
	s.Status.Locks = r.locks
	return s
}
