package lock

import (
	"fmt"
	"mime"
	"strings"
)

// The media types of a lock's body.
const (
	typeJSON     = "application/json"
	typeYAML     = "application/yaml"
	typeProtobuf = "application/vnd.kubernetes.protobuf"
	typeMerge    = "application/merge-patch+json"
	typeStrat    = "application/strategic-merge-patch+json"
	typePatch    = "application/json-patch+json"
	typeApply    = "application/apply-patch+yaml"
)

// Body is the body of a request after the swap of names.
type Body struct {
	Bytes []byte
	// Lock reports whether the body names the lock.
	Lock bool
}

// Request replaces the name in the body of a create, an update or a patch by the upstream
// name. It converts YAML that names the lock to JSON. It fails with ErrUnsupported for other
// media types, with ErrYAML for YAML that is not read, and with another error if the body is
// not valid in its type.
func (l *Lock) Request(contentType string, body []byte) (Body, error) {
	out := Body{Bytes: body}
	media, err := mediaType(contentType)
	if err != nil {
		return out, err
	}
	switch media {
	case typeJSON, typeMerge, typeStrat:
		out.Bytes, out.Lock, err = editJSON(body, l.up.object())
	case typePatch:
		out.Bytes, out.Lock, err = l.up.jsonPatch(body)
	case typeProtobuf:
		out.Bytes, out.Lock, err = editProto(body, func(string) message { return l.up.objectMessage() })
	case typeYAML, typeApply:
		// Clients send JSON for server-side apply, whose bytes are kept.
		var asJSON []byte
		if asJSON, err = yamlToJSON(body); err != nil {
			return out, err
		}
		if asJSON, out.Lock, err = editJSON(asJSON, l.up.object()); out.Lock {
			out.Bytes = asJSON
		}
	default:
		err = fmt.Errorf("%w %q", ErrUnsupported, media)
	}
	return out, err
}

// Answer replaces the upstream name in an answer of the apiserver. It fails with
// ErrUnsupported if the media type cannot be edited. Accept keeps the apiserver from
// choosing such a type.
func (l *Lock) Answer(contentType string, body []byte) ([]byte, error) {
	if len(body) == 0 {
		return body, nil
	}
	media, err := mediaType(contentType)
	if err != nil {
		return nil, err
	}
	switch media {
	case typeJSON:
		out, _, err := editJSON(body, l.down.answer(kindOf(body)))
		return out, err
	case typeProtobuf:
		out, _, err := editProto(body, l.down.answerMessage)
		return out, err
	case "text/plain":
		return body, nil // an error from before the apiserver chose a type
	}
	return nil, fmt.Errorf("%w %q", ErrUnsupported, media)
}

// Accept removes the media types of an Accept header whose answers cannot be edited. ok is
// false if none is left.
func Accept(header string) (kept string, ok bool) {
	if strings.TrimSpace(header) == "" {
		return typeJSON, true
	}
	var parts []string
	for part := range strings.SplitSeq(header, ",") {
		media, _, _ := strings.Cut(part, ";")
		switch strings.ToLower(strings.TrimSpace(media)) {
		case typeJSON, typeProtobuf:
			parts = append(parts, strings.TrimSpace(part))
		case "*/*", "application/*":
			parts = append(parts, typeJSON)
		}
	}
	return strings.Join(parts, ","), len(parts) > 0
}

// mediaType returns the media type without parameters. Like the apiserver, it takes a
// missing one for JSON.
func mediaType(contentType string) (string, error) {
	if contentType == "" {
		return typeJSON, nil
	}
	media, _, err := mime.ParseMediaType(contentType)
	if err != nil {
		return "", fmt.Errorf("%w %q", ErrUnsupported, contentType)
	}
	return media, nil
}
