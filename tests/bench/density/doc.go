// Command density measures an agent with a full node of captured pods, each of
// which holds one watch: how soon they are captured and answered after it was
// killed, what memory it takes, and the same for a hand-over to the next agent.
//
//	density [-pods 110] [-node node1] [-modes ebpf,iptables]
//
// It prints one line for each mode and fails if a limit is missed. It reads the
// agents' processes and logs where tests/cluster has them: on this machine.
package main
