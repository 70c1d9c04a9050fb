"""NVTX ranges of calls, for profilers: ``DEEP_EP_NVTX=1``."""

from __future__ import annotations

from typing import Any

import torch

from . import _native


def with_ranges(native: "_native.Buffer") -> "_native.Buffer":
    """The same with a range ``deep_ep.<call>`` around each call, where the environment and PyTorch have ranges. What the device does
    later is in no range but for profilers that know which call has enqueued it."""
    if _native.environment_text("DEEP_EP_NVTX") != "1":
        return native
    try:
        torch.cuda.nvtx.mark("deep_ep")
    except RuntimeError:  # PyTorch for the CPU has none
        return native
    return _Ranged(native)  # type: ignore[return-value]


class _Ranged:
    def __init__(self, native: "_native.Buffer") -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._native, name)
        if callable(call):
            call = torch.cuda.nvtx.range(f"deep_ep.{name}")(call)
            setattr(self, name, call)  # from now on it is found without this function
        return call
