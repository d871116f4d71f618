package trust

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ctrlmesh/ctrlmesh/manager/metrics"
)

// MeshCASecret is the Secret of the mesh CA, in the manager's namespace.
const MeshCASecret = "ctrlmesh-mesh-ca"

// EgressCASecret is the Secret of the egress CA, in the manager's namespace.
const EgressCASecret = "ctrlmesh-egress-ca"

// leafLife is the validity of an agent's certificate.
const leafLife = 24 * time.Hour

// Authority is the mesh CA, or the egress CA, as stored in its Secret. Every replica reads it;
// only the leader changes it.
type Authority struct {
	// Client reads and writes Secrets, uncached.
	Client client.Client
	// Namespace of the Secret.
	Namespace string
	// Names returns the current names of the apiserver.
	Names func() Names
	// Egress makes it the egress CA, which signs for anything but Names.
	Egress bool
	// Now is the clock.
	Now func() time.Time
	// Log logs rotations. It may be nil.
	Log *slog.Logger

	reading sync.Mutex // one Load or Maintain at a time, so that none undoes another

	ring atomic.Pointer[Ring]
}

// Load reads the CA, or creates it if there is none. If several replicas create it at once,
// one wins and the others read its CA.
func (a *Authority) Load(ctx context.Context) error {
	a.reading.Lock()
	defer a.reading.Unlock()
	_, _, err := a.load(ctx)
	return err
}

// Maintain loads the CA on the leader. It also takes the next step of a rotation, if one is
// due or requested, and reports its progress. bundled and pods are as in Facts.
func (a *Authority) Maintain(ctx context.Context, bundled []byte, pods map[string]time.Time) error {
	a.reading.Lock()
	defer a.reading.Unlock()
	secret, have, err := a.load(ctx)
	if err != nil {
		return err
	}
	f := a.facts()
	f.Rotate, f.Bundled, f.Pods = secret.Annotations[RotateAnnotation], bundled, pods
	ring, err := have.Step(f)
	if err != nil {
		return err
	}
	phase, older, message := ring.Progress(f)
	if ring == have && message == secret.Annotations[RotationAnnotation] {
		a.count(phase, older)
		return nil
	}
	if err := ring.encode(secret); err != nil {
		return err
	}
	annotate(secret, RotationAnnotation, message)
	if err := a.Client.Update(ctx, secret); err != nil {
		return fmt.Errorf("writing Secret %s/%s: %w", a.Namespace, secret.Name, err)
	}
	a.ring.Store(ring)
	a.count(phase, older)
	if a.Log != nil && ring != have {
		a.Log.Info("rotating a CA", "ca", f.Name, "phase", phase, "message", message)
	}
	return nil
}

func (a *Authority) facts() Facts {
	name, _ := a.is()
	return Facts{Now: a.Now(), Name: name, Names: a.Names(), Egress: a.Egress}
}

// is returns the name of the CA, and that of its Secret.
func (a *Authority) is() (name, secret string) {
	if a.Egress {
		return "egress CA", EgressCASecret
	}
	return "mesh CA", MeshCASecret
}

// count sets the metrics of the mesh CA. The egress CA has none, because its rotation cuts no
// pod off from the apiserver.
func (a *Authority) count(phase string, pods int) {
	if a.Egress {
		return
	}
	for _, p := range Phases {
		metrics.MeshCARotation.WithLabelValues(p).Set(0)
	}
	metrics.MeshCARotation.WithLabelValues(phase).Set(1)
	metrics.MeshCARotationPods.Set(float64(pods))
}

func (a *Authority) load(ctx context.Context) (*corev1.Secret, *Ring, error) {
	_, name := a.is()
	secret, err := loadOrCreate(ctx, a.Client, a.Namespace, name, func(s *corev1.Secret) error {
		ring, err := NewRing(a.facts())
		if err != nil {
			return err
		}
		return ring.encode(s)
	})
	if err != nil {
		return nil, nil, err
	}
	ring, err := decodeRing(secret)
	if err != nil {
		return nil, nil, fmt.Errorf("the Secret %s/%s is damaged (%w): restore it, or delete it and restart all labelled pods", a.Namespace, name, err)
	}
	a.ring.Store(ring)
	return secret, ring, nil
}

