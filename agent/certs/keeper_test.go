package certs

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// ca signs whatever it is asked to, for a life that begins now.
type ca struct {
	life  time.Duration
	calls chan struct{}
	fail  int
}

func (c *ca) sign(_ context.Context, csr []byte) ([][]byte, error) {
	defer func() { c.calls <- struct{}{} }()
	if c.fail > 0 {
		c.fail--
		return nil, errors.New("not now")
	}
	req, err := x509.ParseCertificateRequest(csr)
	if err != nil {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{SerialNumber: big.NewInt(now.UnixNano()), NotBefore: now, NotAfter: now.Add(c.life), DNSNames: []string{"kubernetes"}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, req.PublicKey, key)
	return [][]byte{der}, err
}

// soon is when what must happen has happened, however busy the machine is.
const soon = 30 * time.Second

func run(t *testing.T, dir string, c *ca) *Keeper {
	t.Helper()
	k, err := NewKeeper(dir, c.sign, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); k.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return k
}

func TestKeeperRetriesUntilTheManagerAnswers(t *testing.T) {
	c := &ca{life: time.Hour, calls: make(chan struct{}, 10), fail: 2}
	k := run(t, t.TempDir(), c)
	for range 3 {
		<-c.calls
	}
	assert.Eventually(t, func() bool { _, err := k.Current(); return err == nil }, soon, time.Millisecond)
}

func TestKeeperServesTheKeptCertificateWithoutAManager(t *testing.T) {
	dir := t.TempDir()
	c := &ca{life: time.Hour, calls: make(chan struct{}, 10)}
	first := run(t, dir, c)
	require.Eventually(t, func() bool {
		_, err := os.Stat(filepath.Join(dir, file))
		return err == nil
	}, soon, time.Millisecond)
	want, err := first.Current()
	require.NoError(t, err)

	second, err := NewKeeper(dir, nil, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	got, err := second.Current()

	require.NoError(t, err)
	assert.Equal(t, want.Certificate, got.Certificate)
	info, err := os.Stat(filepath.Join(dir, file))
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o600), info.Mode().Perm())
}

// The manager may have another CA than the one that signed it.
func TestKeeperReplacesTheKeptCertificate(t *testing.T) {
	dir := t.TempDir()
	c := &ca{life: time.Hour, calls: make(chan struct{}, 10)}
	k, err := NewKeeper(dir, c.sign, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	require.NoError(t, k.fetch(t.Context()))
	<-c.calls
	kept, err := k.Current()
	require.NoError(t, err)

	c.calls = make(chan struct{}) // the manager takes its time
	again := run(t, dir, c)
	got, err := again.Current()
	require.NoError(t, err)
	require.Equal(t, kept.Certificate, got.Certificate)

	<-c.calls
	require.Eventually(t, func() bool {
		got, err := again.Current()
		return err == nil && !assert.ObjectsAreEqual(kept.Certificate, got.Certificate)
	}, soon, time.Millisecond)
}

func TestKeeperDoesNotServeAnExpiredCertificate(t *testing.T) {
	dir := t.TempDir()
	c := &ca{life: -time.Minute, calls: make(chan struct{}, 1000)}
	k, err := NewKeeper(dir, c.sign, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	require.NoError(t, k.fetch(t.Context()))

	again, err := NewKeeper(dir, nil, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	_, err = again.Current()

	assert.ErrorIs(t, err, ErrNone)
}

func TestKeeperRenewsAtTwoThirdsOfTheLife(t *testing.T) {
	c := &ca{life: 3 * time.Hour, calls: make(chan struct{}, 1)}
	k, err := NewKeeper(t.TempDir(), c.sign, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	require.Zero(t, k.untilRenewal(), "at once, without a certificate")
	require.NoError(t, k.fetch(t.Context()))
	assert.InDelta(t, (2 * time.Hour).Seconds(), k.untilRenewal().Seconds(), 60)
}

func TestKeeperRenewsDueCertificate(t *testing.T) {
	c := &ca{life: 3 * time.Second, calls: make(chan struct{}, 100)}
	run(t, t.TempDir(), c)
	<-c.calls
	<-c.calls
}

func TestKeeperRenewsWhenAsked(t *testing.T) {
	c := &ca{life: time.Hour, calls: make(chan struct{}, 100)}
	k := run(t, t.TempDir(), c)
	<-c.calls
	k.Renew()
	<-c.calls
}
