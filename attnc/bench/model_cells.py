"""Calls of attention as models make them: shapes, masks and layouts, named after what they come from.

FLOPs are those of the two products over what the mask keeps, 2 D and 2 Dv for each query and key, five
halves of that for gradients; bytes are those of q, k, v and o, each once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

#: What is timed of a call. Training is its gradients, the rest a forward: of a whole prompt, of a part of one
#: behind what a cache holds, of drafted tokens, of one token.
Job: TypeAlias = Literal["training", "prompt", "chunk", "drafts", "decoding"]

_TOKENS = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCell:
    """A row of the table. queries, keys: of each of `batch` sequences; heads: of q; kv_heads: of k
    and v; width, value: D and Dv, of k and v in one where `latent`; window: keys before a query that it sees,
    None for all; softcap: 0 for none; page: rows of a page of keys, 0 for a tensor; lengths: of sequences
    that are packed end to end, in place of batch, queries and keys.
    """

    model: str
    job: Job
    heads: int
    kv_heads: int
    width: int
    batch: int = 1
    queries: int = 0
    keys: int = 0
    value: int = 0
    causal: bool = True
    window: int | None = None
    softcap: float = 0.0
    sink: bool = False
    page: int = 0
    lengths: tuple[int, ...] = ()
    latent: bool = False
    dtype: Literal["bf16", "f16"] = "bf16"

    @property
    def name(self) -> str:
        if self.lengths:
            size = f"packed {len(self.lengths)} of {min(self.lengths)}-{max(self.lengths)}"
        else:
            queries = "" if self.queries in (1, self.keys) else f"m{self.queries} "
            size = f"b{self.batch} {queries}n{self.keys}"
        return f"{self.model} {self.job} {size}"

    @property
    def value_width(self) -> int:
        return self.value or self.width

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        if self.lengths:
            return tuple((length, length) for length in self.lengths)
        return ((self.queries, self.keys),) * self.batch

    @property
    def flops(self) -> float:
        kept = sum(self._count_kept(queries, keys) for queries, keys in self.pairs)
        forward = 2.0 * self.heads * kept * (self.width + self.value_width)
        return forward * (2.5 if self.job == "training" else 1.0)

    @property
    def bytes(self) -> int:
        queries, keys = (sum(pair[at] for pair in self.pairs) for at in (0, 1))
        columns = self.width if self.latent else self.width + self.value_width
        return 2 * (queries * self.heads * (self.width + self.value_width) + keys * self.kv_heads * columns)

    @property
    def form(self) -> ModelCell:
        few = self.queries if self.job in ("drafts", "decoding") else 0
        longest = (1,) if self.lengths else ()
        return replace(self, model="", batch=1, queries=few, keys=0, lengths=longest, heads=1, kv_heads=1)

    def _count_kept(self, queries: int, keys: int) -> float:
        """Returns how many scores of a head count; the last query is at the last key."""
        if not self.causal:
            return float(queries * keys)
        window = keys if self.window is None else self.window
        first = keys - queries
        ends = range(first + 1, keys + 1)
        if window >= keys:
            return (first + 1 + keys) * queries / 2
        return float(sum(min(end, window + 1) for end in ends))


def model_cells() -> tuple[ModelCell, ...]:
    """Returns all cells, model by model."""
    return (
        *_llama(), *_list_grouped(), *_windows(), *_deepseek(), *_encoders(), *_images(), *_list_packed(),
        *_odd(),
    )  # fmt: skip


def _self(
    model: str, job: Job, batch: int, length: int, heads: int, kv: int, width: int, **more: object
) -> ModelCell:
    options: dict[str, object] = {"queries": length, "keys": length, **more}
    return ModelCell(
        model=model, job=job, batch=batch, heads=heads, kv_heads=kv, width=width,
        **options,  # type: ignore[arg-type]  # the fields of the cell
    )  # fmt: skip


def _make_cached(
    model: str, job: Job, batch: int, queries: int, keys: int, heads: int, kv: int, width: int, **more: object
) -> ModelCell:
    return _self(model, job, batch, keys, heads, kv, width, **{"page": 16, **more, "queries": queries})


def _llama() -> Iterator[ModelCell]:
    for model, heads, kv in (
        ("Llama-3-8B", 32, 8), ("Llama-3-8B TP4", 8, 2), ("Llama-3-8B TP8", 4, 1),
        ("Llama-3-70B", 64, 8), ("Llama-3-70B TP4", 16, 2), ("Llama-3-70B TP8", 8, 1),
    ):  # fmt: skip
        yield _self(model, "training", max(1, 64 // heads), 4096, heads, kv, 128)
        yield _self(model, "prompt", 1, 8192, heads, kv, 128)
        yield _make_cached(model, "decoding", 16, 1, 8192, heads, kv, 128)
    yield _self("Llama-3-8B", "training", 2, 8192, 32, 8, 128)
    yield _self("Llama-3-8B", "prompt", 16, 1024, 32, 8, 128)
    yield _self("Llama-3-8B", "prompt", 1, 32768, 32, 8, 128)
    yield _make_cached("Llama-3-8B", "chunk", 1, 2048, 16384, 32, 8, 128)
    yield _make_cached("Llama-3-8B", "chunk", 8, 512, 4096, 32, 8, 128)
    yield _make_cached("Llama-3-8B", "drafts", 16, 8, 8192, 32, 8, 128)
    yield _make_cached("Llama-3-8B", "decoding", 1, 1, 8192, 32, 8, 128)
    yield _make_cached("Llama-3-8B", "decoding", 64, 1, 4096, 32, 8, 128)
    yield _make_cached("Llama-3-8B", "decoding", 1, 1, 131072, 32, 8, 128, page=0)


def _list_grouped() -> Iterator[ModelCell]:
    yield _self("Qwen3-30B-A3B", "training", 2, 4096, 32, 4, 128)
    yield _self("Qwen3-30B-A3B", "prompt", 1, 16384, 32, 4, 128)
    yield _self("Qwen3-32B", "training", 1, 8192, 64, 8, 128)
    yield _make_cached("Qwen3-32B", "decoding", 32, 1, 4096, 64, 8, 128)
    yield _self("Qwen2.5-7B", "prompt", 2, 4096, 28, 4, 128)
    yield _self("Falcon-7B", "training", 4, 2048, 71, 1, 64)
    yield _self("StarCoder", "training", 2, 4096, 48, 1, 128)
    yield _self("Llama-3.2-1B", "training", 2, 4096, 32, 8, 64)
    yield _self("Phi-3-mini", "prompt", 2, 4096, 32, 32, 96)
    yield _self("GPT-J", "training", 2, 2048, 16, 16, 256)
    yield _self("GPT-2", "training", 16, 1024, 12, 12, 64)
    yield _self("OPT-2.7B", "training", 4, 2048, 32, 32, 80)


def _windows() -> Iterator[ModelCell]:
    yield _self("Mistral-7B", "training", 1, 16384, 32, 8, 128, window=4095)
    yield _self("Mistral-7B", "prompt", 1, 32768, 32, 8, 128, window=4095)
    yield _self("Gemma-2-9B local", "training", 1, 8192, 16, 8, 256, window=4095, softcap=50.0)
    yield _self("Gemma-2-9B global", "training", 1, 8192, 16, 8, 256, softcap=50.0)
    yield _self("Gemma-2-9B global", "prompt", 1, 8192, 16, 8, 256, softcap=50.0)
    yield _self("Gemma-3-12B local", "prompt", 1, 32768, 16, 8, 256, window=1023)
    yield _self("Gemma-3-12B global", "training", 1, 8192, 16, 8, 256)
    yield _self("gpt-oss-20b local", "prompt", 1, 16384, 64, 8, 64, window=127, sink=True)
    yield _self("gpt-oss-20b global", "prompt", 1, 8192, 64, 8, 64, sink=True)
    yield _self("gpt-oss-20b global", "training", 1, 4096, 64, 8, 64, sink=True)
    yield _make_cached("gpt-oss-20b global", "decoding", 16, 1, 8192, 64, 8, 64, sink=True)


def _deepseek() -> Iterator[ModelCell]:
    yield _self("DeepSeek-V3 TP8", "training", 2, 4096, 16, 16, 192, value=128)
    yield _self("DeepSeek-V3", "prompt", 1, 4096, 128, 128, 192, value=128)
    for model, heads, batch in (
        ("DeepSeek-V3", 128, 1), ("DeepSeek-V3", 128, 16), ("DeepSeek-V3", 128, 64),
        ("DeepSeek-V3 TP8", 16, 64),
    ):  # fmt: skip
        yield _make_cached(model, "decoding", batch, 1, 8192, heads, 1, 576, value=512, page=64, latent=True)


def _encoders() -> Iterator[ModelCell]:
    yield _self("BERT-base", "prompt", 32, 512, 12, 12, 64, causal=False)
    yield _self("BERT-base", "training", 32, 512, 12, 12, 64, causal=False)
    yield _self("BERT-large", "prompt", 256, 128, 16, 16, 64, causal=False)
    yield _self("ViT-L", "prompt", 64, 577, 16, 16, 64, causal=False)
    yield _self("ViT-L", "training", 64, 577, 16, 16, 64, causal=False)
    yield _self("Whisper-large encoder", "prompt", 16, 1500, 20, 20, 64, causal=False)
    cross = {"causal": False, "page": 0}
    yield _make_cached("Whisper-large cross", "prompt", 16, 448, 1500, 20, 20, 64, **cross)
    yield _make_cached("Whisper-large cross", "decoding", 16, 1, 1500, 20, 20, 64, **cross)


def _images() -> Iterator[ModelCell]:
    yield _self("SDXL", "prompt", 2, 4096, 10, 10, 64, causal=False)
    yield _self("SDXL", "training", 2, 4096, 10, 10, 64, causal=False)
    yield _self("SDXL inner", "prompt", 2, 1024, 20, 20, 64, causal=False)
    yield _make_cached("SDXL cross", "prompt", 2, 4096, 77, 10, 10, 64, causal=False, page=0)
    yield _self("Flux", "prompt", 1, 4608, 24, 24, 128, causal=False)
    yield _self("Flux", "training", 1, 4608, 24, 24, 128, causal=False)
    yield _self("Wan-1.3B video", "prompt", 1, 32760, 12, 12, 128, causal=False)
    yield _self("HunyuanVideo", "prompt", 1, 40960, 24, 24, 128, causal=False)


def _list_packed() -> Iterator[ModelCell]:
    documents, mixed = (*(1000,) * 16, 384), (8192, 4096, 2048, 1024, 512, 384, 128)
    prompts = tuple(64 + 128 * at for at in range(16))
    sentences = tuple(32 + 8 * (at * 7 % 61) for at in range(64))
    yield ModelCell(model="Llama-3-8B", job="training", heads=32, kv_heads=8, width=128, lengths=documents)
    yield ModelCell(model="Llama-3-8B", job="training", heads=32, kv_heads=8, width=128, lengths=mixed)
    yield ModelCell(model="Llama-3-8B", job="prompt", heads=32, kv_heads=8, width=128, lengths=documents)
    yield ModelCell(model="Llama-3-8B", job="prompt", heads=32, kv_heads=8, width=128, lengths=prompts)
    yield ModelCell(
        model="BERT-base", job="prompt", heads=12, kv_heads=12, width=64, causal=False, lengths=sentences
    )


def _odd() -> Iterator[ModelCell]:
    """Yields groups, widths and lengths that are no power of two, and wide heads of one KV head."""
    yield _self("Qwen2.5-14B", "training", 2, 4096, 40, 8, 128)
    yield _self("Gemma-2B", "training", 2, 4096, 8, 1, 256)
    yield _self("Phi-3-mini", "training", 1, 4096, 32, 32, 96, window=2047)
    for model, batch, length, heads, width, causal in (
        ("SigLIP", 16, 729, 16, 72, False), ("ViT-H", 16, 257, 16, 80, False),
        ("SD-1.5", 2, 4096, 8, 40, False), ("CLIP text", 64, 77, 12, 64, True),
    ):  # fmt: skip
        yield _self(model, "prompt", batch, length, heads, heads, width, causal=causal)
        yield _self(model, "training", batch, length, heads, heads, width, causal=causal)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """q [B, M, H, D], k [B, N, Hkv, D] and v [B, N, Hkv, Dv]; packed ones without B, ends: i32[B + 1]; pages:
    (k, v) with rows of all sequences in pages in random order, table: i32[B, P], of keys in pages; lengths:
    i32[B]; sink: [H].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    ends: torch.Tensor | None = None
    pages: tuple[torch.Tensor, torch.Tensor] | None = None
    table: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    sink: torch.Tensor | None

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [self.q, self.k, self.v]


