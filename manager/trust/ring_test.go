package trust

import (
	"bytes"
	"context"
	"crypto/x509"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// verify is what a client does that was given roots.
func verify(chain [][]byte, roots []byte, name string, at time.Time) error {
	leaf, err := x509.ParseCertificate(chain[0])
	if err != nil {
		return err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(roots) {
		return fmt.Errorf("no roots")
	}
	_, err = leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: pool, CurrentTime: at})
	return err
}

// oneSecret is an apiserver that has but one Secret, and is quick.
type oneSecret struct {
	client.Client
	stored *corev1.Secret
}

func (c *oneSecret) Get(_ context.Context, key client.ObjectKey, o client.Object, _ ...client.GetOption) error {
	if c.stored == nil {
		return apierrors.NewNotFound(schema.GroupResource{Resource: "secrets"}, key.Name)
	}
	c.stored.DeepCopyInto(o.(*corev1.Secret))
	return nil
}

func (c *oneSecret) Create(_ context.Context, o client.Object, _ ...client.CreateOption) error {
	c.stored = o.(*corev1.Secret).DeepCopy()
	return nil
}

func (c *oneSecret) Update(_ context.Context, o client.Object, _ ...client.UpdateOption) error {
	c.stored = o.(*corev1.Secret).DeepCopy()
	return nil
}

// mesh is a mesh with everybody who has a certificate or must verify one. Its
// manager keeps nothing but the Secret from one moment to the next.
type mesh struct {
	t       require.TestingT
	client  client.Client
	now     time.Time
	names   Names
	csr     []byte
	secret  []byte // the bundle by the Secret
	bundles []byte // what namespaces have
	volumes []byte // what kubelets give to pods that start
	pods    map[string]time.Time
	knows   map[string][]byte // by each pod: what its client read when it started
	agents  []*agentLeaf

	accepted map[[2]string]bool
}

type agentLeaf struct {
	chain   [][]byte
	mesh    []byte // the bundle as of the last leaf
	expires time.Time
	cutOff  bool
}

func newMesh(t require.TestingT, c client.Client, csr []byte) *mesh {
	m := &mesh{
		t: t, client: c, now: now, names: apiNames("10.96.0.1"), csr: csr,
		pods: map[string]time.Time{}, knows: map[string][]byte{}, accepted: map[[2]string]bool{},
		agents: []*agentLeaf{{}, {}},
	}
	m.manage()
	m.bundles = m.secret
	m.volumes = m.secret
	m.renew()
	return m
}

func (m *mesh) authority() *Authority {
	return &Authority{Client: m.client, Namespace: "mesh", Names: func() Names { return m.names }, Now: func() time.Time { return m.now }}
}

// manage is one run of the trust loop, of a manager that has just started.
func (m *mesh) manage() {
	a := m.authority()
	require.NoError(m.t, a.Maintain(context.Background(), m.bundles, m.pods))
	m.secret = a.Bundle()
}

// renew lets agents that reach the manager renew what is due.
func (m *mesh) renew() {
	a := m.authority()
	require.NoError(m.t, a.Load(context.Background()))
	for _, g := range m.agents {
		if g.cutOff || bytes.Equal(g.mesh, a.Bundle()) && m.now.Before(g.expires.Add(-leafLife/3)) {
			continue
		}
		chain, err := a.Sign(m.csr)
		require.NoError(m.t, err)
		leaf, err := x509.ParseCertificate(chain[0])
		require.NoError(m.t, err)
		*g = agentLeaf{chain: chain, mesh: a.Bundle(), expires: leaf.NotAfter}
	}
}

func (m *mesh) start(pod string) { m.pods[pod], m.knows[pod] = m.now, m.volumes }

func (m *mesh) stop(pod string) {
	delete(m.pods, pod)
	delete(m.knows, pod)
}

// check is the point of it all: every pod accepts every agent.
func (m *mesh) check() {
	for pod, roots := range m.knows {
		for i, g := range m.agents {
			if m.now.After(g.expires) {
				continue // cut off for longer than a leaf lives
			}
			// What was accepted once is until the leaf expires, for CAs live longer.
			if pair := [2]string{string(g.chain[0]), string(roots)}; !m.accepted[pair] {
				require.NoError(m.t, verify(g.chain, roots, "10.96.0.1", m.now), "pod %s of %s does not accept agent %d at %s", pod, m.pods[pod], i, m.now)
				require.NoError(m.t, verify(g.chain, roots, "kubernetes.default.svc", m.now))
				m.accepted[pair] = true
			}
		}
	}
}

