// Package lifecycle installs, upgrades, rolls back and uninstalls the mesh by helm, on a
// cluster on which the mesh is not installed: make chart-e2e.
package lifecycle
