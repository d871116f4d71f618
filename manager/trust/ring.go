package trust

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
	"github.com/ctrlmesh/ctrlmesh/internal/clip"
)

const (
	// RotateAnnotation on the mesh CA's Secret requests a new key with each new value.
	RotateAnnotation = v1alpha1.GroupName + "/rotate"
	// RotationAnnotation shows the progress of a rotation.
	RotationAnnotation = v1alpha1.GroupName + "/rotation"

	// The state of a rotation, for the next leader.
	rotatedAnnotation      = v1alpha1.GroupName + "/rotated"
	publishedAnnotation    = v1alpha1.GroupName + "/next-published"
	retiredUntilAnnotation = v1alpha1.GroupName + "/retired-until"

	nextPrefix = "next"
	retiredKey = "retired.crt"

	// maxRetired bounds the retired certificates in bundles.
	maxRetired = 8
	// maxAddresses bounds the addresses that a CA permits because its predecessor did.
	maxAddresses = 64
	// maxNamed bounds the pods that a message names.
	maxNamed = 3
)

// Ring is a CA with its rotations. It is immutable.
//
// Many clients read a CA only when they start. So one CA signs for all pods, the one that the
// oldest pod knows. Another key, or other names, means another CA. The new CA is first added to
// all bundles, and signs once every remaining pod was created with it. The former CA stays in
// the bundles while an agent may serve one of its leaves.
type Ring struct {
	signer *CA
	next   *CA // nil without a rotation
	// published is when all bundles contained next; zero before.
	published time.Time
	// retired signed leaves that are valid until retiredUntil at most.
	retired      []*x509.Certificate
	retiredUntil time.Time
	// rotated is the last value of RotateAnnotation that started a rotation.
	rotated string
}

// Facts are what a rotation depends on.
type Facts struct {
	Now time.Time
	// Name of the CA, for messages.
	Name string
	// Names are the names that leaves should have, or must not have if Egress is set.
	Names  Names
	Egress bool
	// Rotate is the value of RotateAnnotation.
	Rotate string
	// Bundled is the last bundle that every namespace is known to have.
	Bundled []byte
	// Pods are the creation times of the pods that trust the CA, by name; nil while they are
	// unknown.
	Pods map[string]time.Time
}

// NewRing creates a CA.
func NewRing(f Facts) (*Ring, error) {
	ca, err := f.newCA(f.Names)
	if err != nil {
		return nil, err
	}
	return &Ring{signer: ca, rotated: f.Rotate}, nil
}

// newCA adds the time to the subject to make it unique: verifiers find issuers by subject.
func (f Facts) newCA(names Names) (*CA, error) {
	name := "ctrlmesh " + f.Name + " " + f.Now.UTC().Format(time.RFC3339)
	if f.Egress {
		return NewCA(name, names.exclude, f.Now)
	}
	return NewCA(name, names.permit, f.Now)
}

// Step returns the Ring after the next step that the facts allow, or the same Ring if there is
// none.
func (r *Ring) Step(f Facts) (*Ring, error) {
	out := *r
	newest := r.signer
	if r.next != nil {
		newest = r.next
	}
	switch {
	case len(r.retired) > 0 && r.retiredUntil.IsZero():
		out.retiredUntil = f.Now.Add(leafLife + settle) // the annotation was removed
	case len(r.retired) > 0 && f.Now.After(r.retiredUntil):
		out.retired, out.retiredUntil = nil, time.Time{}
	case f.Rotate != "" && f.Rotate != r.rotated, newest.Stale(f.Names, f.Now), len(newest.certs) > 1:
		// Earlier managers, which did not rotate, created several certificates of one key. A
		// next CA that is replaced here has signed nothing.
		next, err := f.newCA(f.Names.since(newest.certs[0]))
		if err != nil {
			return nil, fmt.Errorf("creating another %s: %w", f.Name, err)
		}
		out.next, out.published, out.rotated = next, time.Time{}, f.Rotate
	case r.next != nil && r.published.IsZero() && bytes.Equal(f.Bundled, r.Bundle()):
		out.published = f.Now
	case r.due(f):
		out.retired = append(slices.Clone(r.signer.certs), r.retired...)
		out.retiredUntil = f.Now.Add(leafLife + settle) // an earlier leader may still sign for a while
		out.signer, out.next, out.published = r.next, nil, time.Time{}
	default:
		return r, nil
	}
	return &out, nil
}

