// Command density measures an agent with a full node of captured pods, each with one open
// watch: the time until they are captured and answered after the agent was killed, and the
// agent's memory; and the same for a takeover by the next agent.
//
//	density [-pods 110] [-node node1] [-modes ebpf,iptables]
//
// It prints one line for each mode and fails if a limit is exceeded. It reads the agents'
// processes and logs from this machine, where tests/cluster runs.
package main
