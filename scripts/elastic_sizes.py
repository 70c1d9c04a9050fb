#!/usr/bin/env python3
"""Memory of the V2 interface beside what DeepEP V2 documents, as a Markdown table. Needs the Python package, no GPU.

usage: scripts/elastic_sizes.py [--hidden 7168] [--num-topk 8] [--ranks-per-node 8] [--ranks 2,8,16,64] [--tokens 128,4096,8192]
"""

import argparse

from deep_ep import ElasticBuffer, _native

_PAGE = 2 << 20
_MIB = 1 << 20


class Group:
    """All that the hint asks of a group."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._ranks


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def rounded_up(size: int, step: int) -> int:
    return -(-size // step) * step


def upstream(nodes: int, ranks_of_node: int, tokens: int, hidden: int, topk: int) -> int:
    """DeepEP V2's get_buffer_size_hint for rows of bfloat16, with sums on the experts' ranks."""
    ranks = nodes * ranks_of_node
    row = rounded_up(2 * hidden, 32)
    sent, returned = row + rounded_up(12 * topk + 4, 32), row + rounded_up(8 * topk, 32)
    if nodes == 1:
        size = max(sent * tokens * ranks, returned * tokens * min(ranks, topk))
    else:
        chunks = nodes * (tokens + 1280)
        back = min(ranks_of_node, topk) * nodes * tokens + min(nodes, topk) * tokens + chunks
        size = max(sent * (ranks * tokens + tokens + chunks), returned * back)
    return rounded_up(size, _PAGE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--num-topk", type=int, default=8)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--ranks", type=numbers, default=[2, 8, 16, 64])
    parser.add_argument("--tokens", type=numbers, default=[128, 4096, 8192])
    options = parser.parse_args()
    print("| ranks | nodes | tokens of a rank | hint, MiB | allocated | DeepEP V2 | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for ranks in options.ranks:
        of_node = min(ranks, options.ranks_per_node)
        nodes = ranks // of_node
        for tokens in options.tokens:
            hint = ElasticBuffer.get_buffer_size_hint(Group(ranks), tokens, options.hidden, options.num_topk)
            # As ElasticBuffer's constructor asks for it; the buffer adds signals.
            memory = max(hint, 64 << 20)
            allocated = memory // 2 + _PAGE if nodes == 1 else 2 * memory
            theirs = upstream(nodes, of_node, tokens, options.hidden, options.num_topk)
            sizes = " | ".join(f"{size // _MIB:,}" for size in (hint, allocated, theirs))
            print(f"| {ranks} | {nodes} | {tokens} | {sizes} | {allocated / theirs:.1f} |")


if __name__ == "__main__":
    main()
