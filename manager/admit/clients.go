package admit

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"
)

// reloadEvery is how often the file of CAs is read anew at most.
const reloadEvery = 10 * time.Second

// Clients verifies the certificates of the webhooks' clients.
type Clients struct {
	// CAFile has the CAs in PEM. It is read again while the manager runs.
	CAFile string
	// Names are the common names of which a certificate has one; all are allowed if
	// there are none.
	Names []string
	Log   *slog.Logger

	mu   sync.Mutex
	pool *x509.CertPool
	read time.Time
}

// Configure makes a server ask for certificates. It fails if there are no CAs.
func (c *Clients) Configure(config *tls.Config) error {
	pool, err := c.load()
	if err != nil {
		return err
	}
	c.pool, c.read = pool, time.Now()
	base := config.Clone()
	base.ClientAuth = tls.RequireAndVerifyClientCert
	base.VerifyConnection = c.verifyName
	config.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		current := base.Clone()
		current.ClientCAs = c.current()
		return current, nil
	}
	return nil
}

func (c *Clients) load() (*x509.CertPool, error) {
	pem, err := os.ReadFile(c.CAFile)
	if err != nil {
		return nil, fmt.Errorf("reading the CAs of the webhooks' clients: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("reading the CAs of the webhooks' clients: %s has no certificate", c.CAFile)
	}
	return pool, nil
}

// current returns the CAs as the file has them, or had them last.
func (c *Clients) current() *x509.CertPool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.read) < reloadEvery {
		return c.pool
	}
	c.read = time.Now()
	pool, err := c.load()
	if err != nil {
		c.Log.Error("keeping the former CAs of the webhooks' clients", "error", err)
		return c.pool
	}
	c.pool = pool
	return pool
}

// verifyName implements tls.Config.VerifyConnection.
func (c *Clients) verifyName(state tls.ConnectionState) error {
	if len(state.PeerCertificates) == 0 {
		return errors.New("no client certificate")
	}
	name := state.PeerCertificates[0].Subject.CommonName
	if len(c.Names) > 0 && !slices.Contains(c.Names, name) {
		return fmt.Errorf("the client certificate's name %q is not allowed", name)
	}
	return nil
}
