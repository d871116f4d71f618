// Package meshv1 is the protocol between the manager and the agents, and within an agent's
// takeover.
//
// An agent has one stream to the leading manager ([MeshClient.Connect]). Its life is:
//
//  1. Hello. The agent sends [Hello] once: its node, its abilities, the capture modes that
//     work there, and the version of the policy that each of its pods has.
//  2. Sync. The manager sends [Cluster], then the [PodPolicy] of each pod of the node,
//     [Remove] for each pod that is none any more, and [Synced] last. Pods that were not
//     named since the stream began have no policy any more.
//  3. Apply. From then on the manager sends a PodPolicy or a Remove whenever one changes.
//     The agent makes the proxy apply it to new requests, and saves it to disk. Then it
//     waits until the writes that earlier policies allowed have ended at the apiserver.
//  4. Ack. The agent answers a PodPolicy, Remove or Cluster with an [Ack], unless a later one
//     of the pod replaces that before it is sent: applied, or rejected with a reason. In the latter case the last valid policy applies, unless only
//     saving failed. The manager compares the version of an Ack with the one that it wants
//     now. The second phase of a handover, which grants keys to their new shard, waits for
//     these.
//  5. Report. The agent sends [Report] whenever the state of a pod changes: how it is
//     captured, which version applies to it, which locks it holds, what rules counted.
//
// [Webhooks] says how reviews are routed. The manager sends it after Synced and whenever it
// changes. It is not acked.
//
// If the stream breaks, the agent connects again and begins with Hello. Without a manager it
// applies the policies that it has on disk. A serial orders the policies of a pod whose shard
// hands over keys, across managers and agents: an agent rejects a policy whose serial is
// lower than the pod may act on, unless it is a refusal.
//
// A takeover is the replacement of an agent by another on the same node. The new agent
// receives listeners, counts, and the state of locks and rules from the old one over a Unix
// socket, and connects to the manager by itself. Package agent/takeover describes those
// messages.
package meshv1
