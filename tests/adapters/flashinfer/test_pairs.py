"""FlashInfer's wrappers and functions, every value of an argument beside every value of every other, against
float64.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from attnc.adapters import flashinfer
from tests.adapters.flashinfer.batches import GROUP, HEADS, PAGE, SIZE, compare, csr, stored, workspace
from tests.adapters.oracle import attend, pages
from tests.by_day import each_by_day
from tests.pairs import Axes, Values, any_of, covering

fi: Any = flashinfer  # what a program without types calls

BOTH = (False, True)
SCORES: Axes = {
    "layout": ("NHD", "HND"),
    "window_left": (-1, 0, 5),
    "softcap": (0.0, 3.0),
    "scale": (None, 0.4),
    "alibi": BOTH,
    "scales": (None, "number", "heads"),
    "lse": BOTH,
    "out": BOTH,
}
MASKS = ("none", "causal", "custom", "packed")
QUERIES = ("mixed", "ones", "fours", "some")
DECODE: Axes = {
    **SCORES,
    "kind": ("apart", "together"),
    "sinks": BOTH,
    "another_window": (None, -1, 2),
    "tokens": (1, 3),
    "split": ("auto", "none", "fixed"),
    "graph": BOTH,
}
PAGED: Axes = {
    **SCORES,
    "kind": ("apart", "together"),
    "mask": MASKS,
    "queries": QUERIES,
    "value_dim": (SIZE, 8),
    "sinks": BOTH,
    "another_window": (None, -1, 2),
    "graph": BOTH,
}
RAGGED: Axes = {**SCORES, "mask": MASKS, "queries": QUERIES, "value_dim": (SIZE, 8), "graph": BOTH}
SINGLE: Axes = {**SCORES, "mask": MASKS, "rows": (1, 4, 19), "value_dim": (SIZE, 8), "function": ("p", "d")}
LATENT: Axes = {
    "queries": QUERIES,
    "causal": BOTH,
    "page": (1, 4),
    "rotated": (0, 16, 32),
    "columns": ("side by side", "the other way round", "apart"),
    "base_e": BOTH,
    "tables": ("csr", "dense", "metadata"),
    "inputs": ("named", "packed", "pairs"),
    "sinks": BOTH,
    "lse": BOTH,
    "graph": BOTH,
}
LENGTHS = [9, 0, 17]
ROWS = {"mixed": [9, 0, 4], "ones": [1, 1, 1], "fours": [4, 4, 4], "some": [1, 3, 0]}


def fits(x: Values) -> bool:
    if x.get("tables", "csr") != "csr" and x["graph"]:
        return False  # the pages of a graph are as many as its buffer holds
    if x.get("alibi") and x["softcap"]:
        return False
    if x.get("kind") == "together" and x.get("value_dim", SIZE) != SIZE:
        return False
    if x.get("function") == "d" and (x["rows"] > 1 or x["mask"] != "none" or x["out"]):
        return False
    return not (x.get("function") == "p" and x["out"])


class Batch:
    """Requests with their keys and values, and what must come out of them."""

    def __init__(self, x: Values, rows: list[int], lengths: list[int]) -> None:
        self.x, self.rows, self.lengths = x, rows, lengths
        value_dim = x.get("value_dim", SIZE)
        self.k, self.v, self.table, self.keys, values = pages(lengths, PAGE, HEADS, SIZE)
        self.v, self.values = self.v[..., :value_dim], [y[..., :value_dim] for y in values]
        self.q = torch.randn(sum(rows), HEADS * GROUP, SIZE)
        self.seen = [torch.rand(m, n) < 0.6 for m, n in zip(rows, lengths, strict=True)]
        self.sinks = torch.randn(HEADS * GROUP) if x.get("sinks") else None
        heads = torch.rand(HEADS) + 0.5
        scales: dict[str | None, dict[str, Any]] = {
            None: {},
            "number": {"q_scale": 1.5, "k_scale": 0.5, "v_scale": 2},
            "heads": {"k_scale": heads, "v_scale": heads.flip(0)},
        }
        self.scales = scales[x["scales"]]

    def planned(self) -> dict[str, Any]:
        x = self.x
        made = {"sm_scale": x["scale"], "window_left": x["window_left"], "logits_soft_cap": x["softcap"]}
        return made | {"pos_encoding_mode": "ALIBI" if x["alibi"] else "NONE"}

    def masked(self) -> dict[str, Any]:
        mask = self.x["mask"]
        if mask in ("none", "causal"):
            return {"causal": mask == "causal"}
        flat = torch.cat([seen.flatten() for seen in self.seen])
        if mask == "custom":
            return {"custom_mask": flat, "causal": True}  # which then says nothing
        ends = torch.tensor([0, *torch.tensor([seen.numel() for seen in self.seen]).cumsum(0).tolist()])
        return {"packed_custom_mask": fi.segment_packbits(flat, ends, "little")[0]}

    def starts(self, counts: list[int]) -> torch.Tensor:
        return torch.tensor([0, *counts]).cumsum(0).int()

    def outputs(self, value_dim: int) -> dict[str, Any]:
        if not self.x["out"]:
            return {}
        shape = (len(self.q), HEADS * GROUP)
        return {"out": torch.full((*shape, value_dim), torch.nan), "lse": torch.full(shape, torch.nan)}

    def judge(self, found: Any, *, causal: bool = False, custom: bool = False) -> None:
        """Holds each request's rows of (o, lse), or of o, to float64."""
        x = self.x
        o, lse = found if x["lse"] else (found, None)
        left = x["window_left"] if x.get("another_window") is None else x["another_window"]
        of_k = torch.as_tensor(self.scales.get("k_scale", 1.0)) * self.scales.get("q_scale", 1.0)
        of_v = torch.as_tensor(self.scales.get("v_scale", 1.0))
        scale = SIZE**-0.5 if x["scale"] is None else x["scale"]
        for b, (first, last) in enumerate(pairwise(self.starts(self.rows).tolist())):
            m, n = last - first, self.lengths[b]
            slopes = 2.0 ** (-8 * torch.arange(1, HEADS * GROUP + 1) / (HEADS * GROUP))
            far = torch.arange(n)[None, :] - torch.arange(m)[:, None]
            expected = attend(
                self.q[first:last],
                self.keys[b] * of_k.reshape(-1, 1),
                self.values[b] * of_v.reshape(-1, 1),
                scale=scale,
                left=left,
                causal=causal,
                softcap=x["softcap"],
                sinks=self.sinks,
                seen=self.seen[b] if custom else None,
                added=slopes[:, None, None] * far if x["alibi"] else None,
            )
            compare(o[first:last], None if lse is None else lse[first:last], expected)


