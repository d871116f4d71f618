package relist

import (
	"bytes"
	"encoding/json"
	"io"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/ctrlmesh/ctrlmesh/proxy/filter"
)

// maxHead and maxTail are the bytes of a list that contain its metadata.
const (
	maxHead = 2 << 10
	maxTail = 2 << 10
)

// EventVersions returns a reader that passes a watch on and calls see with the versions in
// it. initial means that the watch begins with objects that existed before, whose versions
// say nothing about now. What it cannot parse it passes on as it is.
func EventVersions(events *filter.Events, initial bool, see func([]byte)) io.Reader {
	return &eventVersions{events: events, initial: initial, see: see}
}

type eventVersions struct {
	events  *filter.Events
	see     func([]byte)
	initial bool

	out  []byte
	line bool      // behind out
	rest io.Reader // not nil: all that follows
}

func (r *eventVersions) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for r.rest == nil {
		if len(r.out) > 0 {
			n := copy(p, r.out)
			if r.out = r.out[n:]; len(r.out) == 0 && r.line && n < len(p) {
				p[n], r.line = '\n', false
				n++
			}
			return n, nil
		}
		if r.line {
			p[0], r.line = '\n', false
			return 1, nil
		}
		e, err := r.events.Next()
		if err != nil {
			r.rest = r.events.Rest()
			break
		}
		if r.initial = r.initial && string(e.Kind) == "ADDED"; !r.initial {
			r.see(e.Revision)
		}
		r.out, r.line = e.Bytes, !r.events.Protobuf()
	}
	return r.rest.Read(p)
}

// ListVersion returns a reader that passes a list on and calls see with its version at the
// end.
func ListVersion(r io.Reader, see func([]byte)) io.Reader { return &listVersion{Reader: r, see: see} }

type listVersion struct {
	io.Reader
	see        func([]byte)
	head, tail []byte
}

func (r *listVersion) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	r.head = append(r.head, p[:min(n, maxHead-len(r.head))]...)
	r.tail = append(r.tail, p[max(0, n-maxTail):n]...)
	r.tail = slices.Delete(r.tail, 0, max(0, len(r.tail)-maxTail))
	if err == io.EOF {
		r.see(versionOf(r.head, r.tail))
	}
	return n, err
}

// versionOf reads the resource version of a list; nil if it is not found. In JSON the
// metadata come first, as of all that is built in, or last, as of custom resources.
func versionOf(head, tail []byte) []byte {
	if raw, ok := bytes.CutPrefix(head, []byte("k8s\x00")); ok {
		return protoVersion(raw)
	}
	if version := firstVersion(head); version != "" {
		return []byte(version)
	}
	return []byte(lastVersion(tail))
}

// firstVersion reads the metadata before the items.
func firstVersion(head []byte) string {
	d := json.NewDecoder(bytes.NewReader(head))
	if !enter(d, "metadata") || !enter(d, "resourceVersion") {
		return ""
	}
	version, _ := d.Token()
	text, _ := version.(string)
	return text
}

// enter advances to the value of an object's member. It reads no items, which may be long.
func enter(d *json.Decoder, member string) bool {
	if begin, err := d.Token(); err != nil || begin != json.Delim('{') {
		return false
	}
	for d.More() {
		key, err := d.Token()
		switch {
		case err != nil || key == "items":
			return false
		case key == member:
			return true
		}
		if err := d.Decode(&json.RawMessage{}); err != nil {
			return false
		}
	}
	return false
}

// lastVersion reads the metadata behind the items: nothing follows but the list's end.
func lastVersion(tail []byte) string {
	const member = `"metadata":`
	at := bytes.LastIndex(tail, []byte(member))
	if at < 0 {
		return ""
	}
	d := json.NewDecoder(bytes.NewReader(tail[at+len(member):]))
	var metadata struct{ ResourceVersion string }
	if d.Decode(&metadata) != nil {
		return ""
	}
	if rest := tail[at+len(member)+int(d.InputOffset()):]; string(bytes.TrimSpace(rest)) != "}" {
		return ""
	}
	return metadata.ResourceVersion
}

// protoVersion reads the beginning of a list's envelope: its second field is the list,
// whose first is its metadata, of which the second is the version.
func protoVersion(b []byte) []byte {
	cut := false
	for _, wanted := range []protowire.Number{2, 1, 2} {
		for {
			number, kind, n := protowire.ConsumeTag(b)
			if n < 0 {
				return nil
			}
			if b = b[n:]; number == wanted && kind == protowire.BytesType {
				break
			}
			if n = protowire.ConsumeFieldValue(number, kind, b); n < 0 {
				return nil
			}
			b = b[n:]
		}
		size, n := protowire.ConsumeVarint(b)
		if n < 0 {
			return nil
		}
		b = b[n:]
		if cut = size > uint64(len(b)); !cut {
			b = b[:size]
		}
	}
	if cut {
		return nil
	}
	return b
}
