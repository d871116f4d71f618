package proxy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"mime"
	"net/http"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	kjson "sigs.k8s.io/json"

	"github.com/ctrlmesh/ctrlmesh/proxy/lock"
	"github.com/ctrlmesh/ctrlmesh/proxy/status"
	"github.com/ctrlmesh/ctrlmesh/proxy/upstream"
)

const (
	typeJSON     = "application/json"
	typeProtobuf = "application/vnd.kubernetes.protobuf"
	// partial asks for an object's metadata alone.
	partial = typeJSON + ";as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
	// maxRead bounds an object that is read to tell whose it is, in bytes.
	maxRead = 4 * lock.MaxObject
)

var errMediaType = errors.New("unsupported media type")

// metaOf reads the metadata of an object, as the apiserver would.
func metaOf(contentType string, body []byte) (metav1.ObjectMeta, error) {
	media := typeJSON // the apiserver's default
	if contentType != "" {
		var err error
		if media, _, err = mime.ParseMediaType(contentType); err != nil {
			return metav1.ObjectMeta{}, fmt.Errorf("%w %q", errMediaType, bounded(contentType))
		}
	}
	var object metav1.PartialObjectMetadata
	switch media {
	case typeJSON:
		if err := kjson.UnmarshalCaseSensitivePreserveInts(body, &object); err != nil {
			return metav1.ObjectMeta{}, errors.New("the object is not valid JSON")
		}
	case typeProtobuf:
		raw, ok := bytes.CutPrefix(body, []byte("k8s\x00"))
		var envelope runtime.Unknown
		if !ok || envelope.Unmarshal(raw) != nil || object.Unmarshal(envelope.Raw) != nil {
			return metav1.ObjectMeta{}, errors.New("the object is not valid protobuf")
		}
	default:
		return metav1.ObjectMeta{}, fmt.Errorf("%w %q", errMediaType, bounded(media))
	}
	return object.ObjectMeta, nil
}

// object decides by the uid of the object that a request is for. A get is decided
// by its answer. Of other requests the apiserver is asked first, by the caller's own
// leave; what it does not know yet is nobody's.
func (s *fenceStage) object(x *exchange) *apierrors.StatusError {
	switch {
	case len(x.info.Parts) < 2: // deletecollection, or a binding, whose body says the pod
		return s.meet(x, "not each of these objects")
	case x.r.Method == http.MethodGet && len(x.info.Parts) == 2:
		accept, ok := lock.Accept(x.r.Header.Get("Accept"))
		if !ok {
			return status.NotAcceptable("the uid of %s must be read: ask for JSON or Kubernetes protobuf", x.info.Resource)
		}
		x.r.Header["Accept"] = []string{accept}
		delete(x.r.Header, "Accept-Encoding")
		x.fence = s
		return nil
	}
	meta, refused := x.lookUp()
	switch {
	case refused != nil && refused.ErrStatus.Code == http.StatusNotFound:
		return nil
	case refused != nil:
		x.reason = "unknown"
		return refused
	case !s.owned.Owns(string(meta.UID)):
		return s.meet(x, "object "+meta.Name)
	case x.info.Verb == "delete" && len(x.info.Parts) == 2:
		return x.onlyUID(string(meta.UID))
	}
	return nil
}

// answerObject sends the answer of a get, if the object is the shard's.
func (x *exchange) answerObject(resp *http.Response) {
	contentType := resp.Header.Get("Content-Type")
	body, err := x.readAll(resp.Body, maxRead)
	if refused, ok := errors.AsType[*apierrors.StatusError](err); ok {
		x.badAnswer(x.info.Resource, refused)
		return
	}
	if err != nil {
		x.failed(err)
		return
	}
	meta, err := metaOf(contentType, body)
	if err != nil {
		x.badAnswer(x.info.Resource, err)
		return
	}
	if !x.fence.owned.Owns(string(meta.UID)) {
		if refused := x.fence.meet(x, "object "+x.info.Name); refused != nil {
			x.refuse(x.reason, refused)
			return
		}
	}
	setLength(resp.Header, len(body))
	x.sendHead(resp)
	x.write(body)
}

// lookUp asks the apiserver for the metadata of the object that a request is for.
func (x *exchange) lookUp() (metav1.ObjectMeta, *apierrors.StatusError) {
	clients := x.pod.clients.Load()
	if clients == nil {
		return metav1.ObjectMeta{}, status.Unavailable(1, "the pod is about to end")
	}
	header := maps.Clone(x.r.Header)
	header["Accept"] = []string{partial}
	for _, of := range []string{"Accept-Encoding", "Content-Type", auditHeader} { // an audit id is one request's
		delete(header, of)
	}
	resp, err := clients.main.Short(x.r.Context(), &upstream.Request{
		Method: http.MethodGet, Target: x.objectPath(), Host: x.r.Host, Header: header,
	})
	if err != nil {
		return metav1.ObjectMeta{}, x.silence(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := x.readAll(resp.Body, maxRead)
	if refused, ok := errors.AsType[*apierrors.StatusError](err); ok {
		return metav1.ObjectMeta{}, refused
	}
	if err != nil {
		return metav1.ObjectMeta{}, x.silence(err)
	}
	if resp.StatusCode != http.StatusOK {
		said := metav1.Status{Code: int32(resp.StatusCode), Status: metav1.StatusFailure}
		_ = json.Unmarshal(body, &said) // else the code must do
		said.Code = int32(resp.StatusCode)
		return metav1.ObjectMeta{}, &apierrors.StatusError{ErrStatus: said}
	}
	meta, err := metaOf(resp.Header.Get("Content-Type"), body)
	if err != nil {
		return meta, status.New(http.StatusBadGateway, "BadGateway", 0, "whose the object is cannot be read: %v", err)
	}
	return meta, nil
}

// objectPath is the escaped path up to the object's name.
func (x *exchange) objectPath() string {
	segments := strings.Split(strings.TrimPrefix(x.path, "/"), "/")
	head := len(strings.Split(strings.Trim(x.r.URL.Path, "/"), "/")) - len(x.info.Parts) + 2
	return "/" + strings.Join(segments[:min(head, len(segments))], "/")
}

// onlyUID makes a delete one of the very object that was looked at, where its body
// is JSON or none and asks for no other.
func (x *exchange) onlyUID(uid string) *apierrors.StatusError {
	options := map[string]json.RawMessage{}
	if x.r.ContentLength != 0 {
		if media, _, err := mime.ParseMediaType(x.r.Header.Get("Content-Type")); err != nil || media != typeJSON {
			return nil
		}
		raw, refused := x.readBody(lock.MaxObject)
		if refused != nil {
			return refused
		}
		x.body, x.length = bytes.NewReader(raw), int64(len(raw))
		if err := json.Unmarshal(raw, &options); len(bytes.TrimSpace(raw)) > 0 && err != nil {
			return nil // for the apiserver to refuse
		}
	} else {
		options["kind"], options["apiVersion"] = json.RawMessage(`"DeleteOptions"`), json.RawMessage(`"v1"`)
	}
	if asked := options["preconditions"]; options == nil || len(asked) > 0 && string(asked) != "null" {
		return nil
	}
	options["preconditions"], _ = json.Marshal(map[string]string{"uid": uid})
	edited, err := json.Marshal(options)
	if err != nil {
		return status.BadRequest("%v", err)
	}
	x.r.Header["Content-Type"] = []string{typeJSON}
	x.body, x.length = bytes.NewReader(edited), int64(len(edited))
	return nil
}
