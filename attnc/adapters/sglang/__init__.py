"""SGLang: a plug-in with an attention backend.

    python -m sglang.launch_server --model-path MODEL --attention-backend attnc    # with attnc installed

`register` is the entry point of SGLang's group `sglang.srt.plugins`, which it calls in each of its processes;
`backend`, which it names, is the only module here that imports SGLang.
"""

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
