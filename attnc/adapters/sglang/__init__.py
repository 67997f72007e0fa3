"""SGLang: a plug-in with an attention backend.

    python -m sglang.launch_server --model-path MODEL --attention-backend attnc    # with attnc installed

`register` is the entry point of SGLang's group `sglang.srt.plugins`, which it calls in each of its processes;
`backend` and `drafts`, which it names, are the only modules here that import SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Lists of the backends that `--enable-deterministic-inference` may take, and share prefixes beside it.
_DETERMINISTIC = (
    "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
    "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND",
)
_DRAFT_BACKENDS = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"


def register() -> None:
    """Offers the backend, also for models that draft; `--attention-backend attnc` takes it. Called any number
    of times.
    """
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_attention_backend("attnc")(_backend)
    if "attnc" not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices(["attnc"])
        choices.add_draft_attention_backend_choices(["attnc"])
        choices.add_chunked_prefix_cache_attention_backend("attnc")
        for known in _DETERMINISTIC:
            getattr(choices, known, []).append("attnc")
        HookRegistry.register(_DRAFT_BACKENDS, _with_drafts, HookType.AROUND)


def _backend(runner: Any) -> Any:
    from attnc.adapters.sglang.backend import AttncAttnBackend, is_deterministic

    # Whether keys and values are made follows from the prefixes of a whole batch. All can attend to latents.
    if runner.use_mla_backend and not is_deterministic(runner):
        _read_prefixes_in_chunks()
    return AttncAttnBackend(runner)


def _read_prefixes_in_chunks() -> None:
    """Has DeepSeek's models make keys and values of long prefixes, chunk by chunk, as for SGLang's own
    backends, in place of attending to their latents.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    def method(attention: Any, forward_batch: Any) -> Any:
        return handlers._handle_attention_backend(attention, forward_batch, "attnc")

    handlers.AttentionBackendRegistry.register("attnc", method)


def _with_drafts(
    create: Callable[..., Any],
    factory: Any,
    backend_name: str,
    backend_map: dict[str, Any],
    *rest: Any,
    stamps_children: bool = False,
) -> Any:
    """Calls SGLang's factory of a draft model's backends, with ours among those it knows: of all steps of a
    draft (`stamps_children`), or of the tokens that were accepted.
    """

    def make() -> tuple[str, Any]:
        from attnc.adapters.sglang.drafts import AttncMultiStepDraftBackend

        runner = factory.draft_model_runner
        if not stamps_children:
            return "attnc", _backend(runner)
        return "attnc", AttncMultiStepDraftBackend(runner, factory.topk, factory.speculative_num_steps)

    return create(
        factory, backend_name, backend_map | {"attnc": make}, *rest, stamps_children=stamps_children
    )
