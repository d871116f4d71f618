package sysdump

import (
	"archive/zip"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/check"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/render"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/report"
	"github.com/ctrlmesh/ctrlmesh/cmd/kubectl-ctrlmesh/internal/snapshot"
)

const (
	// maxObjects bounds the objects of one file.
	maxObjects = 10_000
	// maxLines and maxLog bound a log, in lines and bytes.
	maxLines = 50_000
	maxLog   = 32 << 20
)

// Collector collects the state of a mesh.
type Collector struct {
	Reader snapshot.Reader
	// Version is that of this program.
	Version string
	// Since is how far back logs go.
	Since time.Duration
}

// Write writes an archive to a file. It returns an error if the apiserver cannot be reached, the context
// ends, or the archive cannot be written.
func (c Collector) Write(ctx context.Context, to *os.File) (Archive, error) {
	a := &archive{Writer: zip.NewWriter(to), at: c.Reader.Now()}
	if err := errors.Join(c.collect(ctx, a), a.Close()); err != nil {
		return Archive{}, err
	}
	size, err := to.Seek(0, io.SeekCurrent)
	return Archive{File: to.Name(), Bytes: size, Files: a.files, Missing: a.missing}, err
}

func (c Collector) collect(ctx context.Context, a *archive) error {
	s, err := c.Reader.Read(ctx, check.Parts()...)
	if err != nil {
		return err
	}
	for _, u := range s.Unread {
		a.lacks(u.What, u.Err)
	}
	kinds, err := c.Reader.Kinds()
	if err != nil {
		a.lacks("kinds of the mesh", err)
	}
	err = errors.Join(a.report("status", report.StatusOf(s)), a.report("check", check.Run(s)), a.report("version", report.VersionOf(c.Version, s)))
	if err != nil {
		return err
	}
	for _, src := range sources(s.Namespace, kinds, namespaces(s)) {
		if err := c.objects(ctx, a, src); err != nil {
			return err
		}
	}
	for i := range s.Mesh.Pods {
		if err := c.podLogs(ctx, a, &s.Mesh.Pods[i]); err != nil {
			return err
		}
	}
	return a.incomplete()
}

// objects writes the objects of a source, if there are any.
func (c Collector) objects(ctx context.Context, a *archive, src source) error {
	f := &objectFile{in: a, of: src}
	err := c.Reader.EachPage(ctx, src.kind, f.write, client.InNamespace(src.namespace), src.labels)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case f.failed != nil:
		return f.failed
	case err != nil && !snapshot.Absent(err):
		a.lacks(src.file, err)
	}
	return nil
}

// objectFile is the file of a source.
type objectFile struct {
	in     *archive
	of     source
	to     io.Writer // nil before the first object
	count  int
	failed error // of the archive, not of the apiserver
}

// write writes those of some objects that the source keeps.
func (f *objectFile) write(page []unstructured.Unstructured) error {
	for i := range page {
		if f.of.keep != nil && !f.of.keep(&page[i]) {
			continue
		}
		if f.count++; f.count > maxObjects {
			return fmt.Errorf("it has the first %d objects alone", maxObjects)
		}
		if f.to == nil {
			f.to, f.failed = f.in.file(f.of.file + ".yaml")
		}
		if f.failed == nil {
			f.failed = writeObject(f.to, &page[i], f.of.own)
		}
		if f.failed != nil {
			return f.failed
		}
	}
	return nil
}

func writeObject(w io.Writer, o *unstructured.Unstructured, own bool) error {
	clean(o, own)
	text, err := yaml.Marshal(o.Object)
	if err != nil {
		return fmt.Errorf("writing %s %s: %w", o.GetKind(), o.GetName(), err)
	}
	_, err = fmt.Fprintf(w, "---\n%s", text)
	return err
}

// podLogs writes the logs of the containers of a pod, and those from before their last restarts.
func (c Collector) podLogs(ctx context.Context, a *archive, pod *corev1.Pod) error {
	for _, container := range pod.Spec.Containers {
		restarted := slices.ContainsFunc(pod.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool {
			return s.Name == container.Name && s.RestartCount > 0
		})
		options := &corev1.PodLogOptions{
			Container: container.Name, Timestamps: true,
			SinceSeconds: new(int64(max(1, c.Since.Seconds()))), TailLines: new(int64(maxLines)), LimitBytes: new(int64(maxLog)),
		}
		name := "logs/" + pod.Name + "/" + container.Name
		if err := c.podLog(ctx, a, pod, name+".log", options); err != nil {
			return err
		}
		if !restarted {
			continue
		}
		before := options.DeepCopy()
		before.Previous = true
		if err := c.podLog(ctx, a, pod, name+".previous.log", before); err != nil {
			return err
		}
	}
	return nil
}

// podLog writes one log.
func (c Collector) podLog(ctx context.Context, a *archive, pod *corev1.Pod, name string, options *corev1.PodLogOptions) error {
	log, err := c.Reader.Logs(ctx, pod.Namespace, pod.Name, options)
	if err == nil {
		defer log.Close()
		var file io.Writer
		if file, err = a.file(name); err != nil {
			return err
		}
		err = scrubLines(file, log)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		a.lacks(name, err)
	}
	return nil
}

// scrubLines copies a text of at most maxLog bytes.
func scrubLines(to io.Writer, from io.Reader) error {
	lines := bufio.NewReader(io.LimitReader(from, maxLog))
	for {
		line, err := lines.ReadString('\n')
		if _, failed := io.WriteString(to, scrub(line)); failed != nil {
			return failed
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// archive is what is written.
type archive struct {
	*zip.Writer
	at      time.Time
	files   int
	missing []string
}

// file begins a file, and ends the one before.
func (a *archive) file(name string) (io.Writer, error) {
	a.files++
	w, err := a.CreateHeader(&zip.FileHeader{Name: name, Method: zip.Deflate, Modified: a.at})
	if err != nil {
		return nil, fmt.Errorf("writing %s: %w", name, err)
	}
	return w, nil
}

// report writes what a command prints, for people and for programs.
func (a *archive) report(name string, r render.Report) error {
	for _, as := range []struct{ extension, format string }{{".txt", "table"}, {".json", "json"}} {
		file, err := a.file(name + as.extension)
		if err == nil {
			err = render.Write(file, as.format, r)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// lacks notes what could not be read.
func (a *archive) lacks(what string, err error) {
	a.missing = append(a.missing, scrub(what+": "+err.Error()))
}

// incomplete writes what could not be read, if there is anything.
func (a *archive) incomplete() error {
	if len(a.missing) == 0 {
		return nil
	}
	file, err := a.file("incomplete.txt")
	if err != nil {
		return err
	}
	_, err = io.WriteString(file, strings.Join(a.missing, "\n")+"\n")
	return err
}
