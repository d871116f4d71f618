#!/bin/bash
# policies.sh COMMAND...: kubectl COMMAND... with deploy/policies, if the cluster has their kinds: Kubernetes 1.36.
set -euo pipefail
cd "$(dirname "$0")/.."
kinds=$(kubectl get --raw /apis/admissionregistration.k8s.io/v1)
if [[ $kinds = *'"mutatingadmissionpolicies"'* ]]; then
  kubectl "$@" -k deploy/policies
fi
