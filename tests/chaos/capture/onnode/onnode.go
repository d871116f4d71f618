// Package onnode is the part of the capture suite that runs in the namespaces of a node: it
// reads and breaks BPF objects, and finds sockets.
package onnode

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
)

// Command is the first argument that makes the chaos program run one command of this package
// and exit: `chaos on-node detach DIR`.
const Command = "on-node"

// Run runs a command, with its arguments.
func Run(args []string) error {
	if len(args) < 2 {
		return errors.New("on-node detach|empty|inventory DIR, or left CGROUP IDS, or foreign UID")
	}
	switch command, args := args[0], args[1:]; command {
	case "detach":
		return detach(args[0])
	case "empty":
		return empty(args[0], args[1:])
	case "inventory":
		i, err := takeInventory(args[0])
		if err != nil {
			return err
		}
		return json.NewEncoder(os.Stdout).Encode(i)
	case "left":
		return printLeft(args[0], args[1])
	case "foreign":
		return printForeign(args[0])
	default:
		return fmt.Errorf("on-node %s?", command)
	}
}
