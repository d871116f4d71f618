package reviews

import (
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"

	"github.com/ctrlmesh/ctrlmesh/manager/validate"
)

func newSite(t *testing.T) *Site {
	t.Helper()
	a, err := newAuthority()
	require.NoError(t, err)
	return &Site{Home: "reviews-1", account: "probe", authority: a}
}

func TestConfigurationAndKindAreValid(t *testing.T) {
	s := newSite(t)
	require.Empty(t, validate.Config(s.config()))

	crd, internal := s.definition(), &apiextensions.CustomResourceDefinition{}
	apiextensionsv1.SetDefaults_CustomResourceDefinition(crd)
	apiextensionsv1.SetDefaults_CustomResourceDefinitionSpec(&crd.Spec)
	apiextensionsv1.SetDefaults_ServiceReference(crd.Spec.Conversion.Webhook.ClientConfig.Service)
	require.NoError(t, apiextensionsv1.Convert_v1_CustomResourceDefinition_To_apiextensions_CustomResourceDefinition(crd, internal, nil))
	internal.Status.StoredVersions = []string{v2Version} // the apiserver sets it
	require.Empty(t, validation.ValidateCustomResourceDefinition(t.Context(), internal))
}
