package certdir

import (
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/ctrlmesh/ctrlmesh/internal/certificates"
)

const (
	// parseEvery and parseBurst bound how often the contents of one pod's files are parsed: a
	// pod may change them as often as they are read.
	parseEvery = 10 * time.Second
	parseBurst = 8
	// maxRejected bounds the contents that are remembered.
	maxRejected = 2 * parseBurst
)

var errTooOften = errors.New("the files change too often: they are read again within " + parseEvery.String())

// parsing lets one pod's files be parsed at a time, so that those of all pods take one
// processor at most.
var parsing sync.Mutex

// parser parses the files of one pod. It is safe for concurrent use.
type parser struct {
	mu     sync.Mutex
	budget *rate.Limiter
	// rejected has why contents are no certificate, by their hash. The same contents are not
	// parsed again.
	rejected map[[sha256.Size]byte]error
}

// parse returns the certificate with its key.
func (p *parser) parse(cert, key []byte) (*tls.Certificate, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	parts := [2][sha256.Size]byte{sha256.Sum256(cert), sha256.Sum256(key)}
	hash := sha256.Sum256(append(parts[0][:], parts[1][:]...))
	if err := p.rejected[hash]; err != nil {
		return nil, err
	}
	if p.budget == nil {
		p.budget = rate.NewLimiter(rate.Every(parseEvery), parseBurst)
	}
	if !p.budget.Allow() {
		return nil, errTooOften
	}
	parsing.Lock()
	pair, err := certificates.Pair(cert, key)
	parsing.Unlock()
	if err == nil {
		return pair, nil
	}
	if p.rejected == nil || len(p.rejected) >= maxRejected {
		p.rejected = map[[sha256.Size]byte]error{}
	}
	p.rejected[hash] = err
	return nil, err
}
