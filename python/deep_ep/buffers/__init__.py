# SPDX-License-Identifier: MIT
"""The interfaces by generation: ``legacy`` is V1, ``elastic`` V2, the others are V2.5."""

from . import allocator, base, bucket, elastic, engram, ep, legacy, pp

__all__ = ["allocator", "base", "bucket", "elastic", "engram", "ep", "legacy", "pp"]
