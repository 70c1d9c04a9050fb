"""What programs do with the memory of results, beside reading and dropping them.

Results lie in memory that PyTorch does not know as its own, so two of its methods would not reach it:

- ``tensor.untyped_storage().resize_(0)``, with which programs free a tensor that others still refer to, raises for such
  memory. ``resizable`` puts a method in its place, on the storage, which all views of the tensor share.
- ``tensor.record_stream(stream)`` does nothing for such memory. ``watch_record_stream`` tells the library, too.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Optional, TypeVar

import torch

from . import _native

_Result = TypeVar("_Result", bound=Optional[torch.Tensor])
_of_pytorch: Optional[Callable[..., None]] = None


def resizable(result: _Result) -> _Result:
    """The same, and ``untyped_storage().resize_(0)`` on it gives its memory back."""
    storage = None if result is None else result.untyped_storage()
    if storage is not None and not storage.resizable():  # PyTorch's own is
        storage.resize_ = _Resize(storage)  # type: ignore[method-assign]
    return result


class _Resize:
    """In the place of ``UntypedStorage.resize_``."""

    __slots__ = ("_storage",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = weakref.ref(storage)  # which refers to this object

    def __call__(self, size: int) -> Any:
        storage = self._storage()
        assert storage is not None
        if size == storage.nbytes():
            return storage
        if size != 0:
            raise RuntimeError(
                f"resize_: a result of deep_ep has {storage.nbytes()} bytes, allowed: these, or 0, which frees it; not {size}"
            )
        _native.free_result(storage.data_ptr())
        # The memory is no longer this storage's, though PyTorch goes on having its address.
        storage.nbytes = storage.size = storage.data_ptr = _nothing  # type: ignore[method-assign]
        return storage


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