// due reports whether next can sign: all remaining pods know it, or the signer is about to
// expire, so that its leaves become invalid anyway.
func (r *Ring) due(f Facts) bool {
	if r.next == nil || r.published.IsZero() || len(r.retired)+len(r.signer.certs) > maxRetired {
		return false
	}
	if f.Now.After(r.signer.Expiry().Add(-leafLife)) {
		return true
	}
	return f.Pods != nil && f.Now.After(r.known()) && len(r.waitsFor(f)) == 0
}

// known returns the time from which new pods certainly know next.
func (r *Ring) known() time.Time { return r.published.Add(settle) }

func (r *Ring) waitsFor(f Facts) []string {
	if r.next == nil || r.published.IsZero() {
		return nil
	}
	var older []string
	for name, created := range f.Pods {
		if !created.After(r.known()) {
			older = append(older, name)
		}
	}
	slices.Sort(older)
	return older
}

// Progress returns the phase of a rotation, the number of pods that it waits for, and a message,
// which is empty without a rotation.
func (r *Ring) Progress(f Facts) (phase string, pods int, message string) {
	if r.next == nil {
		if len(r.retired) == 0 {
			return PhaseNone, 0, ""
		}
		return PhaseRetiring, 0, fmt.Sprintf("done; until %s the former CA stays in the bundles, for agents that have not renewed their certificate", r.retiredUntil.UTC().Format(time.RFC3339))
	}
	if r.published.IsZero() {
		return PhasePublishing, 0, "the next CA is being put into the bundles of all namespaces with labelled pods"
	}
	older := r.waitsFor(f)
	message = fmt.Sprintf("the next CA signs when no labelled pod is left that was created before %s", r.known().UTC().Format(time.RFC3339))
	if len(older) > 0 {
		message += ": delete " + clip.Join(older, maxNamed, ", ")
	}
	return PhaseWaiting, len(older), message
}

// Phases of a rotation.
const (
	PhaseNone       = "none"
	PhasePublishing = "publishing"
	PhaseWaiting    = "waiting"
	PhaseRetiring   = "retiring"
)

// Phases lists all phases.
var Phases = []string{PhaseNone, PhasePublishing, PhaseWaiting, PhaseRetiring}

// Bundle returns the CAs that pods must trust, in PEM. The signer is first, so that the bundle
// changes with it.
func (r *Ring) Bundle() []byte {
	certs := r.signer.certs
	if r.next != nil {
		certs = slices.Concat(certs, r.next.certs)
	}
	return encodeCerts(slices.Concat(certs, r.retired))
}

func (r *Ring) encode(into *corev1.Secret) error {
	data := map[string][]byte{}
	if err := r.signer.encode(signerPrefix, data); err != nil {
		return err
	}
	if r.next != nil {
		if err := r.next.encode(nextPrefix, data); err != nil {
			return err
		}
	}
	if len(r.retired) > 0 {
		data[retiredKey] = encodeCerts(r.retired)
	}
	into.Data = data
	annotate(into, rotatedAnnotation, r.rotated)
	annotate(into, publishedAnnotation, stamp(r.published))
	annotate(into, retiredUntilAnnotation, stamp(r.retiredUntil))
	return nil
}

// decodeRing reads a Secret. Errors do not contain its data.
func decodeRing(from *corev1.Secret) (*Ring, error) {
	out := &Ring{rotated: from.Annotations[rotatedAnnotation]}
	var err error
	if out.signer, err = decodeCA(signerPrefix, from.Data); err != nil {
		return nil, err
	}
	if len(from.Data[nextPrefix+keySuffix]) > 0 {
		if out.next, err = decodeCA(nextPrefix, from.Data); err != nil {
			return nil, err
		}
	}
	if pem := from.Data[retiredKey]; len(pem) > 0 {
		if out.retired, err = decodeCerts(pem); err != nil {
			return nil, fmt.Errorf("key %s: %w", retiredKey, err)
		}
	}
	// An invalid time counts as unknown, which only delays the rotation.
	out.published, _ = time.Parse(time.RFC3339, from.Annotations[publishedAnnotation])
	out.retiredUntil, _ = time.Parse(time.RFC3339, from.Annotations[retiredUntilAnnotation])
	return out, nil
}

func annotate(s *corev1.Secret, key, value string) {
	if value == "" {
		delete(s.Annotations, key)
		return
	}
	metav1.SetMetaDataAnnotation(&s.ObjectMeta, key, value)
}

func stamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339)
}

// Sign signs an agent's request for the part of names that all pods accept.
func (r *Ring) Sign(csr []byte, names Names, now time.Time) ([][]byte, error) {
	life := min(leafLife, r.signer.Expiry().Sub(now))
	if life <= 0 {
		return nil, errors.New("the CA has expired")
	}
	return r.signer.SignRequest(csr, names, life, now)
}
