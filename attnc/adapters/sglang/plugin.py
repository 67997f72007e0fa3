"""The entry point of SGLang's group `sglang.srt.plugins`: adds the attention backend attnc."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Offers the backend; `--attention-backend attnc` takes it. Called any number of times."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if "attnc" not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices(["attnc"])
    register_attention_backend("attnc")(_backend)


def _backend(runner: Any) -> Any:
    from attnc.adapters.sglang.backend import AttncAttnBackend

    return AttncAttnBackend(runner)
