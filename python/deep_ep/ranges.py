"""NVTX ranges of calls, for profilers: ``DEEP_EP_NVTX=1``."""

from __future__ import annotations

import torch

from . import _native


def add_ranges(native: "_native.Buffer") -> None:
    """Puts a range ``deep_ep.<call>`` around each call, where the environment and PyTorch have ranges. What the device does
    later is in no range but for profilers that know which call has enqueued it."""
    if _native.environment_text("DEEP_EP_NVTX") != "1":
        return
    try:
        torch.cuda.nvtx.mark("deep_ep")
    except RuntimeError:  # PyTorch for the CPU has none
        return
    for name in dir(type(native)):
        if not name.startswith("_"):
            setattr(native, name, torch.cuda.nvtx.range(f"deep_ep.{name}")(getattr(native, name)))