def draw_inputs(cell: ModelCell, device: str = "cuda", seed: int = 0) -> ModelInputs:
    """Returns inputs of N(0, 1)."""
    generator = torch.Generator(device).manual_seed(seed)

    dtype = torch.bfloat16 if cell.dtype == "bf16" else torch.float16

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    sink = normal(cell.heads) if cell.sink else None
    if cell.lengths:
        total = sum(cell.lengths)
        ends = torch.tensor([0, *cell.lengths]).cumsum(0).to(device, torch.int32)
        q, k, v = (
            normal(total, heads, width)
            for heads, width in (
                (cell.heads, cell.width), (cell.kv_heads, cell.width), (cell.kv_heads, cell.value_width)
            )
        )  # fmt: skip
        return ModelInputs(q=q, k=k, v=v, ends=ends, sink=sink)
    q = normal(cell.batch, cell.queries, cell.heads, cell.width)
    k = normal(cell.batch, cell.keys, cell.kv_heads, cell.width)
    v = k[..., : cell.value_width] if cell.latent else normal(*k.shape[:-1], cell.value_width)
    lengths = torch.full((cell.batch,), cell.keys, dtype=torch.int32, device=device)
    if not cell.page:
        return ModelInputs(q=q, k=k, v=v, lengths=lengths, sink=sink)
    count = cell.keys // cell.page
    order = torch.randperm(cell.batch * count, generator=generator, device=device)
    table = order.int().view(cell.batch, count)
    pages = []
    for x in (k,) if cell.latent else (k, v):
        paged = torch.empty(cell.batch * count, cell.page, *x.shape[2:], dtype=x.dtype, device=device)
        paged[order] = x.reshape(-1, cell.page, *x.shape[2:])
        pages.append(paged)
    of_k, of_v = pages[0], pages[-1]
    return ModelInputs(q=q, k=k, v=v, pages=(of_k, of_v), table=table, lengths=lengths, sink=sink)
