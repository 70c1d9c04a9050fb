"""Interfaces of upstream's second generation that have nothing to do with experts, and that this library leaves out."""

from __future__ import annotations

from typing import Any, NoReturn


def _left_out(name: str) -> Any:
    def call(*arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"{name}: this library has no Engram, pipeline or all-gather calls")

    call.__name__ = name
    return call


class OptionalCalls:
    """Calls that raise ``NotImplementedError``."""

    get_engram_storage_size_hint = staticmethod(_left_out("get_engram_storage_size_hint"))
    engram_write = _left_out("engram_write")
    engram_fetch = _left_out("engram_fetch")
    get_pp_buffer_size_hint = staticmethod(_left_out("get_pp_buffer_size_hint"))
    pp_set_config = _left_out("pp_set_config")
    pp_send = _left_out("pp_send")
    pp_recv = _left_out("pp_recv")
    get_agrs_num_max_session_bytes = staticmethod(_left_out("get_agrs_num_max_session_bytes"))
    get_agrs_buffer_size_hint = staticmethod(_left_out("get_agrs_buffer_size_hint"))
    agrs_set_config = _left_out("agrs_set_config")
    create_agrs_session = _left_out("create_agrs_session")
    destroy_agrs_session = _left_out("destroy_agrs_session")
    agrs_new_session = _left_out("agrs_new_session")
    agrs_get_inplace_tensor = _left_out("agrs_get_inplace_tensor")
    all_gather = _left_out("all_gather")
