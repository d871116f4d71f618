package lock

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"unicode/utf8"

	"sigs.k8s.io/yaml"
)

// Bounds of YAML that is not JSON. Decoding it takes a multiple of its size.
const (
	maxYAML = 64 << 10 // bytes
	// maxIndicators bounds the nodes: an indicator adds three at most.
	maxIndicators = 4096
	// indicatorWeight is the memory per indicator while YAML becomes JSON, in bytes.
	indicatorWeight = 2 << 10
)

// ErrYAML means that a body is YAML that the proxy does not read, because it could take much
// more memory than its size.
var ErrYAML = fmt.Errorf("YAML with anchors, aliases or directives, with more than %d bytes or with more than %d values is not read here: send JSON", maxYAML, maxIndicators)

// multiplies finds what makes YAML larger when it is read: anchors, aliases, and directives, whose
// prefixes are repeated in tags. It also finds text that looks like them.
var multiplies = regexp.MustCompile(`(?:^|[\s\[{,:?-]|[^\x00-\x7f])[&*][0-9A-Za-z_-]|(?:^|[\r\n]|[^\x00-\x7f])%`)

// yamlToJSON returns YAML as JSON. JSON, which is YAML too, it returns as it is.
func yamlToJSON(body []byte) ([]byte, error) {
	if json.Valid(body) {
		return body, nil
	}
	if len(body) > maxYAML || !utf8.Valid(body) || indicators(body) > maxIndicators || multiplies.Match(body) {
		return nil, ErrYAML
	}
	out, err := yaml.YAMLToJSON(body)
	if err != nil {
		return nil, fmt.Errorf("the body is not valid YAML: %w", err)
	}
	return out, nil
}

// indicators counts the bytes without which a collection gets no further node.
func indicators(body []byte) (n int) {
	for _, c := range []byte(",:-?[{") {
		n += bytes.Count(body, []byte{c})
	}
	return n
}

// Weight returns the memory in bytes that it takes to read a body, besides copies of it.
func Weight(contentType string, body []byte) int64 {
	media, err := mediaType(contentType)
	if err != nil || media != typeYAML && media != typeApply || len(body) > maxYAML || json.Valid(body) {
		return 0
	}
	return int64(min(indicators(body), maxIndicators)) * indicatorWeight
}
