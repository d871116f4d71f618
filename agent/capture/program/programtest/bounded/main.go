// Command bounded runs a program with bounds, under the names that [programtest.Link]
// gives it.
package main

import _ "github.com/ctrlmesh/ctrlmesh/agent/capture/program"

func main() { panic("run it under a name that ends with -bounded") }