def run_decode(x: Values) -> None:
    batch = Batch(x, [x["tokens"]] * 3, LENGTHS)
    buffers = (torch.empty(4), torch.empty(12), torch.empty(3)) if x["graph"] else ()
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(), x["layout"], x["graph"], False, *buffers)
    ways: dict[str, Any] = {"auto": {}, "none": {"disable_split_kv": True}, "fixed": {"fixed_split_size": 4}}
    options = batch.planned() | ways[x["split"]] | {"q_data_type": "float32", "q_len_per_req": x["tokens"]}
    tables = csr(LENGTHS, batch.table)
    if x["graph"]:  # what a captured graph reads is that of the later plan
        other = csr([1, 2, 3], batch.table[[0, 0, 2]])
        wrapper.plan(*other, *_sizes(), **options)
    wrapper.plan(*tables, *_sizes(), **options)
    batch.judge(_run_pages(wrapper, batch), causal=True)


def run_paged(x: Values) -> None:
    batch = Batch(x, ROWS[x["queries"]], LENGTHS)
    buffers = tuple(torch.empty(size) for size in (4, 4, 12, 3, 40, 4)) if x["graph"] else ()
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace(), x["layout"], x["graph"], *buffers)
    tables = csr(LENGTHS, batch.table)
    for turn in range(1 + x["graph"]):
        options = batch.masked() if turn == x["graph"] else _turned(batch)
        wrapper.plan(
            batch.starts(batch.rows),
            *tables,
            *_sizes(),
            head_dim_vo=x["value_dim"],
            q_data_type="float32",
            **options,
            **batch.planned(),
        )
    batch.judge(_run_pages(wrapper, batch), causal=x["mask"] == "causal", custom=_is_custom(x))


