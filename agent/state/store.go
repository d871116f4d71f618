package state

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/ctrlmesh/ctrlmesh/agent/pods"
	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
	"github.com/ctrlmesh/ctrlmesh/internal/failure"
)

// Store keeps one file per policy and pod, in a directory that only root can read. It is
// not safe for concurrent use.
type Store struct{ dir string }

const (
	clusterFile  = "cluster.pb"
	webhooksFile = "webhooks.pb"
	policySuffix = ".policy.pb"
	podSuffix    = ".pod.json"
)

// Open returns the store in dir, which it creates if necessary.
func Open(dir string) (*Store, error) {
	err := os.MkdirAll(dir, 0o700)
	return &Store{dir: dir}, failure.Wrap(err, "creating the policy directory")
}

// Saved is a policy as it is kept on disk.
type Saved struct {
	*meshv1.PodPolicy
	// InForce are the last valid rules, if those of the policy are invalid; else nil.
	InForce *meshv1.Traffic
	// Since is when the policy replaced another.
	Since time.Time
}

// Always is the Since of a policy that is the first of its pod.
var Always = time.Unix(0, 0)

// NotApplied is the Since of a policy that no proxy has applied yet: the caches of the
// pod's clients were filled under another. File systems know no later time.
var NotApplied = time.Unix(math.MaxInt32, 0)

// Load returns the saved cluster, nil if there is none, and policies. It skips files that
// it cannot read, and reports them in the error.
func (s *Store) Load() (*meshv1.Cluster, []Saved, error) {
	var cluster *meshv1.Cluster
	var policies []Saved
	var errs []error
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, nil, fmt.Errorf("reading the policy directory: %w", err)
	}
	for _, e := range entries {
		switch {
		case e.Name() == clusterFile:
			c := &meshv1.Cluster{}
			err := s.read(e.Name(), func(b []byte) error { return proto.Unmarshal(b, c) })
			if err == nil {
				cluster = c
			}
			errs = append(errs, err)
		case strings.HasSuffix(e.Name(), policySuffix):
			p, err := s.Policy(strings.TrimSuffix(e.Name(), policySuffix))
			if err == nil {
				policies = append(policies, p)
			}
			errs = append(errs, err)
		}
	}
	return cluster, policies, errors.Join(errs...)
}

// SavePod keeps the description of a captured pod.
func (s *Store) SavePod(p pods.Pod) error {
	name, err := fileOf(p.UID, podSuffix)
	if err != nil {
		return err
	}
	b, err := json.Marshal(p)
	if err != nil {
		return fmt.Errorf("encoding %s: %w", name, err)
	}
	return s.write(name, b, time.Now())
}

// LoadPods returns the saved pods by uid. It skips files that it cannot read, and reports
// them in the error.
func (s *Store) LoadPods() (map[string]pods.Pod, error) {
	names, err := filepath.Glob(filepath.Join(s.dir, "*"+podSuffix))
	if err != nil {
		return nil, fmt.Errorf("reading the policy directory: %w", err)
	}
	saved := map[string]pods.Pod{}
	var errs []error
	for _, name := range names {
		var p pods.Pod
		b, err := os.ReadFile(name)
		if err == nil {
			err = json.Unmarshal(b, &p)
		}
		if err == nil && p.UID+podSuffix != filepath.Base(name) {
			err = fmt.Errorf("it describes pod %q", p.UID)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("reading saved pod %s: %w", filepath.Base(name), err))
			continue
		}
		saved[p.UID] = p
	}
	return saved, errors.Join(errs...)
}

// SaveCluster replaces the saved cluster.
func (s *Store) SaveCluster(c *meshv1.Cluster) error { return s.save(clusterFile, c) }

func (s *Store) save(name string, m proto.Message) error {
	b, err := deterministic.Marshal(m)
	if err != nil {
		return fmt.Errorf("encoding %s: %w", name, err)
	}
	return s.writeSummed(name, b, time.Now())
}

// SaveWebhooks replaces the saved webhooks.
func (s *Store) SaveWebhooks(w *meshv1.Webhooks) error { return s.save(webhooksFile, w) }

// Webhooks returns the saved webhooks, none if nothing was saved.
func (s *Store) Webhooks() (*meshv1.Webhooks, error) {
	w := &meshv1.Webhooks{}
	err := s.read(webhooksFile, func(b []byte) error { return proto.Unmarshal(b, w) })
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return w, err
}

// SavePolicy replaces the saved policy of a pod. An equal one that is saved already keeps
// its Since, if that is earlier.
func (s *Store) SavePolicy(p Saved) error {
	name, err := fileOf(p.GetUid(), policySuffix)
	if err != nil {
		return err
	}
	b, err := p.marshal()
	if err != nil {
		return fmt.Errorf("encoding %s: %w", name, err)
	}
	return s.writeSummed(name, b, p.Since)
}

