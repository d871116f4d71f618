package fleet

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/retry"

	"github.com/ctrlmesh/ctrlmesh/tests/audit"
	"github.com/ctrlmesh/ctrlmesh/tests/kube"
	"github.com/ctrlmesh/ctrlmesh/tests/operators/fleet/fleetv1"
)

const (
	// jobs is how many objects the operator reconciles in each member.
	jobs = 5

	busy      = "busy" // name and label of a job that is changed all the time
	busyEvery = 200 * time.Millisecond
)

// Member is another cluster, with an apiserver of its own.
type Member struct {
	Name string

	site   *Site
	client kubernetes.Interface // through the gateway
	round  int
}

func (s *Site) newMember(name string) (*Member, error) {
	config := rest.CopyConfig(s.Config)
	config.Host += strings.Replace(fleetv1.ClusterPaths, "*", name, 1)
	c, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("making a client of %s: %w", name, err)
	}
	return &Member{Name: name, site: s, client: c}, nil
}

// Start starts the member's apiserver.
func (m *Member) Start(ctx context.Context) error { return m.node(ctx, "start") }

// Stop ends it, and does nothing if it does not run.
func (m *Member) Stop(ctx context.Context) error { return m.node(ctx, "stop") }

func (m *Member) node(ctx context.Context, do string) error {
	out, err := exec.CommandContext(ctx, filepath.Join(m.site.Root, "tests", "cluster", "node.sh"), do, m.Name).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", do, m.Name, err, out)
	}
	return nil
}

// address returns where the member's apiserver is, beside that of the cluster itself.
func (m *Member) address(ctx context.Context) (string, error) {
	const script = `. "$0/tests/cluster/lib.sh" && endpoint "$(primary member "$1")" 6443`
	out, err := exec.CommandContext(ctx, "bash", "-c", script, m.site.Root, m.Name).Output()
	if err != nil {
		return "", fmt.Errorf("finding %s: %w", m.Name, err)
	}
	return "https://" + strings.TrimSpace(string(out)), nil
}

// prepare permits the operator to work in the member, and makes jobs in its namespace there.
func (m *Member) prepare(ctx context.Context) error {
	home := m.site.Home
	err := kube.UntilWithin(ctx, within, m.Name+" through the gateway", func(ctx context.Context) error {
		_, err := m.client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: home},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: m.user()}},
		}, metav1.CreateOptions{})
		return err
	})
	if err != nil {
		return err
	}
	return m.Add(ctx, home)
}

// Add makes a namespace with jobs in the member.
func (m *Member) Add(ctx context.Context, namespace string) error {
	err := kube.UntilWithin(ctx, within, "a namespace of "+m.Name, func(ctx context.Context) error {
		_, err := m.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
		return err
	})
	if err != nil {
		return err
	}
	for i := range jobs {
		_, err := m.client.CoreV1().ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprint("job-", i), Labels: map[string]string{fleetv1.Label: "", "of": m.site.Home}},
			Data:       map[string]string{fleetv1.Want: "begin"},
		}, metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("making a job in %s: %w", m.Name, err)
		}
	}
	return nil
}

// user returns the operator's name in audit logs.
func (m *Member) user() string { return audit.ServiceAccount(m.site.Home, Workload) }

// Work has something done in the operator's namespace of the member, and returns the pod that did it.
func (m *Member) Work(ctx context.Context) (by string, err error) { return m.WorkIn(ctx, m.site.Home) }

// WorkIn has something done in a namespace that was added, and returns the pod that did it.
func (m *Member) WorkIn(ctx context.Context, namespace string) (by string, err error) {
	m.round++
	want := fmt.Sprint("round ", m.round)
	err = kube.UntilWithin(ctx, within, "the jobs of "+m.Name, func(ctx context.Context) error { return m.ask(ctx, namespace, want) })
	if err != nil {
		return "", err
	}
	return by, kube.UntilWithin(ctx, within, "the work in "+m.Name, func(ctx context.Context) error {
		all, err := m.jobs(ctx, namespace)
		if err != nil {
			return err
		}
		by = all[0].Data[fleetv1.By]
		for _, job := range all {
			if job.Data[fleetv1.Done] != want || job.Data[fleetv1.By] != by {
				return fmt.Errorf("%s: %v, beside one by %s", job.Name, job.Data, by)
			}
		}
		return nil
	})
}

// Busy changes a job again and again until ctx ends. [Member.Work] does not wait for it. While the member
// is cut off, there is nothing to change.
func (m *Member) Busy(ctx context.Context) {
	jobs := m.client.CoreV1().ConfigMaps(m.site.Home)
	kube.Every(ctx, busyEvery, func(ctx context.Context, n int) {
		job := &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: busy, Labels: map[string]string{fleetv1.Label: busy}},
			Data:       map[string]string{fleetv1.Want: fmt.Sprint("turn ", n)},
		}
		patch, err := json.Marshal(job)
		if err != nil {
			panic(err) // it has strings alone
		}
		if _, err = jobs.Patch(ctx, job.Name, types.MergePatchType, patch, metav1.PatchOptions{}); apierrors.IsNotFound(err) {
			_, _ = jobs.Create(ctx, job, metav1.CreateOptions{})
		}
	})
}

// ask changes all jobs of a namespace.
func (m *Member) ask(ctx context.Context, namespace, want string) error {
	all, err := m.jobs(ctx, namespace)
	for i := range all {
		err = errors.Join(err, retry.RetryOnConflict(retry.DefaultBackoff, func() error {
			job, err := m.client.CoreV1().ConfigMaps(all[i].Namespace).Get(ctx, all[i].Name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			job.Data[fleetv1.Want] = want
			_, err = m.client.CoreV1().ConfigMaps(job.Namespace).Update(ctx, job, metav1.UpdateOptions{})
			return err
		}))
	}
	return err
}

func (m *Member) jobs(ctx context.Context, namespace string) ([]corev1.ConfigMap, error) {
	list, err := m.client.CoreV1().ConfigMaps(namespace).List(ctx, metav1.ListOptions{LabelSelector: fleetv1.Label + "!=" + busy + "," + fleetv1.Label})
	if err != nil {
		return nil, err
	}
	if len(list.Items) == 0 {
		return nil, errors.New("there are no jobs")
	}
	return list.Items, nil
}

// Write is a successful write of the operator.
type Write struct {
	Pod       string
	Namespace string
	At        time.Time // when the apiserver received it
}

// Writes returns the operator's updates in the member, in order, by the audit log.
func (m *Member) Writes() (out []Write, err error) {
	log, err := os.Open(filepath.Join(m.site.Root, ".run", "audit-"+m.Name+".log"))
	if err != nil {
		return nil, fmt.Errorf("opening the audit log of %s: %w", m.Name, err)
	}
	defer func() { _ = log.Close() }()
	for lines := bufio.NewReader(log); ; {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return out, nil // the last one may be half written
		}
		var e auditv1.Event
		if err = errors.Join(err, json.Unmarshal(line, &e)); err != nil {
			return nil, fmt.Errorf("reading the audit log of %s: %w", m.Name, err)
		}
		if e.User.Username == m.user() && e.Verb == "update" && e.Stage == auditv1.StageResponseComplete && e.ResponseStatus.Code == 200 {
			out = append(out, Write{e.UserAgent, e.ObjectRef.Namespace, e.RequestReceivedTimestamp.Time})
		}
	}
}
