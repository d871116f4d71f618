// Package chart tests the chart by helm itself: what it renders, refuses and documents.
// hack/tools.sh builds helm.
package chart
