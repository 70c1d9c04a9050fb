// Low-latency dispatch: every token goes once to each rank that has an expert of it, and from there to the experts.
//
// One launch. Block 0 is the clerk: it tells how many rows go where. The other blocks send one token each (or take
// turns); then all blocks receive. Nothing waits for all blocks or all ranks.
//
// What a token's way takes, one step after the other; whatever is not listed happens meanwhile:
//   1. Load the row and the selections of the tokens before (both at once).         HBM or L2, once
//   2. Count, cast, write the stage.                                                three block syncs
//   3. Lines to the peers, seen by the receiver's polls.                            NVLink one way (+ the wire)
//   4. Store the row to the experts.                                                HBM
// By rails (rdma/reach.hpp) a row for another node goes by its NIC to one rank there, which hands it on before it
// receives. Counts take steps 1 and 2 without the cast, then one way by cells; they are there before the first row.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/dispatch/body.hpp"
#include "kernels/primitives/launch.hpp"

DEEP_EP_DEFINE_KERNEL(dispatch_low_latency, (deep_ep::device::low_latency::dispatch_body<false, false>))
DEEP_EP_DEFINE_KERNEL(dispatch_low_latency_rdma, (deep_ep::device::low_latency::dispatch_body<true, false>))
