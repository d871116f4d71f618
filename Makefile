# ctrlmesh. `make help` lists what there is.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VERSION  ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
NODES    ?= 2
RUN      ?=
SUITE    ?= capture
PARTS    ?=
ONLY     ?=
PAGE     ?=
export KUBECONFIG := $(CURDIR)/.run/kubeconfig
export PATH := $(CURDIR)/.run/bin:$(PATH)
# One set of flags for all that is built without the race detector, so that each package is compiled once, and
# no paths of this checkout, so that others share it.
export GOFLAGS := -buildvcs=false -trimpath -tags=grpcnotrace
export CGO_ENABLED := 0
CACHE    := $(or $(CTRLMESH_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/ctrlmesh)
PROGRESS := hack/progress.sh
STATIC   := go build -ldflags "-s -w -X github.com/ctrlmesh/ctrlmesh/internal/program.version=$(VERSION)"

##@ The two commands
.PHONY: demo test
demo: cluster-ensure images test-images install ## Set up a real two-node cluster, install the mesh, shard an operator, show it
	@$(PROGRESS) "building the demo" go build -o .run/demo ./tests/demo
	@$(PROGRESS) "showing the demo" .run/demo
test: ## Set up what is missing and pass every test
	@hack/stages.sh deps modules generate-check lint unit cluster-ensure images test-images install e2e-installed

##@ Build
.PHONY: build images release release-push test-images generate generate-check docs
build: ## Build the programs into bin/
	@mkdir -p bin
	@$(PROGRESS) "building the programs" $(STATIC) -o bin/ ./cmd/...

images: build ## Build the images as archives into bin/images/
	@CTRLMESH_CACHE=$(CACHE) deploy/images/build.sh

release: ## Make the release of this commit in dist/: VERSION=0.1.0 REGISTRY=registry.example.com/ctrlmesh
	@CTRLMESH_CACHE=$(CACHE) REGISTRY=$(REGISTRY) hack/release.sh $(VERSION)
release-push: ## Push its images to REGISTRY
	@"$$(CTRLMESH_CACHE=$(CACHE) hack/tools.sh release)/release" push -repository $(REGISTRY) dist/*.tar

test-images: ## Build the images of the tests' operators into .run/images/
	@tests/setup.sh clients
	@mkdir -p .run/images
	@$(PROGRESS) "building the operators" $(STATIC) -o .run/images/ ./tests/operators/...
	@$(PROGRESS) "building an operator of client-go 0.23" env -C tests/operators/candidate $(STATIC) -o ../../../.run/images/ .
	@tests/operators/images.sh

generate: ## Regenerate what is generated: bindings, protobuf, deepcopy, CRDs, manifests from the chart, and pages of fields and values
	@tests/setup.sh generate
	@hack/generate.sh
generate-check: ## Fail if the committed generated code is not what make generate makes
	@tests/setup.sh generate
	@hack/generate.sh --check
docs: ## Build the site of the documentation into .run/site, and check its links
	@REPOSITORY=$(REPOSITORY) hack/site.sh

##@ Test
.PHONY: check deps modules lint unit monitoring pages fuzz e2e e2e-installed e2e-ipv6 e2e-kubernetes chart-e2e chaos alerts operators bench bench-density bench-scale bench-sharding
check: ## In two minutes: format, vet, lint and quick unit tests of what changed, without root or cluster
	@hack/check.sh $(BASE)
deps: ## Install the Debian packages that tests need
	@tests/setup.sh test
modules:
	@for m in . hack/helm hack/release tests/operators/candidate; do $(PROGRESS) "downloading modules" hack/retry.sh env GOWORK=off go -C $$m mod download; done
lint: ## gofmt, go vet, golangci-lint
	@hack/lint.sh
unit: ## Unit tests and, as root, tests in network namespaces
	@hack/tools.sh helm >/dev/null
	@go build -o .run/gotest ./hack/gotest
	.run/gotest -dir hack/release release ./... $(if $(RUN),-run '$(RUN)')
	@# The packages that take longest begin first.
	CGO_ENABLED=1 .run/gotest unit -race -timeout=30m -p 4 -parallel 8 ./proxy ./manager/roots $$(go list ./... | grep -v -e /tests/e2e -e /tests/explore -e /tests/monitoring) $(if $(RUN),-run '$(RUN)')
	@# One goroutine: the race detector would find nothing, eight times slower.
	.run/gotest explore ./tests/explore/... $(if $(RUN),-run '$(RUN)')
	@# Nor would it find these counts.
	.run/gotest allocations -count=1 ./proxy -run '^TestGetsAllocateLittle$$'
monitoring: ## Evaluate alerts, dashboard and queries of rollouts by Prometheus itself, which is built first
	go test -count=1 ./tests/monitoring/...
pages: ## Open the pages of the plugin in a browser, and take their pictures for the documentation
	@tests/setup.sh pages
	go test -count=1 -run Browser ./cmd/kubectl-ctrlmesh/internal/ui -args -pictures=$(CURDIR)/docs/images
fuzz: ## Run each fuzz target for FUZZTIME (default 20s)
	@hack/fuzz.sh
e2e: cluster-ensure images test-images install e2e-installed ## End-to-end tests on the real cluster
e2e-installed:
	@go build -o .run/gotest ./hack/gotest
	.run/gotest -tests $(if $(CI),-rerun) e2e -count=1 -timeout=60m -parallel=10 ./tests/e2e/... $(if $(RUN),-run '$(RUN)')
e2e-ipv6: images ## Those of IPv6, on a cluster of their own: ends the one that runs
	@tests/cluster/down.sh
	@FAMILY=dual6 tests/cluster/up.sh $(NODES)
	@$(MAKE) test-images
	@hack/install.sh
	@go build -o .run/gotest ./hack/gotest
	.run/gotest -tests $(if $(CI),-rerun) e2e-ipv6 -count=1 -timeout=20m ./tests/e2e/... -run '$(or $(RUN),^TestIPv6$$|^TestEgress)'
	@tests/cluster/down.sh
e2e-kubernetes: images ## All of them on another Kubernetes (KUBERNETES=1.34, 1.35 or 1.37): ends the cluster that runs
	@tests/cluster/down.sh
	@KUBERNETES=$(KUBERNETES) tests/cluster/up.sh $(NODES)
	@$(MAKE) test-images
	@hack/install.sh
	@$(MAKE) e2e-installed
	@tests/cluster/down.sh
chart-e2e: cluster-ensure images test-images ## Install, upgrade under load, roll back and uninstall by helm: removes the mesh that is installed
	@tests/cluster/load.sh bin/images/*.tar .run/images/*.tar
	@hack/uninstall.sh
	CTRLMESH_CHART_E2E=1 go test -count=1 -timeout=20m ./tests/chart/lifecycle $(if $(RUN),-run '$(RUN)')
chaos: cluster-ensure images test-images install ## Break the mesh and count what came of it (SUITE=alerts, capture, sharding or traffic, PARTS=kills,upgrades for some of it); capture ends by uninstalling
	@$(PROGRESS) "building the suite" go build -o .run/chaos ./tests/chaos
	@.run/chaos -suite $(SUITE) $(if $(PARTS),-only $(PARTS))
alerts: cluster-ensure images test-images install ## Let a real Prometheus evaluate the alerts, hurried, on the cluster: beside the end-to-end tests, and while what they are about is caused
	@go build -o .run/alerts ./tests/alerts
	@.run/alerts $(MAKE) e2e-installed
	@$(MAKE) chaos SUITE=alerts
operators: cluster-ensure images test-images install ## Try published operators: adopted, divided, rescaled, removed (ONLY=descheduler,cluster-api for some; PAGE=docs/operators.md writes the results)
	@tests/setup.sh operators
	@go run ./tests/operators/real $(if $(ONLY),-only $(ONLY)) $(if $(PAGE),-page $(PAGE))
bench: deps cluster-ensure images ## Measure the proxy beside others, and what capture costs
	@missed=0; tests/bench/run.sh || missed=1; tests/bench/costs.sh || missed=1; exit $$missed
bench-density: images ## Measure an agent with 110 pods, on a cluster of its own: ends the one that runs
	@tests/bench/density.sh
bench-scale: deps ## Measure a manager with 5,000 nodes, on a control plane of its own: ends the cluster that runs
	@tests/bench/scale.sh
bench-sharding: images ## Measure shards beside an unsharded operator, on a cluster of its own: ends the one that runs
	@tests/bench/sharding.sh

##@ Cluster
.PHONY: cluster-up cluster-down cluster-ensure install uninstall
cluster-up: ## Start a real Kubernetes of NODES nodes (default 2); kubeconfig at .run/kubeconfig
	@tests/cluster/up.sh $(NODES)
cluster-down: ## Stop it and remove all it left
	@tests/cluster/down.sh
cluster-ensure:
	@kubectl get --raw=/readyz >/dev/null 2>&1 || tests/cluster/up.sh $(NODES)
install: ## Install the mesh into the running cluster, with an access line for each request
	@hack/install.sh
uninstall: ## Remove the mesh from the running cluster, as a user would
	@hack/uninstall.sh

.PHONY: help
help: ## Show this
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## / {printf "  %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\nVariables\n'
	@printf '  %-15s %s\n' \
	  VERSION 'of the programs (git describe)' \
	  NODES 'of the cluster: 0 to 9 ($(NODES))' \
	  RUN 'which tests: an expression, as of go test -run' \
	  FUZZTIME 'for each fuzz target (20s)' \
	  CTRLMESH_CACHE 'where what is built for the tests is kept ($(CACHE))' 
