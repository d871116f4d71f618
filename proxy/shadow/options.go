package shadow

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"mime"

	"github.com/ctrlmesh/ctrlmesh/proxy/internal/fields"
)

// dryRunField is the number of DeleteOptions.dryRun in protobuf.
const dryRunField = 5

// DryDeletion returns the body of a deletion as a dry run. The apiserver reads a body instead of
// the query, if there is one. The error says why the body cannot be read.
func DryDeletion(contentType string, body []byte) ([]byte, error) {
	if len(bytes.TrimSpace(body)) == 0 {
		return body, nil
	}
	media := "application/json" // as for the apiserver
	if contentType != "" {
		var err error
		if media, _, err = mime.ParseMediaType(contentType); err != nil {
			return nil, fmt.Errorf("invalid Content-Type: %w", err)
		}
	}
	switch media {
	case "application/json":
		var options map[string]json.RawMessage
		if err := json.Unmarshal(body, &options); err != nil || options == nil {
			return nil, errors.New("the DeleteOptions are not a JSON object")
		}
		options["dryRun"] = json.RawMessage(`["All"]`)
		return json.Marshal(options)
	case "application/vnd.kubernetes.protobuf":
		envelope, err := fields.Open(body)
		if err != nil {
			return nil, fmt.Errorf("reading DeleteOptions: %w", err)
		}
		return envelope.Append(dryRunField, []byte("All")), nil
	}
	return nil, fmt.Errorf("the DeleteOptions are neither JSON nor Kubernetes protobuf, but %q", media)
}
