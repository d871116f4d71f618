package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	objects = 5000
	// Updates rotate over these. Each has one writer, so there are no conflicts.
	hotObjects = 16
	hotLabel   = "bench.ctrlmesh.io/hot"

	shardLabel = "bench.ctrlmesh.io/shard"
	shard      = "shard-0"
	outsider   = "outsider" // an object of another shard
)

const (
	jsonType     = "application/json"
	protobufType = "application/vnd.kubernetes.protobuf"
	anyType      = "*/*"
)

func collection(namespace string) string { return "/api/v1/namespaces/" + namespace + "/configmaps" }

func objectName(i int) string { return fmt.Sprintf("object-%04d", i) }

// configMap returns a ConfigMap of about 1 KB. sent is the time of an update, which its event
// contains.
func configMap(name, sent string, labels map[string]string) []byte {
	b, err := json.Marshal(&corev1.ConfigMap{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
		Data:       map[string]string{sentKey: sent, "text": strings.Repeat("a benchmark's data, sixty-four bytes at a time, over and over. \n", 9)},
	})
	if err != nil {
		panic(err) // only its strings vary
	}
	return b
}

func hot(i int, sent string) []byte {
	return configMap(objectName(i), sent, map[string]string{shardLabel: shard, hotLabel: "yes"})
}

// seed creates the objects, and one of another shard.
func seed(ctx context.Context, s *subject, namespace string) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(16)
	create := func(i int, body []byte) {
		group.Go(func() error {
			r := request{method: http.MethodPost, path: collection(namespace), accept: jsonType, body: body}
			_, err := s.clients[i%connections].do(ctx, r)
			return err
		})
	}
	create(0, configMap(outsider, "", map[string]string{shardLabel: outsider}))
	for i := range objects {
		if i < hotObjects {
			create(i, hot(i, noTime))
			continue
		}
		create(i, configMap(objectName(i), noTime, map[string]string{shardLabel: shard}))
	}
	return group.Wait()
}

// narrowed reports whether s hides the object of another shard.
func narrowed(ctx context.Context, s *subject, namespace string) (bool, error) {
	list := &corev1.ConfigMapList{}
	resp, err := s.clients[0].send(ctx, request{path: collection(namespace) + "?labelSelector=" + shardLabel + "%3D" + outsider, accept: jsonType})
	if err != nil {
		return false, err
	}
	defer func() { _ = resp.Body.Close() }()
	if err := json.NewDecoder(resp.Body).Decode(list); err != nil {
		return false, err
	}
	return len(list.Items) == 0, nil
}