def run_ragged(x: Values) -> None:
    batch = Batch(x, ROWS[x["queries"]], LENGTHS)
    buffers = tuple(torch.empty(size) for size in (4, 4, 40, 4)) if x["graph"] else ()
    wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(workspace(), x["layout"], x["graph"], *buffers)
    for turn in range(1 + x["graph"]):
        options = batch.masked() if turn == x["graph"] else _turned(batch)
        wrapper.plan(
            batch.starts(batch.rows),
            batch.starts(LENGTHS),
            HEADS * GROUP,
            HEADS,
            SIZE,
            x["value_dim"],
            q_data_type="float32",
            **options,
            **batch.planned(),
        )
    k, v = torch.cat(batch.keys), torch.cat(batch.values)
    if x["layout"] == "HND":
        k, v = (y.transpose(0, 1).contiguous() for y in (k, v))
    found = wrapper.run(batch.q, k, v, return_lse=x["lse"], **batch.scales, **batch.outputs(x["value_dim"]))
    batch.judge(found, causal=x["mask"] == "causal", custom=_is_custom(x))


def run_single(x: Values) -> None:
    batch = Batch(x, [x["rows"]], [17])
    k, v = batch.keys[0], batch.values[0]
    if x["layout"] == "HND":
        k, v = (y.transpose(0, 1).contiguous() for y in (k, v))
    options: dict[str, Any] = batch.planned() | {"kv_layout": x["layout"], "return_lse": x["lse"]}
    if x["function"] == "d":
        found = fi.single_decode_with_kv_cache(batch.q[0], k, v, **options, **batch.scales)
        found = tuple(y[None] for y in found) if x["lse"] else found[None]
    else:
        batch.scales.pop("q_scale", None)
        mask = batch.masked()
        if "custom_mask" in mask:
            mask["custom_mask"] = batch.seen[0]
        if x["scales"] == "heads":
            options |= {"scale_k": batch.scales["k_scale"], "scale_v": batch.scales["v_scale"]}
        else:
            options |= batch.scales
        found = fi.single_prefill_with_kv_cache(batch.q, k, v, **mask, **options)
    batch.judge(found, causal=x["mask"] == "causal", custom=_is_custom(x))


