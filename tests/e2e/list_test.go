package e2e

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"

	meshv1alpha1 "github.com/ctrlmesh/ctrlmesh/api/ctrlmesh/v1alpha1"
)

const (
	typeJSON     = "application/json"
	typeProtobuf = "application/vnd.kubernetes.protobuf"
	asMetadata   = ";as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
	asTable      = ";as=Table;g=meta.k8s.io;v=v1"
)

// With any selector, a member sees exactly the objects that match it and its shard's selector.
func (m *members) testSelectors(t *testing.T) {
	const everywhere = "/api/v1/configmaps"
	key := meshv1alpha1.NamespaceLabel
	for shard := range m.pods {
		own, foreign := m.owned[shard][0], m.foreign(shard)[0]
		var paths []string
		add := func(base string, parameters ...string) { // as key=value, the value unescaped
			var query []string
			for _, p := range parameters {
				k, v, _ := strings.Cut(p, "=")
				query = append(query, k+"="+url.QueryEscape(v))
			}
			paths = append(paths, base+"?"+strings.Join(query, "&"))
		}
		within := func(ns string) string { return "/api/v1/namespaces/" + ns + "/configmaps" }

		for _, selector := range []string{
			"", "color!=red", "color notin (red,blue)", "color in (red,green)", "color==red", "n>20", "n<5,odd", "odd", "!odd",
			key, "!" + key, key + "=" + own, key + "=" + foreign, key + "!=" + own, key + "!=" + foreign,
			key + " in (" + own + "," + foreign + ")", key + " notin (" + own + ")", key + " notin (" + strings.Join(m.owned[shard], ",") + ")",
			meshv1alpha1.ShardingHashLabel + ">=" + "0", // invalid: there is no operator `>=`
			meshv1alpha1.ControlLabel + "=false",
		} {
			add(everywhere, "labelSelector="+selector)
		}
		add(everywhere)
		add(everywhere, "labelSelector=color=red", "labelSelector=color=blue") // the first one counts
		add(everywhere, "fieldSelector=metadata.namespace="+foreign)
		add(everywhere, "fieldSelector=metadata.namespace!="+own)
		add(everywhere, "fieldSelector=metadata.name=cm-07")
		add(everywhere, "fieldSelector=metadata.name=cm-07", "labelSelector="+key+"="+foreign)
		paths = append(paths, everywhere+"?fieldSelector=metadata.name=cm-07", everywhere+"?fieldSelector=metadata.name=cm-07&labelSelector=color%3Dgreen")
		add(within(own))
		add(within(own), "labelSelector=color!=red")
		add(within(foreign))
		add(within(foreign), "labelSelector=color!=red")
		add(within(foreign), "labelSelector="+key+"="+foreign)
		add(within(foreign), "fieldSelector=metadata.name=cm-07")
		add(within(own) + "/") // which the apiserver reads as without the slash

		var all corev1.ConfigMapList
		require.NoError(t, cluster.List(t.Context(), &all))
		rv := revision(t)
		for i := range paths {
			paths[i] += "&" + at(rv)
		}
		member, direct := m.both(t, shard, accept(typeJSON+asMetadata), http.MethodGet, paths...)
		for i, path := range paths {
			assert.Equal(t, direct[i].Code, member[i].Code, "%s: %s", path, member[i].Body)
			want, valid := m.expected(t, shard, path, all.Items)
			if !valid {
				assert.Equal(t, http.StatusBadRequest, member[i].Code, path)
				continue
			}
			assert.Equal(t, want, names(t, member[i].Body), path)
			assert.Equal(t, string(direct[i].Body), string(member[i].Body), path)
		}
	}
}

// expected returns the objects, as namespace/name, that a shard's member must see, by the
// selectors' own package and the shard's namespaces. It returns false if the path's selector
// is invalid.
func (m *members) expected(t *testing.T, shard int, path string, all []corev1.ConfigMap) ([]string, bool) {
	t.Helper()
	u, err := url.Parse(path)
	require.NoError(t, err)
	byLabel, err := labels.Parse(u.Query().Get("labelSelector"))
	if err != nil {
		return nil, false
	}
	byField, err := fields.ParseSelector(u.Query().Get("fieldSelector"))
	require.NoError(t, err)
	out := []string{}
	for _, cm := range all {
		if (oneObject(t, path) || slices.Contains(m.owned[shard], cm.Namespace)) &&
			(u.Path == "/api/v1/configmaps" || strings.HasPrefix(u.Path, "/api/v1/namespaces/"+cm.Namespace+"/")) &&
			byLabel.Matches(labels.Set(cm.Labels)) &&
			byField.Matches(fields.Set{"metadata.name": cm.Name, "metadata.namespace": cm.Namespace}) {
			out = append(out, cm.Namespace+"/"+cm.Name)
		}
	}
	slices.Sort(out)
	return out, true
}

