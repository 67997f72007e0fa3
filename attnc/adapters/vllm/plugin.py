"""The entry point of vLLM's group `vllm.general_plugins`: makes attnc the backend that is called CUSTOM."""

from __future__ import annotations

import warnings

BACKEND = "attnc.adapters.vllm.backend.AttncBackend"


def register() -> None:
    """Offers the backend; `--attention-backend CUSTOM` takes it. Called any number of times in a process.

    Where another plug-in has that name already, it keeps it, and a warning says so.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        warnings.warn(
            f"attnc is not offered to vLLM: CUSTOM is {custom.get_path()} already; VLLM_PLUGINS=attnc"
            " loads this plug-in alone",
            stacklevel=2,
        )
        return
    register_backend(custom, BACKEND)
