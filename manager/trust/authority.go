package trust

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// MeshCASecret is the Secret of the mesh CA, in the manager's namespace.
const MeshCASecret = "ctrlmesh-mesh-ca"

// leafLife is how long an agent's certificate lives.
const leafLife = 24 * time.Hour

// Authority is the mesh CA as its Secret has it. Every replica reads it; the
// leader alone changes it.
type Authority struct {
	// Client reads and writes Secrets, uncached.
	Client client.Client
	// Namespace of the Secret.
	Namespace string
	// Now is the clock; time.Now when nil.
	Now func() time.Time

	mu    sync.RWMutex
	ca    *CA
	names Names
}

// Load reads the CA, or makes it where there is none. Of several replicas that
// make it at once, one wins and the others read what it made.
func (a *Authority) Load(ctx context.Context, names Names) error {
	_, _, err := a.load(ctx, names)
	return err
}

// Maintain is Load for the leader: it issues a new certificate when one is due
// and drops those that no pod needs, oldestPod being the start of the oldest.
func (a *Authority) Maintain(ctx context.Context, names Names, oldestPod time.Time) error {
	secret, have, err := a.load(ctx, names)
	if err != nil {
		return err
	}
	ca := have.Prune(oldestPod, a.now())
	if ca.Stale(names, a.now()) {
		if ca, err = ca.Reissue(names, a.now()); err != nil {
			return fmt.Errorf("issuing the mesh CA's certificate: %w", err)
		}
	}
	if ca == have {
		return nil
	}
	if err := ca.encode(secret.Data); err != nil {
		return err
	}
	if err := a.Client.Update(ctx, secret); err != nil {
		return fmt.Errorf("writing Secret %s/%s: %w", a.Namespace, MeshCASecret, err)
	}
	a.set(ca, names)
	return nil
}

func (a *Authority) load(ctx context.Context, names Names) (*corev1.Secret, *CA, error) {
	secret, err := loadOrCreate(ctx, a.Client, a.Namespace, MeshCASecret, func() (map[string][]byte, error) {
		ca, err := NewCA("ctrlmesh mesh CA", names, a.now())
		if err != nil {
			return nil, err
		}
		data := map[string][]byte{}
		return data, ca.encode(data)
	})
	if err != nil {
		return nil, nil, err
	}
	ca, err := decodeCA(secret.Data)
	if err != nil {
		return nil, nil, fmt.Errorf("the Secret %s/%s is damaged (%w): restore it, or delete it and restart all labelled pods", a.Namespace, MeshCASecret, err)
	}
	a.set(ca, names)
	return secret, ca, nil
}

func (a *Authority) set(ca *CA, names Names) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ca, a.names = ca, names
}

// Bundle is what pods are given to trust; nil before Load.
func (a *Authority) Bundle() []byte {
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.ca == nil {
		return nil
	}
	return a.ca.Bundle()
}

// Expiry is when the CA's newest certificate ends; zero before Load.
func (a *Authority) Expiry() time.Time {
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.ca == nil {
		return time.Time{}
	}
	return a.ca.Expiry()
}

// Sign signs an agent's request for the apiserver's names.
func (a *Authority) Sign(csr []byte) ([][]byte, error) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.ca == nil {
		return nil, errors.New("the mesh CA is not loaded yet")
	}
	return a.ca.SignRequest(csr, a.names, leafLife, a.now())
}

func (a *Authority) now() time.Time {
	if a.Now != nil {
		return a.Now()
	}
	return time.Now()
}

// loadOrCreate gets a Secret, or creates it with what fill gives.
func loadOrCreate(ctx context.Context, c client.Client, namespace, name string, fill func() (map[string][]byte, error)) (*corev1.Secret, error) {
	key := types.NamespacedName{Namespace: namespace, Name: name}
	secret := &corev1.Secret{}
	err := c.Get(ctx, key, secret)
	if apierrors.IsNotFound(err) {
		data, ferr := fill()
		if ferr != nil {
			return nil, fmt.Errorf("making Secret %s: %w", key, ferr)
		}
		secret = &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
			Type:       corev1.SecretTypeOpaque,
			Data:       data,
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