// pass lets time pass, everything following with the delays it has in a cluster.
func (m *mesh) pass(d, step time.Duration) {
	for end := m.now.Add(d); m.now.Before(end); {
		m.now = m.now.Add(step)
		m.volumes, m.bundles = m.bundles, m.secret
		m.manage()
		m.check()
		m.renew()
		m.check()
	}
}

func (m *mesh) ask(value string) {
	s := m.stored()
	annotate(s, RotateAnnotation, value)
	require.NoError(m.t, m.client.Update(context.Background(), s))
}

func (m *mesh) stored() *corev1.Secret {
	s := &corev1.Secret{}
	require.NoError(m.t, m.client.Get(context.Background(), types.NamespacedName{Namespace: "mesh", Name: MeshCASecret}, s))
	return s
}

func (m *mesh) phase() string {
	ring, err := decodeRing(m.stored())
	require.NoError(m.t, err)
	phase, _, message := ring.Progress(Facts{Now: m.now, Pods: m.pods})
	require.Equal(m.t, message, m.stored().Annotations[RotationAnnotation], "people read what is so")
	return phase
}

// One whole rotation, with pods of every age.
func TestRotation(t *testing.T) {
	m := newMesh(t, &oneSecret{}, request(t, p256(t)))
	first := m.stored().Data["ca.key"]
	m.start("before")
	m.pass(time.Hour, time.Minute)
	require.Equal(t, PhaseNone, m.phase())
	require.Equal(t, first, m.stored().Data["ca.key"])

	m.ask("1")
	m.manage()
	require.Equal(t, PhasePublishing, m.phase())
	m.start("meanwhile")
	m.check()
	m.pass(5*time.Minute, time.Minute)
	require.Equal(t, PhaseWaiting, m.phase())
	m.start("early")
	m.pass(48*time.Hour, time.Hour)
	m.start("after")
	require.Equal(t, PhaseWaiting, m.phase(), "pods that know the old CA alone still run")
	require.Equal(t, first, m.stored().Data["ca.key"])
	require.Contains(t, m.stored().Annotations[RotationAnnotation], ": delete before, early, meanwhile", "it says who holds it up")

	m.stop("before")
	m.stop("early")
	m.pass(10*time.Minute, time.Minute)
	require.Equal(t, PhaseWaiting, m.phase())
	m.agents[1].cutOff = true // its leaf is of the old CA, for hours yet
	m.stop("meanwhile")
	m.pass(time.Minute, time.Minute)
	require.Equal(t, PhaseRetiring, m.phase())
	second := m.stored().Data["ca.key"]
	require.NotEqual(t, first, second)
	require.NotContains(t, m.stored().Data, "next.key", "no key lies about longer than it signs")
	m.start("new")

	m.pass(12*time.Hour, time.Hour)
	m.start("newer")
	m.check()
	m.agents[1].cutOff = false
	m.pass(24*time.Hour, time.Hour)
	require.Equal(t, PhaseNone, m.phase())
	require.Len(t, m.stored().Data, 2)
	require.Equal(t, 1, bytes.Count(m.secret, []byte("BEGIN")))
	require.Equal(t, second, m.stored().Data["ca.key"])

	m.pass(time.Hour, time.Minute)
	require.Equal(t, PhaseNone, m.phase(), "once asked, once rotated")
}

// Before the CA ends there is another, asked for or not, and members that nobody
// restarts do not keep it from signing when the first is of no use any more.
func TestRotationByAge(t *testing.T) {
	m := newMesh(t, &oneSecret{}, request(t, p256(t)))
	key := m.stored().Data["ca.key"]
	m.start("for ever")
	const day = 24 * time.Hour
	m.pass(caLife/3*2-20*day, 10*day)
	require.Equal(t, PhaseNone, m.phase())
	m.pass(30*day, day)
	require.Equal(t, PhaseWaiting, m.phase())
	m.start("later")
	m.pass(caLife/3-50*day, 5*day)
	require.Equal(t, PhaseWaiting, m.phase())
	require.Equal(t, key, m.stored().Data["ca.key"])
	ring, err := decodeRing(m.stored())
	require.NoError(t, err)
	delete(m.knows, "for ever") // once its CA has expired, it accepts no certificate
	m.pass(ring.signer.Expiry().Sub(m.now)-5*day, 5*day)
	m.pass(ring.signer.Expiry().Sub(m.now)-leafLife+time.Hour, 6*time.Hour)
	require.NotEqual(t, key, m.stored().Data["ca.key"])
	m.check()
}

