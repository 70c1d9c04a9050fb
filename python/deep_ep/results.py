"""What programs do with the memory of results, beside reading and dropping them.

Results lie in memory that PyTorch does not know as its own, so two of its methods would not reach it:

- ``tensor.untyped_storage().resize_(0)``, with which programs free a tensor that others still refer to, raises for such
  memory.
- ``tensor.record_stream(stream)`` does nothing for such memory.

Methods of this module take their place, which find results by their address: calls need not do anything for it.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch

from . import _native

_of_pytorch: Optional[Callable[..., None]] = None
_resize_of_pytorch: Optional[Callable[..., Any]] = None


def watch_resize() -> None:
    """From now on ``torch.UntypedStorage.resize_(0)`` gives the memory of results back. All views of a tensor share its
    storage."""
    global _resize_of_pytorch
    if _resize_of_pytorch is not None:
        return
    _resize_of_pytorch = torch.UntypedStorage.resize_
    torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]


def _resize(self: torch.UntypedStorage, size: int) -> Any:
    assert _resize_of_pytorch is not None
    if self.resizable():  # PyTorch's own
        return _resize_of_pytorch(self, size)
    bytes = self.nbytes()
    freed = getattr(self, "_freed_result_of_deep_ep", False)
    if not freed and not _native.is_result(self.data_ptr(), bytes):  # somebody else's
        return _resize_of_pytorch(self, size)
    if size == bytes:
        return self
    if size != 0:
        raise RuntimeError(f"resize_: a result of deep_ep has {bytes} bytes, allowed: these, or 0, which frees it; not {size}")
    if not _native.free_result(self.data_ptr(), bytes):
        raise RuntimeError(
            f"resize_: these {bytes} bytes belong to a handle or to the buffer of deep_ep, which later calls need, allowed: "
            "to drop the handle, or to destroy the buffer"
        )
    # The memory is no longer this storage's, though PyTorch goes on having its address.
    self._freed_result_of_deep_ep = True  # type: ignore[attr-defined]
    self.nbytes = self.size = self.data_ptr = _nothing  # type: ignore[method-assign]
    return self


def _nothing() -> int:
    return 0


def watch_record_stream() -> None:
    """From now on ``torch.Tensor.record_stream`` holds for results, too. Their views are tensors like any others, so it
    is PyTorch's method that has to be another one."""
    global _of_pytorch
    if _of_pytorch is not None:
        return
    _of_pytorch = torch.Tensor.record_stream
    torch.Tensor.record_stream = _record_stream  # type: ignore[method-assign]


def _record_stream(self: torch.Tensor, s: Any) -> None:
    assert _of_pytorch is not None
    _of_pytorch(self, s)
    if type(self) is torch.Tensor and self.is_cuda:
        stream = getattr(s, "cuda_stream", None)
        if stream is None:  # a torch.Stream, which does not tell its handle
            same = {"stream_id": s.stream_id, "device_index": s.device_index, "device_type": s.device_type}
            stream = torch.cuda.Stream(**same).cuda_stream
        _native.record_stream(self.untyped_storage().data_ptr(), stream)
