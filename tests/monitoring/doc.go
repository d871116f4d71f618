// Package monitoring tests the alerts, the dashboard, and queries of rollouts by Prometheus itself:
// make monitoring.
// hack/tools.sh builds it.
package monitoring