// A new address of the apiserver follows the same steps: certificates include it once the CA
// of every pod permits it.
func TestNewNamesAreARotation(t *testing.T) {
	m := newMesh(t, &oneSecret{}, request(t, p256(t)))
	m.start("before")
	m.names = apiNames("10.96.0.1", "192.0.2.7")
	m.pass(time.Hour, time.Minute)
	require.Error(t, verify(m.agents[0].chain, m.volumes, "192.0.2.7", m.now))
	a := m.authority()
	require.NoError(t, a.Load(t.Context()))
	require.False(t, a.Permits(m.names.IPs[1]))
	require.True(t, a.Permits(m.names.IPs[0]))
	m.start("after")
	m.stop("before")
	m.pass(time.Minute, time.Minute)
	require.NoError(t, verify(m.agents[0].chain, m.knows["after"], "192.0.2.7", m.now))
	require.NoError(t, a.Load(t.Context()))
	require.True(t, a.Permits(m.names.IPs[1]))

	m.names = apiNames("10.96.0.1") // and goes: no reason for another
	m.pass(48*time.Hour, time.Hour)
	require.Equal(t, PhaseNone, m.phase())
}

// Control planes that take turns, or one that is replaced and comes back, make one
// other CA and no more, and the bundles are left alone.
func TestAddressesThatComeBack(t *testing.T) {
	m := newMesh(t, &oneSecret{}, request(t, p256(t)))
	m.start("before")
	m.names = apiNames("10.96.0.1", "192.0.2.1")
	m.pass(5*time.Minute, time.Minute)
	bundle, published := m.secret, m.stored().Annotations[publishedAnnotation]
	require.NotEmpty(t, published)
	for range 3 {
		m.names = apiNames("10.96.0.1")
		m.pass(5*time.Minute, time.Minute)
		m.names = apiNames("10.96.0.1", "192.0.2.1")
		m.pass(5*time.Minute, time.Minute)
	}
	require.Equal(t, string(bundle), string(m.secret))
	require.Equal(t, published, m.stored().Annotations[publishedAnnotation])
	m.stop("before")
	m.pass(48*time.Hour, time.Hour)
	m.names = apiNames("10.96.0.1", "192.0.2.2") // another, in the place of the first
	m.start("between")
	m.pass(5*time.Minute, time.Minute)
	bundle = m.secret
	for _, ip := range []string{"192.0.2.1", "192.0.2.2", "192.0.2.1"} {
		m.names = apiNames("10.96.0.1", ip)
		m.pass(5*time.Minute, time.Minute)
	}
	require.Equal(t, string(bundle), string(m.secret))
	m.stop("between")
	m.pass(48*time.Hour, time.Hour)
	require.Equal(t, PhaseNone, m.phase())
	require.Equal(t, 1, bytes.Count(m.secret, []byte("BEGIN")))
}

// However many addresses the apiserver had, a CA is not larger than a bundle can
// take, and keeps those that it had last.
func TestAddressesAreBounded(t *testing.T) {
	f := Facts{Now: now, Names: apiNames("10.96.0.1")}
	r, err := NewRing(f)
	require.NoError(t, err)
	for i := range 2 * maxAddresses {
		f.Names = apiNames("10.96.0.1", fmt.Sprintf("192.0.2.%d", i))
		r, err = r.Step(f)
		require.NoError(t, err)
	}
	require.Len(t, r.next.certs[0].PermittedIPRanges, maxAddresses)
	require.False(t, r.next.Stale(apiNames("10.96.0.1", "192.0.2.126", "192.0.2.127", "192.0.2.100"), now))
	require.True(t, r.next.Stale(apiNames("192.0.2.1"), now))
}

