#!/usr/bin/env python3
"""Predicts dispatch and combine between nodes from measured rates: bytes over rates, and nothing else (docs/explanation/model.md).

A prediction: no NIC has carried these calls yet.
"""

import argparse
import json
import sys

GPUS = {  # GB/s of NVLink for each rank and direction
    "h200": (333, "measured on 8 GPUs"),
    "b200": (635, "published, not measured here"),
}
# The part of a NIC's rate that the operation reached where the NIC was the limit: the wire `simulated` at 25 GB/s.
SHARE_OF_NIC = {"dispatch fp8": 0.93, "dispatch bf16": 0.956, "combine": 0.968}
MOST_RANKS, LINE = 128, 128


def chance_to_meet(some, of_all, drawn):
    """That `drawn` different experts of `of_all` include one of `some`: 1 - C(all - some, drawn) / C(all, drawn)."""
    none = 1.0
    for i in range(drawn):
        none *= max(0, of_all - some - i) / (of_all - i)
    return 1 - none


def spread(case):
    """On how many nodes, other nodes and ranks a token has experts, on average."""
    groups = min(case.groups or case.nodes, case.nodes)
    per_node = case.experts // case.nodes
    candidates = groups * per_node
    nodes = groups * chance_to_meet(per_node, candidates, case.topk)
    ranks = groups * case.ranks_per_node * chance_to_meet(per_node // case.ranks_per_node, candidates, case.topk)
    return {"nodes": nodes, "remote_nodes": nodes * (case.nodes - 1) / case.nodes, "ranks": ranks}


def row_bytes(case, operation):
    """Of a token's row without, and with all that travels with it between nodes, in whole lines."""
    row = case.hidden * (1 if operation == "dispatch fp8" else 2)
    # A dispatched row has scales, selections and weights, its source index and a place on each rank of the node; combine
    # sends back the sum of a node's rows and of their weights.
    scales = -(-case.hidden // 128) if operation == "dispatch fp8" else 0
    words = case.topk if operation == "combine" else scales + 2 * case.topk + 1 + case.ranks_per_node
    return row, -(-(row + 4 * words) // LINE) * LINE


def predict(case, operation):
    nvlink_rate = GPUS[case.gpu][0]
    meets = spread(case)
    row, sent = row_bytes(case, operation)
    wire = case.tokens * meets["remote_nodes"] * sent
    # A rank's rows come from the ranks of its node, relays included; one of them is the rank itself.
    nvlink = case.tokens * meets["ranks"] * (case.ranks_per_node - 1) / case.ranks_per_node * row
    wire_us = wire / case.nic * 1e-3 / SHARE_OF_NIC[operation]
    nvlink_us = nvlink / nvlink_rate * 1e-3
    # The slower of both from end to end, as a row goes through both, and one message until the first row is there.
    us = max(wire_us, nvlink_us) + (case.latency if case.nodes > 1 else 0)
    return {
        "operation": operation, "wire_bytes": wire, "nvlink_bytes": nvlink, "floor_us": wire / case.nic * 1e-3, "us": us,
        "wire_gb_per_s": wire / us * 1e-3,
        # As upstream's tests count: rows that stay in their node, or on their rank, too.
        "upstream_rdma_gb_per_s": case.tokens * meets["nodes"] * row / us * 1e-3,
        "upstream_nvlink_gb_per_s": case.tokens * meets["ranks"] * row / us * 1e-3,
        "limit": "nvlink" if nvlink_us > wire_us else "nic",
    }  # fmt: skip


def mistake_in(case):
    ranks = case.nodes * case.ranks_per_node
    groups = min(case.groups or case.nodes, case.nodes)
    for name in ("nodes", "ranks_per_node", "tokens", "hidden", "topk", "experts", "nic"):
        if getattr(case, name) <= 0:
            return f"--{name.replace('_', '-')} {getattr(case, name)}: must be more than 0"
    if ranks > MOST_RANKS:
        return f"--nodes {case.nodes}: {ranks} ranks, allowed: at most {MOST_RANKS}"
    if case.experts % ranks:
        return f"--experts {case.experts}: must be a multiple of the {ranks} ranks"
    if case.topk > groups * (case.experts // case.nodes):
        return f"--topk {case.topk}: more than the {groups * (case.experts // case.nodes)} experts of {groups} nodes"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--nodes", default="2,4,8,16", help="numbers of nodes")
    for name, kind, default, text in (
        ("ranks-per-node", int, 8, "each with a NIC"), ("nic", float, 50, "rate of a NIC in GB/s; 400 Gbit/s are 50"),
        ("latency", float, 5, "of a message between two NICs, us"), ("tokens", int, 4096, "of each rank"),
        ("hidden", int, 7168, "channels of a token"), ("topk", int, 8, "experts of each token"),
        ("experts", int, 256, "of all ranks"), ("groups", int, 0, "nodes on which a token's experts may be; 0: all"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    parser.add_argument("--gpu", default="h200", choices=GPUS, help="whose NVLink")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = []
    for word in arguments.nodes.split(","):
        if not word.isdigit():
            parser.error(f"--nodes {arguments.nodes}: allowed: whole numbers with commas between")
        case = argparse.Namespace(**{**vars(arguments), "nodes": int(word)})
        if mistake_in(case):
            parser.error(mistake_in(case))
        results.append({"nodes": case.nodes, "ranks": case.nodes * case.ranks_per_node, "of_a_token": spread(case),
                        "operations": [predict(case, operation) for operation in SHARE_OF_NIC]})  # fmt: skip
    if arguments.json:
        print(json.dumps({**vars(arguments), "nvlink_gb_per_s": GPUS[arguments.gpu][0], "results": results}, indent=2))
        return 0
    print(
        f"{arguments.tokens} tokens of {arguments.hidden} channels on each rank, top-{arguments.topk} of {arguments.experts} experts"
        + (f" on {arguments.groups} nodes for each token" if arguments.groups else "")
    )
    print(
        f"NVLink {GPUS[arguments.gpu][0]} GB/s ({arguments.gpu}: {GPUS[arguments.gpu][1]}), a NIC of {arguments.nic:g} GB/s for each "
        f"rank, {arguments.latency:g} us a message\n"
    )
    line = "{:>5} {:>5} {:>13}  {:<13} {:>9} {:>9} {:>10} {:>12} {:>12}  {}"
    print(
        line.format(
            "nodes", "ranks", "nodes a token", "operation", "floor us", "us", "wire GB/s", "GB/s (RDMA)", "GB/s (NVL)", "limit"
        )
    )
    for result in results:
        for made in result["operations"]:
            print(
                line.format(
                    result["nodes"], result["ranks"], f"{result['of_a_token']['nodes']:.2f}", made["operation"],
                    f"{made['floor_us']:.0f}", f"{made['us']:.0f}", f"{made['wire_gb_per_s']:.1f}",
                    f"{made['upstream_rdma_gb_per_s']:.1f}", f"{made['upstream_nvlink_gb_per_s']:.1f}", made["limit"],
                )
            )  # fmt: skip
    print("\nfloor: the bytes at the NIC's rate. (RDMA) and (NVL) count as upstream's tests do: rows that stay at home, too.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
