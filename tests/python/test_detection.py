"""How engines find out which interfaces there are: what a fresh ``import deep_ep`` offers, by every way they ask."""

import subprocess
import sys

from test_helpers import NAMES
from time_scale import scaled

import deep_ep
from deep_ep.buffers.elastic import ElasticBuffer, EPHandle

# What they read behind "import deep_ep" alone.
ATTRIBUTES = [
    "Buffer", "Config", "ElasticBuffer", "EPHandle", "EventHandle", "EventOverlap", "topk_idx_t", "__version__",
    "get_physical_domain_size", "get_logical_domain_size", "legacy.Buffer", "buffers.legacy.Buffer",
    "buffers.elastic.ElasticBuffer", "buffers.elastic.EPHandle", "utils.EventHandle", "utils.EventOverlap",
    "utils.check_nvlink_connections",
    *(f"utils.{module}.{name}" for module, names in NAMES.items() for name in names.split()),
]  # fmt: skip


def in_a_fresh_interpreter(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=scaled(60))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_attributes_after_one_import():
    program = f"""
import deep_ep, functools, torch
for path in {ATTRIBUTES!r}:
    assert functools.reduce(getattr, path.split("."), deep_ep) is not None, path
for path, name in (("", "ElasticBuffer"), ("", "EPHandle"), ("", "EventOverlap"), ("buffers.elastic", "ElasticBuffer")):
    module = functools.reduce(getattr, filter(None, path.split(".")), deep_ep)
    assert hasattr(module, name)  # how vLLM asks
assert not torch.cuda.is_initialized()
print("all", len({ATTRIBUTES!r}))
"""
    assert in_a_fresh_interpreter(program).strip() == f"all {len(ATTRIBUTES)}"


def test_announced():
    """Engines that find the names in deep_ep use them."""
    assert deep_ep.ElasticBuffer is ElasticBuffer and deep_ep.EPHandle is EPHandle
    assert {"ElasticBuffer", "EPHandle", "get_physical_domain_size", "get_logical_domain_size"} <= set(deep_ep.__all__)