// DeletePolicy deletes the policy of a pod.
func (s *Store) DeletePolicy(uid string) error { return s.remove(uid, policySuffix) }

// Delete deletes a pod and its policy.
func (s *Store) Delete(uid string) error {
	return errors.Join(s.remove(uid, policySuffix), s.remove(uid, podSuffix))
}

func (s *Store) remove(uid, suffix string) error {
	name, err := fileOf(uid, suffix)
	if err != nil {
		return err
	}
	if err := os.Remove(filepath.Join(s.dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("deleting the saved state of pod %s: %w", uid, err)
	}
	return nil
}

func fileOf(uid, suffix string) (string, error) {
	if uid == "" || len(uid) > 128 || strings.ContainsAny(uid, "/\x00") {
		return "", fmt.Errorf("pod uid %q cannot name a file", uid)
	}
	return uid + suffix, nil
}

// Policy returns the saved policy of a pod.
func (s *Store) Policy(uid string) (Saved, error) {
	name, err := fileOf(uid, policySuffix)
	if err != nil {
		return Saved{}, err
	}
	var p Saved
	err = s.read(name, func(b []byte) error {
		info, err := os.Stat(filepath.Join(s.dir, name))
		if err != nil {
			return err
		}
		p.Since = info.ModTime()
		if err = p.unmarshal(b); err == nil && p.GetUid() != uid {
			err = fmt.Errorf("it is the policy of pod %q", p.GetUid())
		}
		return err
	})
	return p, err
}

func (s *Store) read(name string, decode func([]byte) error) error {
	b, err := os.ReadFile(filepath.Join(s.dir, name))
	if err != nil {
		return fmt.Errorf("reading a saved policy: %w", err)
	}
	if b, err = checked(b); err == nil {
		err = decode(b)
	}
	return failure.Wrap(err, "reading saved policy %s", name)
}

var deterministic = proto.MarshalOptions{Deterministic: true}

// Numbers of fields that no message has. They precede the fields of the message, and
// earlier versions ignore them.
const (
	// sumField is a checksum of all that follows it. A truncated file would look like a
	// policy that restricts less.
	sumField protowire.Number = 1000
	// inForceField is a policy's InForce.
	inForceField protowire.Number = 1001
)

func (p Saved) marshal() ([]byte, error) {
	var b []byte
	if p.InForce != nil {
		rules, err := deterministic.Marshal(p.InForce)
		if err != nil {
			return nil, err
		}
		b = protowire.AppendBytes(protowire.AppendTag(nil, inForceField, protowire.BytesType), rules)
	}
	return deterministic.MarshalAppend(b, p.PodPolicy)
}

func (p *Saved) unmarshal(b []byte) error {
	if field, is := bytes.CutPrefix(b, protowire.AppendTag(nil, inForceField, protowire.BytesType)); is {
		rules, n := protowire.ConsumeBytes(field)
		if n < 0 {
			return protowire.ParseError(n)
		}
		p.InForce = &meshv1.Traffic{}
		if err := proto.Unmarshal(rules, p.InForce); err != nil {
			return err
		}
		b = field[n:]
	}
	p.PodPolicy = &meshv1.PodPolicy{}
	return proto.Unmarshal(b, p.PodPolicy)
}

func (s *Store) writeSummed(name string, b []byte, modified time.Time) error {
	return s.write(name, append(checksum(b), b...), modified)
}

func checksum(b []byte) []byte {
	return protowire.AppendFixed32(protowire.AppendTag(nil, sumField, protowire.Fixed32Type), crc32.ChecksumIEEE(b))
}

// checked returns what follows the checksum. Files of earlier versions have none.
func checked(b []byte) ([]byte, error) {
	n := len(checksum(nil))
	if tag := protowire.AppendTag(nil, sumField, protowire.Fixed32Type); !bytes.HasPrefix(b, tag) {
		return b, nil
	}
	if len(b) < n || !bytes.Equal(b[:n], checksum(b[n:])) {
		return nil, errors.New("wrong checksum")
	}
	return b[n:], nil
}

// write replaces a file atomically: a crash leaves the old or the new one.
func (s *Store) write(name string, b []byte, modified time.Time) error {
	path := filepath.Join(s.dir, name)
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, b) {
		if info, err := os.Stat(path); err == nil && !info.ModTime().After(modified) {
			return nil
		}
	}
	tmp := filepath.Join(s.dir, "."+name+".tmp")
	err := writeSynced(tmp, b)
	if err == nil {
		err = os.Chtimes(tmp, time.Time{}, modified)
	}
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err == nil {
		err = syncDir(s.dir)
	}
	return failure.Wrap(err, "saving %s", name)
}

// syncDir makes a rename survive a power failure.
func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

func writeSynced(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Sync(), f.Close())
}
