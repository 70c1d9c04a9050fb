"""Expert-parallel communication for Mixture-of-Experts models: dispatch tokens to experts, combine their results.

On CUDA tensors everything runs on GPUs; on CPU tensors, with a process group of the ``gloo`` backend, the same kernels
run on the CPU. Importing starts neither CUDA nor a thread.
"""

import sys as _sys



def _for_the_command() -> bool:
    """``python -m deep_ep`` imports this first; the command needs none of it, and no PyTorch."""
    if not _sys.argv or _sys.argv[0] != "-m":  # which it is while Python looks for the module
        return False
    if _sys.version_info < (3, 10):  # it may be any module whose package imports deep_ep
        from importlib.util import find_spec

        return find_spec("torch") is None
    given = " ".join(_sys.orig_argv) + " "
    return "-m deep_ep " in given or "-mdeep_ep " in given


if not _for_the_command():
    try:
        import torch as _torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            "deep_ep needs PyTorch 2.4 or later, which is not installed here: install the build of it that fits your "
            "GPUs first, as pip does not do that for deep_ep (the command deep_ep works without)",
            name="torch",
        ) from None

    from .utils import EventHandle, EventOverlap  # isort: skip  (buffer needs it)
    from . import legacy
    from .buffer import Buffer, Config
    from .buffers.elastic import ElasticBuffer, EPHandle
    from .logs import set_log_sink
    from .utils.envs import get_logical_domain_size, get_physical_domain_size
    from .version import __version__, warn_of_several

    #: dtype of expert indices. Calls accept ``torch.int32`` as well.
    topk_idx_t: _torch.dtype = _torch.int64

    # Engines take the presence of ElasticBuffer here for the second interface.
    __all__ = [
        "Buffer", "Config", "ElasticBuffer", "EPHandle", "EventHandle", "EventOverlap", "__version__",
        "get_logical_domain_size", "get_physical_domain_size", "legacy", "set_log_sink", "topk_idx_t",
    ]  # fmt: skip

    _SUBMODULES = ("buffer", "buffers", "errors", "low_latency_stats", "utils")

    def __dir__():
        """Public names alone: modules whose names are not here are the package's own."""
        return sorted([*__all__, *_SUBMODULES])

    warn_of_several()
    del warn_of_several