// names returns the objects of a list in JSON, as namespace/name.
func names(t *testing.T, list []byte) []string {
	t.Helper()
	var decoded metav1.PartialObjectMetadataList
	require.NoError(t, json.Unmarshal(list, &decoded), "%s", list)
	out := []string{}
	for _, item := range decoded.Items {
		out = append(out, item.Namespace+"/"+item.Name)
	}
	slices.Sort(out)
	return out
}

// A list is the same, byte for byte, in every format and compressed or not.
func (m *members) testFormats(t *testing.T) {
	rv := revision(t)
	for _, format := range []string{
		typeJSON, typeProtobuf, "application/yaml",
		typeJSON + asMetadata, typeProtobuf + asMetadata, typeJSON + asTable,
		typeJSON + asTable + "," + typeJSON, // as kubectl asks
		"application/cbor",                  // which this apiserver does not serve: the same refusal
	} {
		for _, encoding := range []string{"identity", "gzip"} {
			flags := append(accept(format), "-H", "Accept-Encoding: "+encoding)
			member, direct := m.both(t, 0, flags, http.MethodGet,
				"/api/v1/configmaps?"+at(rv),
				"/api/v1/configmaps?includeObject=Object&labelSelector=odd&"+at(rv),
				"/api/v1/configmaps?labelSelector=color%21%3Dred&"+at(rv))
			for i := range member {
				what := format + ", " + encoding
				assert.Equal(t, direct[i].Code, member[i].Code, what)
				for _, h := range []string{"Content-Type", "Content-Encoding", "Cache-Control", "Vary", "X-Kubernetes-Pf-Flowschema-Uid"} {
					assert.Equal(t, direct[i].Header[h], member[i].Header[h], "%s, %s", what, h)
				}
				if format == typeJSON && encoding == "gzip" && i == 0 {
					require.Equal(t, "gzip", member[i].Header.Get("Content-Encoding"), "the list is too small to be compressed, and proves nothing")
				}
				want, got := plain(t, direct[i]), plain(t, member[i])
				if strings.Contains(format, "as=Table") {
					want, got = ageless(t, want), ageless(t, got)
				}
				assert.True(t, bytes.Equal(want, got), "%s: %d bytes, direct %d", what, len(got), len(want))
			}
		}
	}
}

// plain returns an answer's body, decompressed.
func plain(t *testing.T, a answer) []byte {
	t.Helper()
	if a.Header.Get("Content-Encoding") != "gzip" {
		return a.Body
	}
	r, err := gzip.NewReader(bytes.NewReader(a.Body))
	require.NoError(t, err)
	out, err := io.ReadAll(r)
	require.NoError(t, err)
	return out
}

// ageless returns a table without the cells that change with time.
func ageless(t *testing.T, body []byte) []byte {
	t.Helper()
	var table metav1.Table
	require.NoError(t, json.Unmarshal(body, &table))
	age := slices.IndexFunc(table.ColumnDefinitions, func(c metav1.TableColumnDefinition) bool { return c.Name == "Age" })
	require.GreaterOrEqual(t, age, 0)
	require.NotEmpty(t, table.Rows)
	for i := range table.Rows {
		table.Rows[i].Cells[age] = nil
	}
	out, err := json.Marshal(table)
	require.NoError(t, err)
	return out
}

// Lists from the cache and from etcd contain the same objects, over each version of HTTP.
func (m *members) testReads(t *testing.T) {
	rv := revision(t)
	for shard := range m.pods {
		paths := []string{
			"/api/v1/configmaps",
			"/api/v1/configmaps?resourceVersion=0",
			"/api/v1/configmaps?resourceVersionMatch=NotOlderThan&resourceVersion=" + rv,
			"/api/v1/configmaps?pretty=1&limit=0",
		}
		for _, flags := range [][]string{accept(typeJSON), append(accept(typeJSON), "-http1")} {
			m.testRead(t, shard, flags, paths)
		}
	}
}

func (m *members) testRead(t *testing.T, shard int, flags, paths []string) {
	member, direct := m.both(t, shard, flags, http.MethodGet, paths...)
	for i, path := range paths {
		assert.Equal(t, direct[i].Proto, member[i].Proto)
		var want, got corev1.ConfigMapList
		require.NoError(t, json.Unmarshal(direct[i].Body, &want))
		require.NoError(t, json.Unmarshal(member[i].Body, &got))
		assert.Equal(t, want.Items, got.Items, path)
		assert.GreaterOrEqual(t, len(got.Items), 2*perSpace, path)
		assert.Equal(t, m.owned[shard], namespaces(got.Items), path)
	}
}