// What managers wrote that knew no rotation: several certificates of one key.
func TestCAOfAnEarlierManager(t *testing.T) {
	c := &oneSecret{}
	ca, err := NewCA("ctrlmesh mesh CA", apiNames("10.96.0.1").permit, now.Add(-time.Hour))
	require.NoError(t, err)
	older := ca.Bundle()
	newer, err := certify(ca.key, "ctrlmesh mesh CA", apiNames("10.96.0.1", "10.96.0.9").permit, now.Add(-time.Minute))
	require.NoError(t, err)
	ca.certs = append([]*x509.Certificate{newer}, ca.certs...)
	s := &corev1.Secret{Data: map[string][]byte{}}
	s.Namespace, s.Name = "mesh", MeshCASecret
	require.NoError(t, ca.encode(signerPrefix, s.Data))
	require.NoError(t, c.Create(t.Context(), s))

	m := newMesh(t, c, request(t, p256(t)))
	m.names = apiNames("10.96.0.1", "10.96.0.9")
	m.start("new")
	m.start("old")
	m.knows["old"] = older
	m.pass(time.Hour, time.Minute)
	m.stop("old")
	m.stop("new")
	m.start("newest")
	m.pass(48*time.Hour, time.Hour)
	require.Equal(t, PhaseNone, m.phase())
	require.NoError(t, verify(m.agents[0].chain, m.volumes, "10.96.0.9", m.now))
}

// Whatever comes in whatever order, no pod meets an agent that it does not accept.
func TestNoHandshakeEverFails(t *testing.T) {
	csr := request(t, p256(t))
	rapid.Check(t, func(rt *rapid.T) {
		m := newMesh(rt, &oneSecret{}, csr)
		pods, asked := 0, 0
		rt.Repeat(map[string]func(*rapid.T){
			"pass": func(rt *rapid.T) {
				m.pass(time.Duration(rapid.IntRange(1, 15).Draw(rt, "minutes"))*time.Minute, 3*time.Minute)
			},
			"hours": func(rt *rapid.T) {
				m.pass(time.Duration(rapid.IntRange(1, 15).Draw(rt, "hours"))*time.Hour, 3*time.Hour)
			},
			"start": func(*rapid.T) { pods++; m.start(fmt.Sprint("p", pods)) },
			"stop": func(rt *rapid.T) {
				var all []string
				for p := range m.pods {
					all = append(all, p)
				}
				if len(all) > 0 {
					slices.Sort(all)
					m.stop(rapid.SampledFrom(all).Draw(rt, "pod"))
				}
			},
			"stop all": func(*rapid.T) { clear(m.pods); clear(m.knows) },
			"ask":      func(*rapid.T) { asked++; m.ask(fmt.Sprint(asked)) },
			"names": func(rt *rapid.T) {
				m.names = apiNames("10.96.0.1", "192.0.2."+fmt.Sprint(rapid.IntRange(1, 3).Draw(rt, "address")))
			},
			"agent": func(rt *rapid.T) {
				i := rapid.IntRange(0, 1).Draw(rt, "agent")
				m.agents[i].cutOff = !m.agents[i].cutOff
			},
			"": func(*rapid.T) { m.check() },
		})
	})
}

// The Secret may be read by people and by programs other than ours.
func TestTheSecretDescribesItself(t *testing.T) {
	m := newMesh(t, &oneSecret{}, request(t, p256(t)))
	m.ask("today")
	m.pass(5*time.Minute, time.Minute)
	s := m.stored()
	require.Equal(t, "today", s.Annotations[rotatedAnnotation])
	_, err := time.Parse(time.RFC3339, s.Annotations[publishedAnnotation])
	require.NoError(t, err)
	require.Equal(t, []string{"ca.crt", "ca.key", "next.crt", "next.key"}, slices.Sorted(func(yield func(string) bool) {
		for k := range s.Data {
			if !yield(k) {
				return
			}
		}
	}))

	// Damage of the annotations costs time, not handshakes.
	annotate(s, publishedAnnotation, "rubbish")
	require.NoError(t, m.client.Update(t.Context(), s))
	m.pass(5*time.Minute, time.Minute)
	require.Equal(t, PhaseWaiting, m.phase())
	m.pass(time.Hour, time.Minute)
	require.Equal(t, PhaseRetiring, m.phase())
	s = m.stored()
	annotate(s, retiredUntilAnnotation, "")
	require.NoError(t, m.client.Update(t.Context(), s))
	m.pass(time.Hour, time.Minute)
	require.Equal(t, PhaseRetiring, m.phase())
	m.pass(leafLife+time.Hour, time.Hour)
	require.Equal(t, PhaseNone, m.phase())
}