def run_latent(x: Values) -> None:
    """Latents are 32 columns, rotated keys 0, 16 or 32; the values are the latents."""
    heads, width, rows, page = 4, 32, ROWS[x["queries"]], x["page"]
    size = width + x["rotated"]
    k, _, table, keys, _ = pages(LENGTHS, page, 1, size)
    pool = k[:, :, 0]
    ckv, kpe = pool[..., :width], pool[..., width:]
    if x["columns"] == "apart":
        ckv, kpe = ckv.contiguous(), kpe.contiguous()
    elif x["columns"] == "the other way round":
        both = torch.cat((kpe, ckv), -1)
        ckv, kpe = both[..., x["rotated"] :], both[..., : x["rotated"]]
    counts = torch.tensor([-(-n // page) for n in LENGTHS])
    indices = torch.cat([row[:count] for row, count in zip(table, counts.tolist(), strict=True)])
    starts = torch.tensor([0, *rows]).cumsum(0).int()
    buffers = tuple(torch.empty(n) for n in (4, 4, 40, 3)) if x["graph"] else ()
    wrapper = fi.BatchMLAPagedAttentionWrapper(workspace(), x["graph"], *buffers)
    indptr = torch.cat((torch.zeros(1).long(), counts.cumsum(0))).int()
    arguments: tuple[Any, ...] = (heads, width, x["rotated"], page, x["causal"], 0.2)
    types = (torch.float32, torch.float32)
    if x["graph"]:
        wrapper.plan(starts, indptr, indices.flip(0), torch.tensor([2, 0, 1]), *arguments, *types)
    if x["tables"] == "csr":
        wrapper.plan(starts, indptr, indices, torch.tensor(LENGTHS), *arguments, *types)
    else:
        names = (
            "num_heads",
            "head_dim_ckv",
            "head_dim_kpe",
            "page_size",
            "causal",
            "sm_scale",
            "q_data_type",
        )
        options = dict(zip(names, (*arguments, types[0]), strict=True))
        dense = {"cum_seq_lens_q": starts, "block_tables": table[:, : int(counts.max())]}
        dense["seq_lens"] = torch.tensor(LENGTHS)
        given = {"metadata": fi.MLAPlanMetadata(**dense)} if x["tables"] == "metadata" else dense
        wrapper.plan(**options, **given)
    q = torch.randn(sum(rows), heads, size)
    sinks = torch.randn(heads) if x["sinks"] else None
    parts: dict[str, Any] = {"q_nope": q[..., :width], "q_pe": q[..., width:]}
    parts |= {"ckv_cache": ckv, "kpe_cache": kpe}
    if x["inputs"] != "named":
        parts = {"query": q, "kv_cache": (ckv, kpe)}
        if x["inputs"] == "pairs":
            parts["query"] = (q[..., :width].contiguous(), q[..., width:].contiguous())
        elif x["columns"] == "side by side":
            parts["kv_cache"] = pool
    found = wrapper.run(
        **parts,
        sinks=sinks,
        return_lse=x["lse"],
        return_lse_base_on_e=x["base_e"],
    )
    o, lse = found if isinstance(found, tuple) else (found, None)
    for b, (first, last) in enumerate(pairwise(starts.tolist())):
        own = keys[b], keys[b][..., :width]
        expected = attend(q[first:last], *own, scale=0.2, causal=x["causal"], sinks=sinks)
        unit = math.log(2) if x["base_e"] else 1.0
        compare(o[first:last], None if lse is None else lse[first:last] / unit, expected)


RUNS: dict[str, tuple[Axes, Callable[[Values], None]]] = {
    "decode": (DECODE, run_decode),
    "paged": (PAGED, run_paged),
    "ragged": (RAGGED, run_ragged),
    "single": (SINGLE, run_single),
    "latent": (LATENT, run_latent),
}
CASES = [(call, x) for call, (axes, _) in RUNS.items() for x in covering(axes, fits)]


def run(call: str, x: Values) -> None:
    torch.manual_seed(zlib.crc32(repr((call, x)).encode()))
    RUNS[call][1](x)


@pytest.mark.parametrize(
    ("call", "x"), each_by_day(CASES, of=10), ids=lambda x: x if isinstance(x, str) else ""
)
def test_every_pair_of_arguments(call: str, x: Values) -> None:
    run(call, x)


@pytest.mark.nightly
@pytest.mark.parametrize("call", RUNS)
def test_any_arguments(call: str) -> None:
    """By day: a third of the cases that have every pair."""

    @settings(max_examples=400)
    @given(any_of(RUNS[call][0], fits))
    def check(x: Values) -> None:
        run(call, x)

    check()


def _sizes() -> tuple[Any, ...]:
    return (HEADS * GROUP, HEADS, SIZE, PAGE)


def _is_custom(x: Values) -> bool:
    return x["mask"] in ("custom", "packed")


def _turned(batch: Batch) -> dict[str, Any]:
    """What an earlier plan of a graph says: the opposite mask."""
    batch.seen = [~seen for seen in batch.seen]
    options = batch.masked()
    batch.seen = [~seen for seen in batch.seen]
    return options


def _run_pages(wrapper: Any, batch: Batch) -> Any:
    x = batch.x
    pools = stored(batch.k, batch.v, f"{x['layout']}-{x['kind']}")
    return wrapper.run(
        batch.q,
        pools,
        return_lse=x["lse"],
        window_left=x["another_window"],
        sinks=batch.sinks,
        **batch.scales,
        **batch.outputs(x.get("value_dim", SIZE)),
    )
