"""What all buffers of V2.5 have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Optional, Tuple

from ..errors import UseAfterDestroy


class Domains:
    """What ranks reach each other's memory. Results are those of one domain, also between nodes."""

    _domains: Tuple[int, int]

    def get_physical_domain_size(self) -> Tuple[int, int]:
        """(nodes, ranks of each)."""
        return self._domains

    def get_logical_domain_size(self) -> Tuple[int, int]:
        """(1, R)."""
        return 1, self._domains[0] * self._domains[1]


@dataclass(eq=False)
class Context(Domains):
    """The domains and the memory of a buffer, for programs that look at them."""

    _domains: Tuple[int, int]
    num_gpu_buffer_bytes: int
    num_workspace_bytes: int = 0
    num_rdma_storage_bytes: int = 0


class BufferBase(ABC):
    """Made collectively; ``destroy`` ends it."""

    context: Optional[Context] = None
    runtime: Any = None

    def __init__(self, explicitly_destroy: bool = False) -> None:
        self.explicitly_destroy: bool = bool(explicitly_destroy)

    @property
    def main_context(self) -> Optional[Context]:
        """``None`` after ``destroy``."""
        return self.context

    def print_memory_usage(self) -> None:
        """Prints a line about the buffer's memory."""
        context = self.main_context
        if context is None:
            raise UseAfterDestroy("print_memory_usage: the buffer was used after destroy()")
        print(f"deep_ep: {type(self).__name__}: {context.num_gpu_buffer_bytes / 2**20:.0f} MiB", flush=True)

    @abstractmethod
    def destroy(self) -> None:
        """Collective: frees the memory."""