func namespaces(items []corev1.ConfigMap) []string {
	var out []string
	for _, cm := range items {
		out = append(out, cm.Namespace)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// A list in chunks is the same, chunk by chunk: remaining count and continue token are the
// apiserver's.
func (m *members) testChunks(t *testing.T) {
	for _, selector := range []string{"", "labelSelector=color+notin+(red)&"} {
		base := "/api/v1/configmaps?" + selector + "limit=17"
		path := base + "&" + at(revision(t))
		seen := 0
		for pages := 0; path != ""; pages++ {
			require.Less(t, pages, 20)
			member, direct := m.both(t, 1, accept(typeJSON), http.MethodGet, path)
			require.Equal(t, http.StatusOK, member[0].Code, "%s", member[0].Body)
			require.Equal(t, string(direct[0].Body), string(member[0].Body))
			var page corev1.ConfigMapList
			require.NoError(t, json.Unmarshal(member[0].Body, &page))
			seen += len(page.Items)
			if path = ""; page.Continue != "" {
				path = base + "&continue=" + url.QueryEscape(page.Continue)
			}
		}
		assert.Greater(t, seen, 17, "there was only one piece")
	}
}

// Requests for resources outside the scope, and for single objects of the shard, are unchanged.
func (m *members) testUnlisted(t *testing.T) {
	rv := revision(t)
	paths := []string{
		"/api/v1/secrets?" + at(rv), "/api/v1/services?" + at(rv), "/api/v1/serviceaccounts?" + at(rv), "/api/v1/namespaces?" + at(rv),
		"/api/v1/namespaces/" + m.foreign(0)[0] + "/serviceaccounts?" + at(rv),
		"/apis/apps/v1/deployments?" + at(rv) + "&labelSelector=color%21%3Dred", "/apis/rbac.authorization.k8s.io/v1/clusterroles?" + at(rv),
		"/api/v1", "/apis", "/version", "/openapi/v3",
	}
	member := ask(t, m.pods[0], accept(typeJSON), http.MethodGet, paths...)
	direct := ask(t, m.direct, accept(typeJSON), http.MethodGet, paths...)
	for i, path := range paths {
		assert.Equal(t, http.StatusOK, member[i].Code, path)
		assert.Equal(t, string(direct[i].Body), string(member[i].Body), path)
	}
	object := func(ns string) string { return "/api/v1/namespaces/" + ns + "/configmaps/cm-07" }
	got := ask(t, m.pods[0], nil, http.MethodGet, object(m.owned[0][0]), object(m.foreign(0)[0]))
	want := ask(t, m.direct, nil, http.MethodGet, object(m.owned[0][0]), object(m.foreign(0)[0]))
	assert.Equal(t, string(want[0].Body), string(got[0].Body))
	assert.Equal(t, string(want[1].Body), string(got[1].Body), "of another shard")
	write := ask(t, m.pods[0], nil, http.MethodDelete, object(m.foreign(0)[0]))
	assert.Equal(t, http.StatusForbidden, write[0].Code, "%s", write[0].Body)
	assert.Contains(t, string(write[0].Body), "ShardingConfig "+m.home+"/"+m.shard(0))
}

// A deletecollection deletes the objects that the member sees, and no others.
func (m *members) testDeleteCollection(t *testing.T) {
	count := func(ns string, selector client.MatchingLabels) int {
		var list corev1.ConfigMapList
		require.NoError(t, cluster.List(t.Context(), &list, client.InNamespace(ns), selector))
		return len(list.Items)
	}
	path := func(ns, query string) string { return "/api/v1/namespaces/" + ns + "/configmaps?" + query }
	own, foreign := m.owned[0][1], m.foreign(0)[1]
	were := count(foreign, nil)

	for _, a := range ask(t, m.pods[0], accept(typeJSON), http.MethodDelete,
		path(foreign, ""), path(foreign, "labelSelector=color%21%3Dred"), path(foreign, "labelSelector="+meshv1alpha1.NamespaceLabel+"%3D"+foreign),
		path(foreign, "fieldSelector=metadata.name=cm-07"), path(foreign, "labelSelector="),
	) {
		assert.Equal(t, http.StatusOK, a.Code, "%s", a.Body)
		assert.Empty(t, names(t, a.Body))
	}
	assert.Equal(t, were, count(foreign, nil), "a foreign object was deleted")

	red := count(own, client.MatchingLabels{"color": "red"})
	require.Positive(t, red)
	deleted := ask(t, m.pods[0], accept(typeJSON), http.MethodDelete, path(own, "labelSelector=color+in+(green,blue)"))
	assert.Len(t, names(t, deleted[0].Body), perSpace-red)
	assert.Zero(t, count(own, client.MatchingLabels{"color": "green"})+count(own, client.MatchingLabels{"color": "blue"}))
	assert.Equal(t, red, count(own, client.MatchingLabels{"color": "red"}))
	assert.Equal(t, were, count(foreign, nil), "a foreign object was deleted")
}