// Bundle returns the certificates that pods must trust; nil before Load.
func (a *Authority) Bundle() []byte {
	if ring := a.ring.Load(); ring != nil {
		return ring.Bundle()
	}
	return nil
}

// Expiry returns when the certificate that signs leaves expires; zero before Load.
func (a *Authority) Expiry() time.Time {
	if ring := a.ring.Load(); ring != nil {
		return ring.signer.Expiry()
	}
	return time.Time{}
}

// Permits reports whether agents' leaves may contain an address.
func (a *Authority) Permits(ip netip.Addr) bool {
	ring := a.ring.Load()
	return ring != nil && len(ring.signer.Usable(Names{IPs: []netip.Addr{ip.Unmap()}}).IPs) == 1
}

// Sign signs an agent's request for the apiserver's current names. Agents request a new leaf as
// soon as the names change, and otherwise not for hours.
func (a *Authority) Sign(csr []byte) ([][]byte, error) {
	return a.sign(csr, a.Names())
}

func (a *Authority) sign(csr []byte, names Names) ([][]byte, error) {
	ring := a.ring.Load()
	if ring == nil {
		name, _ := a.is()
		return nil, fmt.Errorf("the %s is not loaded yet", name)
	}
	return ring.Sign(csr, names, a.Now())
}

// SignFor signs an agent's request for one other host. Only the egress CA supports it. It never
// signs for a current name of the apiserver, or for one at the time the CA was created.
func (a *Authority) SignFor(csr []byte, host string) ([][]byte, error) {
	names, err := HostName(host)
	if err != nil {
		return nil, err
	}
	api := &x509.Certificate{}
	if a.Names().exclude(api); !a.Egress || len(names.DNS) > 0 && !permitsDNS(api, names.DNS[0]) || len(names.IPs) > 0 && !permitsIP(api, names.IPs[0]) {
		return nil, errors.New("the host stands for the apiserver")
	}
	return a.sign(csr, names)
}

// loadOrCreate reads a Secret, or creates it with the content that fill sets.
func loadOrCreate(ctx context.Context, c client.Client, namespace, name string, fill func(*corev1.Secret) error) (*corev1.Secret, error) {
	key := types.NamespacedName{Namespace: namespace, Name: name}
	secret := &corev1.Secret{}
	err := c.Get(ctx, key, secret)
	if apierrors.IsNotFound(err) {
		secret = &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
			Type:       corev1.SecretTypeOpaque,
		}
		if ferr := fill(secret); ferr != nil {
			return nil, fmt.Errorf("creating the content of Secret %s: %w", key, ferr)
		}
		if err = c.Create(ctx, secret); apierrors.IsAlreadyExists(err) {
			secret = &corev1.Secret{}
			err = c.Get(ctx, key, secret)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("reading Secret %s: %w", key, err)
	}
	if secret.Data == nil {
		secret.Data = map[string][]byte{}
	}
	return secret, nil
}

// Authorities are the CAs and the serving certificate of a replica.
type Authorities struct {
	// Mesh is the CA of agents' leaves. Egress is the CA of leaves for other hosts.
	Mesh, Egress *Authority
	// Serving is the manager's own certificate.
	Serving *Serving
}

// Load reads the CAs that pods trust.
func (a *Authorities) Load(ctx context.Context) error {
	return errors.Join(a.Mesh.Load(ctx), a.Egress.Load(ctx))
}

// Ready returns an error until all are loaded.
func (a *Authorities) Ready() error {
	if len(a.Mesh.Bundle()) == 0 || len(a.Egress.Bundle()) == 0 || len(a.Serving.Bundle()) == 0 {
		return errors.New("certificates are not loaded")
	}
	return nil
}

// Permits reports whether agents' certificates may name an address. A replica whose CA
// does not permit it reads the CA again.
func (a *Authorities) Permits(ctx context.Context, ip netip.Addr) bool {
	if a.Mesh.Permits(ip) {
		return true
	}
	if err := a.Mesh.Load(ctx); err != nil && a.Mesh.Log != nil {
		a.Mesh.Log.Warn("failed to reload certificates", "error", err)
	}
	return a.Mesh.Permits(ip)
}
