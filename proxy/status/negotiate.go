package status

import (
	"net/url"
	"strconv"
	"strings"

	"github.com/munnerz/goautoneg"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
)

// served are the types of a Status; JSON is the first.
var served = func() []runtime.SerializerInfo {
	scheme := runtime.NewScheme()
	v1 := schema.GroupVersion{Version: "v1"}
	metav1.AddToGroupVersion(scheme, v1)
	scheme.AddUnversionedTypes(v1, &metav1.Status{})
	return serializer.NewCodecFactory(scheme).SupportedMediaTypes()
}()

// negotiate returns what NegotiateOutputMediaType of k8s.io/apiserver does, and JSON for clients
// that accept nothing served. That package needs much of the apiserver, and agents are to be small.
func negotiate(accept, query string) (mediaType string, how runtime.Serializer) {
	for _, clause := range goautoneg.ParseAccept(accept) {
		for _, info := range served {
			if accepts(clause, info) {
				return info.MediaType, serializerOf(info, clause.Params["pretty"] == "1" || asksPretty(query))
			}
		}
	}
	return served[0].MediaType, serializerOf(served[0], asksPretty(query))
}

// accepts reports whether a clause of Accept allows a type, without a conversion to another kind.
func accepts(clause goautoneg.Accept, info runtime.SerializerInfo) bool {
	anything := clause.Type == "*" && clause.SubType == "*"
	if !anything && (clause.Type != info.MediaTypeType || clause.SubType != info.MediaTypeSubType && clause.SubType != "*") {
		return false
	}
	for name, value := range clause.Params {
		switch name {
		case "as", "g", "v":
			return false
		case "sv":
			if value != "" {
				return false
			}
		case "stream":
			if value != "" && value != "watch" {
				return false
			}
		}
	}
	return true
}

func serializerOf(info runtime.SerializerInfo, pretty bool) runtime.Serializer {
	if pretty && info.PrettySerializer != nil {
		return info.PrettySerializer
	}
	return info.Serializer
}

func asksPretty(query string) bool {
	if !strings.Contains(query, "pretty") {
		return false
	}
	values, _ := url.ParseQuery(query)
	pretty, _ := strconv.ParseBool(values.Get("pretty"))
	return pretty
}
