"""How engines find out which interfaces there are: what a fresh ``import deep_ep`` offers, by every way they ask."""

import sys

from common import output_of
from test_helpers import SIGNATURES

import deep_ep

# Read behind "import deep_ep" alone.
ATTRIBUTES = [
    "Buffer", "Config", "ElasticBuffer", "EPHandle", "EventHandle", "EventOverlap", "topk_idx_t", "__version__",
    "get_physical_domain_size", "get_logical_domain_size", "legacy.Buffer", "buffers.legacy.Buffer",
    "buffers.elastic.ElasticBuffer", "buffers.elastic.EPHandle", "utils.EventHandle", "utils.EventOverlap",
    "utils.event.EventHandle", "utils.check_nvlink_connections", *(f"utils.{name}" for name in SIGNATURES),
]  # fmt: skip
PROGRAM = f"""
import deep_ep, functools, torch
for path in {ATTRIBUTES!r}:
    *module, name = path.split(".")
    assert hasattr(functools.reduce(getattr, module, deep_ep), name), path  # how vLLM asks
assert not torch.cuda.is_initialized()
"""


def test_attributes_after_one_import():
    """Engines that find the names in deep_ep use them."""
    output_of(sys.executable, "-c", PROGRAM)
    assert {path for path in ATTRIBUTES if "." not in path} <= set(deep_ep.__all__)
    assert deep_ep.ElasticBuffer is deep_ep.buffers.elastic.ElasticBuffer and deep_ep.EPHandle is deep_ep.buffers.elastic.EPHandle
