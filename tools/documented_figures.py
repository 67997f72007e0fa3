"""Tables of the documentation that are computed from the measurements in docs/figures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import ceil, floor
from statistics import geometric_mean
from typing import Any

from attnc.bench.model_peers import DETERMINISTIC, ONE_TENSOR
from attnc.bench.model_peers import OURS as MODEL_OURS
from attnc.bench.models import summary as summary_of_models
from attnc.source import Source
from attnc.tuned.tables import load_tables
from tests.tables import choice
from tools.bench import ranks_report
from tools.bench.papers import Bytes, Row, markdown
from tools.documentation import ROOT, table

#: The cells of the plain grid, and those beside it, by their names.
_GRID = r"^d(64|128|256) h\d+ n(1024|4096|16384) (full|causal)$"
_FURTHER = rf"(?!{_GRID})^d.* (full|causal)$"


def training() -> str:
    """What the training example wrote: losses, and how far apart the curves are."""
    record = json.loads((ROOT / "docs" / "figures" / "training_h200.json").read_text(encoding="utf-8"))
    rows: list[tuple[str, ...]] = [("run", "first steps", "last steps", "validation"), ("---",) * 4]
    for name, run in record["runs"].items():
        rows.append((f"`{name}`", *(f"{run[key]:.3f}" for key in ("first", "last", "validation"))))
    found = record["summary"]
    device, version = record["device"], record["torch"].split("+")[0]
    return f"""Losses in nats per byte, means of 20 steps, on one {device} with PyTorch {version}:

{table(rows)}
| largest distance between | nats per byte |
|---|---|
| PyTorch's three kernels, one seed | {found["noise"]:.3f} |
| the generated kernel and the nearest of them, same seed | {found["attnc"]:.3f} |
| PyTorch's runs with three seeds | {found["seeds"]:.3f} |
| the means over three seeds, generated and PyTorch | {found["attnc_seeds"]:.3f} |
| two runs of the generated kernel, any single step | {found["again"]:.3g} |
"""


def papers() -> str:
    """What the benchmark of the papers measured."""
    record = json.loads((ROOT / "docs" / "figures" / "papers_h200.json").read_text(encoding="utf-8"))

    def bytes_of(entry: Mapping[str, int | None] | None) -> Bytes | None:
        return None if entry is None else Bytes(**entry)

    rows = (
        {**row, **{name: bytes_of(row[name]) for name in ("predicted", "counted")}} for row in record["rows"]
    )
    return markdown([Row(**row) for row in rows])


#: The rows of `summary`: kernels, their record, a pattern of its cells, and the peers.
_STANDINGS: tuple[tuple[str, str, str, Mapping[str, str]], ...] = (
    ("Hopper, forward", "forward_hopper_h200", _GRID, {"cudnn": "cuDNN", "fa3": "FA3", "fa4": "FA4"}),
    ("Hopper, forward: d64 at n512 and n2048, d96, d192/128", "forward_hopper_h200", _FURTHER,
     {"cudnn": "cuDNN", "fa3": "FA3", "fa4": "FA4"}),
    ("Hopper, gradients", "backward_hopper_h200", _GRID, {"cudnn": "cuDNN", "fa3": "FA3"}),
    ("Triton, forward", "forward_h200", _GRID, {"cudnn": "cuDNN", "fa2": "FA2"}),
    ("Triton, forward, masks and scores too", "forward_h200", "", {"flex": "FlexAttention"}),
    ("Triton, gradients", "backward_h200", _GRID, {"cudnn": "cuDNN", "fa2": "FA2"}),
    ("Triton, gradients, masks and scores too", "backward_h200", "", {"flex": "FlexAttention"}),
    ("Triton, decoding", "decode_h200", "", {"cudnn": "cuDNN", "fa2": "FA2", "flex": "FlexAttention"}),
    ("`cuda.sm_80`, forward", "forward_cuda_h200", _GRID, {"fa2": "FA2"}),
    ("`cuda.sm_80`, gradients", "backward_cuda_h200", _GRID, {"fa2": "FA2"}),
)  # fmt: skip


def summary() -> str:
    """How many times as fast as the best peer of each cell: least, geometric mean and most of each table."""
    titles = ("kernels", "beside the best of", "cells", "slowest", "geometric mean", "fastest")
    rows: list[tuple[str, ...]] = [titles, ("---",) * len(titles)]
    for kernels, figure, pattern, peers in _STANDINGS:
        path = ROOT / "docs" / "figures" / f"{figure}.json"
        ratios = []
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            times = {name: its.get("ms", its.get("us")) for name, its in cell["results"].items()}
            best = min((times[peer] for peer in peers if peer in times), default=None)
            if best is not None and re.search(pattern, cell["name"]):
                ratios.append(best / times["attnc"])
        shown = (_ratio(ratio, 1.0) for ratio in (min(ratios), geometric_mean(ratios), max(ratios)))
        rows.append((kernels, ", ".join(peers.values()), str(len(ratios)), *shown))
    return table(rows)


def forward_triton() -> str:
    """The forward benchmark of Triton's kernels: TFLOP/s, and ratios to what others compute."""
    return _beside_others("forward_h200")


def backward_triton() -> str:
    """The same of the gradients of q, k and v."""
    return _beside_others("backward_h200")


def _beside_others(figure: str) -> str:
    peers = {"cudnn": "cuDNN", "fa2": "FA2", "flex": "Flex"}
    return _beside(figure, peers, {name: f"to {title}" for name, title in peers.items()})


def forward_cuda() -> str:
    """The forward benchmark of the CUDA target: TFLOP/s, and attnc's ratio to FlashAttention-2."""
    peers = {"cudnn": "cuDNN", "fa2": "FA2", "flex": "Flex", "triton": "attnc on Triton"}
    return _beside("forward_cuda_h200", peers, {"fa2": "to FA2"})


def backward_cuda() -> str:
    """The same of the gradients of q, k and v, and of those that are the same bits in every run."""
    peers = {"fa2": "FA2", "two_pass": "`two_pass`"}
    return _beside("backward_cuda_h200", peers, {"fa2": "to FA2"}, {"two_pass": "`two_pass` to FA2"})


def forward_hopper() -> str:
    """The forward benchmark of the Hopper target beside cuDNN and FlashAttention, as far as it was there."""
    return _beside_flash("forward_hopper_h200")


def backward_hopper() -> str:
    """The same of the gradients of q, k and v."""
    return _beside_flash("backward_hopper_h200")


def backward_beside_fa4() -> str:
    """Gradients in a run in which FlashAttention-4 took part."""
    peers = {"cudnn": "cuDNN", "fa3": "FA3", "fa4": "FA4"}
    return _beside("backward_fa4_h200", peers, {name: f"to {title}" for name, title in peers.items()})


def deterministic_hopper() -> str:
    """Gradients that are the same bits in every run beside those of the table before, TFLOP/s."""
    path = ROOT / "docs" / "figures" / "backward_hopper_h200.json"
    kinds = {"ordered": "`ordered`", "two_pass": "`two_pass`"}
    titles = ("cell", "attnc", *kinds.values(), "the faster to attnc", "to cuDNN", "to FA3")
    rows: list[tuple[str, ...]] = [titles, ("---",) * len(titles)]
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        found = cell["results"]
        if measured := [name for name in kinds if name in found]:
            best = min(found[name]["ms"] for name in measured)
            shown, others = ("attnc", *kinds), ("attnc", "cudnn", "fa3")
            speeds = (f"{found[name]['tflops']:.0f}" if name in found else "n/a" for name in shown)
            ratios = (_ratio(found[name]["ms"], best) if name in found else "n/a" for name in others)
            rows.append((cell["name"], *speeds, *ratios))
    return table(rows)


def _beside_flash(figure: str) -> str:
    record = json.loads((ROOT / "docs" / "figures" / f"{figure}.json").read_text(encoding="utf-8"))
    measured = {name for cell in record["cells"] for name in cell["results"]}
    peers = {"cudnn": "cuDNN", "fa3": "FA3", "fa4": "FA4"}
    peers = {name: title for name, title in peers.items() if name in measured}
    to = {name: f"to {title}" for name, title in peers.items()}
    return _beside(figure, {**peers, "triton": "attnc on Triton"}, to)


def _beside(
    figure: str, peers: Mapping[str, str], to: Mapping[str, str], others: Mapping[str, str] | None = None
) -> str:
    """TFLOP/s of all, and ratios of speeds, rounded down.

    to: peers, and the titles of attnc's ratios to them; others: kernels of attnc among the peers, and the
    titles of their ratios to the first of `to`.
    """
    others = {} if others is None else others
    record = json.loads((ROOT / "docs" / "figures" / f"{figure}.json").read_text(encoding="utf-8"))
    is_flushed = any("flushed" in its for cell in record["cells"] for its in cell["results"].values())
    titles = ("cell", "ms", "attnc", *peers.values(), *to.values(), *others.values(), "of matmul")
    titles += ("flushed, to the best",) if is_flushed else ()
    rows: list[tuple[str, ...]] = [titles]
    rows.append(("---",) * len(rows[0]))
    for cell in record["cells"]:
        found = cell["results"]
        mine = found["attnc"]
        pairs = [*((peer, "attnc") for peer in to), *((next(iter(to)), name) for name in others)]
        ratios = [_ratio(found[a]["ms"], found[b]["ms"]) if a in found else "n/a" for a, b in pairs]
        figures = [f"{found[name]['tflops']:.0f}" if name in found else "n/a" for name in peers]
        share = f"{100 * mine['tflops'] / cell['matmul_tflops']:.0f} %"
        row = (cell["name"], f"{mine['ms']:.3f}", f"{mine['tflops']:.0f}", *figures, *ratios, share)
        rows.append((*row, _flushed(found, to)) if is_flushed else row)
    return table(rows)


def _flushed(found: Mapping[str, Any], to: Mapping[str, str]) -> str:
    """The ratio of single launches that find nothing in the L2 cache to those of the best peer."""
    best = min((found[peer]["flushed"]["ms"] for peer in to if peer in found), default=None)
    return "n/a" if best is None else _ratio(best, found["attnc"]["flushed"]["ms"])


def prefill_hopper() -> str:
    """Prompts in every form: TFLOP/s, and ratios to the dense kernel and to FlashAttention-3's same form."""
    record = json.loads((ROOT / "docs" / "figures" / "prefill_hopper_h200.json").read_text(encoding="utf-8"))
    rows: list[tuple[str, ...]] = [
        ("prompts", "keys", "us", "attnc", "FA3", "to attnc, dense", "to FA3"), ("---",) * 7
    ]  # fmt: skip
    for cell in record["cells"]:
        found = cell["results"]
        dense = found.get("attnc dense")
        for name in (name for name in found if name.startswith("attnc ")):
            form = name.removeprefix("attnc ")
            mine, theirs = found[name], found.get(f"fa3 {form}")
            rows.append(
                (
                    cell["name"],
                    form.replace("_", " "),
                    f"{mine['us']:.0f}",
                    f"{mine['tflops']:.0f}",
                    f"{theirs['tflops']:.0f}" if theirs else "n/a",
                    _ratio(dense["us"], mine["us"]) if dense else "n/a",
                    _ratio(theirs["us"], mine["us"]) if theirs else "n/a",
                )
            )
    return table(rows)


def _ratio(theirs: float, mine: float) -> str:
    """How many times as fast as theirs, rounded down."""
    return f"{floor(100 * (theirs / mine)) / 100:.2f}x"


def decode() -> str:
    """The decode benchmark: GB/s of K and V, ratios, and what eager calls cost the host."""
    record = json.loads((ROOT / "docs" / "figures" / "decode_h200.json").read_text(encoding="utf-8"))
    ours = {"attnc": "attnc", "paged": "page 16", "unified": "`unified_max`"}
    peers = {"cudnn": "cuDNN", "fa2": "FA2", "flex": "Flex"}
    names = (*ours, *peers)
    rows: list[tuple[str, ...]] = [
        ("cell", "us", *ours.values(), *peers.values(), "to the best", "pages to tensor")
    ]
    rows.append(("---",) * len(rows[0]))
    for cell in record["cells"]:
        found = cell["results"]
        mine = found["attnc"]["us"]
        speeds = [f"{found[name]['gb_s']:.0f}" if name in found else "n/a" for name in names]
        best = min(found[name]["us"] for name in peers if name in found)
        rows.append(
            (cell["name"], f"{mine:.1f}", *speeds, _ratio(best, mine), _ratio(mine, found["paged"]["us"]))
        )
    eager = [(title, f"{record['eager_us'][name]:.1f}") for name, title in {**ours, **peers}.items()]
    calls = table([("eager call of", "us of the host"), ("---",) * 2, *eager])
    return f"{table(rows)}\n{calls}"


def host(figure: str = "host_h200") -> str:
    """What calls cost the host, by target, beside PyTorch's."""
    record = json.loads((ROOT / "docs" / "figures" / f"{figure}.json").read_text(encoding="utf-8"))
    known = {"triton": "Triton", "cuda.sm_80": "`cuda.sm_80`", "cuda.sm_90a": "`cuda.sm_90a`"}
    timed = {whose for costs in record["us"].values() for whose in costs}
    others = ("functions of attnc", "PyTorch", "PyTorch's flash backend")
    titles = {
        whose: title for whose, title in (known | {who: who for who in others}).items() if whose in timed
    }
    rows: list[tuple[str, ...]] = [("call", *titles.values()), ("---",) * (1 + len(titles))]
    for what, costs in record["us"].items():
        rows.append((what, *(f"{costs[whose]:.1f}" if whose in costs else "" for whose in titles)))
    return table(rows)


#: Peers of `attnc bench --models` by name.
_MODEL_PEERS = {
    "cudnn": "cuDNN", "sdpa": "PyTorch", "fa3": "FA3", "fa3_vllm": "FA3 of vLLM", "fa4": "FA4",
    "flex": "Flex", "flashmla": "FlashMLA",
}  # fmt: skip


def models_summary(record: Mapping[str, Any] | None = None) -> str:
    """What calls as models make them come to, beside the best peer of each cell."""
    return "\n".join(summary_of_models((record or _models())["cells"])) + "\n"


def models(record: Mapping[str, Any] | None = None) -> str:
    """Calls as models make them: TFLOP/s, of drafts and single tokens GB/s, and who took part."""
    cells = (record or _models())["cells"]
    who = {name: title for name, title in _MODEL_PEERS.items() if any(name in x["results"] for x in cells)}
    ways = {MODEL_OURS: "attnc", DETERMINISTIC: "the same bits"}
    if any(ONE_TENSOR in x["results"] for x in cells):
        ways[ONE_TENSOR] = "one tensor"
    titles = ("call", "shape", "us", *ways.values(), *who.values(), "to the best", "flushed")
    rows: list[tuple[str, ...]] = [titles, ("---",) * len(titles)]
    for cell in cells:
        found = cell["results"]
        mine = found.get(MODEL_OURS)
        times = {name: its["ms"] for name, its in found.items() if name in who}
        flushed = {name: its["flushed"]["ms"] for name, its in found.items() if name in who}
        speeds = (
            f"{its.get('tflops', its.get('gbs')):.0f}{'*' * ('joined' in its)}"
            if (its := found.get(name))
            else ""
            for name in (*ways, *who)
        )
        ratios = ("", "")
        if mine and times:
            ratios = (
                _ratio(min(times.values()), mine["ms"]),
                _ratio(min(flushed.values()), mine["flushed"]["ms"]),
            )
        us = f"{1e3 * mine['ms']:.0f}" if mine else "n/a"
        rows.append((cell["name"], cell["shape"], us, *speeds, *ratios))
    return table(rows)


#: Columns of the table of lists: whom `attnc bench --lists` has timed.
_LIST_COLUMNS = {"attnc": "attnc", "added": "added in any order", "triton": "Triton"}
_LIST_COLUMNS |= {"flex": "FlexAttention", "nsa": "parallel_nsa", "flashmla": "FlashMLA", "fa4": "FA4"}
_OURS_OF_LISTS = ("attnc", "added", "triton")


def lists(record: Mapping[str, Any] | None = None) -> str:
    """Attention over lists: TFLOP/s of what lists name, beside the rate over all keys, and who took part."""
    path = ROOT / "docs" / "figures" / "lists_h200.json"
    cells = (record or json.loads(path.read_text(encoding="utf-8")))["cells"]
    who = {name: title for name, title in _LIST_COLUMNS.items() if any(name in x["results"] for x in cells)}
    titles = ("lists", "us", *who.values(), "of all keys' rate", "to the best")
    rows: list[tuple[str, ...]] = [titles, ("---",) * len(titles)]
    for cell in cells:
        found, share = cell["results"], cell["of_dense_rate"]
        mine = found["attnc"]["ms"]
        times = [found[name]["ms"] for name in who if name in found and name not in _OURS_OF_LISTS]
        speeds = (f"{found[name]['tflops']:.0f}" if name in found else "" for name in who)
        ratio = _ratio(min(times), mine) if times else ""
        rows.append(
            (cell["name"], f"{1e3 * mine:.0f}", *speeds, "" if share is None else f"{share:.2f}", ratio)
        )
    return table(rows)


def odd_summary() -> str:
    """What calls at odd sizes come to, beside the best peer of each cell."""
    return models_summary(_models("odd_h200"))


def odd_behind() -> str:
    """The calls at odd sizes that a peer is faster at, warm or after a flush of the L2 cache."""
    return models({"cells": [cell for cell in _models("odd_h200")["cells"] if _is_behind(cell)]})


def _is_behind(cell: Mapping[str, Any]) -> bool:
    found = {name: (its["ms"], its["flushed"]["ms"]) for name, its in cell["results"].items()}
    others = [times for name, times in found.items() if name in _MODEL_PEERS]
    if MODEL_OURS not in found or not others:
        return False
    return any(min(best) < mine for *best, mine in zip(*others, found[MODEL_OURS], strict=True))


def _models(name: str = "models_h200") -> Mapping[str, Any]:
    path = ROOT / "docs" / "figures" / f"{name}.json"
    record: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def serving() -> str:
    """The further cells of the decode benchmark: speed, share of the roofline, and how the others compare."""
    record = json.loads((ROOT / "docs" / "figures" / "decode_h200.json").read_text(encoding="utf-8"))
    titles = {
        "cudnn": "cuDNN", "fa2": "FA2", "triton": "Triton", "plain": "paged decode",
        "products": "two products and a softmax", "bare": "two products",
    }  # fmt: skip
    head = ("cell", "us", "GB/s", "TFLOP/s", "of roofline", "others: us, times as long")
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for cell in record.get("serving", ()):
        found = dict(cell["results"])
        mine = found.pop("cascade" if "cascade" in found else "attnc")["us"]
        others = (f"{titles[name]} {its['us']:.1f}, {_ratio(its['us'], mine)}" for name, its in found.items())
        rows.append(
            (
                cell["name"],
                f"{mine:.1f}",
                f"{cell['bytes'] / mine * 1e-3:.0f}",
                f"{cell['flops'] / mine * 1e-6:.0f}",
                f"{100 * cell['roofline_us'] / mine:.0f} %",
                "; ".join(others) or "n/a",
            )
        )
    return table(rows)


def decode_cuda() -> str:
    """Decoding on both targets, from a tensor and from pages of three sizes: GB/s of K and V, and ratios."""
    record = json.loads((ROOT / "docs" / "figures" / "decode_cuda_h200.json").read_text(encoding="utf-8"))
    storages = {
        "attnc": "tensor",
        "paged": "page 16",
        "page_8": "page 8",
        "page_4": "page 4",
        "unified": "`unified_max`",
    }
    further = ("cuDNN", "CUDA to Triton", "CUDA to cuDNN", "page 4 to page 16")
    rows: list[tuple[str, ...]] = [("cell", *storages.values(), *further)]
    rows.append(("---",) * len(rows[0]))
    for cell in record["cells"]:
        found = cell["results"]
        of_both = {name: (found[f"triton_{name}"], found[name]) for name in storages}
        speeds = [f"{triton['gb_s']:.0f} / {cuda['gb_s']:.0f}" for triton, cuda in of_both.values()]
        ratios = [_ratio(*(made["us"] for made in of_both[name])) for name in ("attnc", "paged")]
        both = zip(of_both["paged"], of_both["page_4"], strict=True)
        smaller = [_ratio(of_16["us"], of_4["us"]) for of_16, of_4 in both]
        peer = found["cudnn"]
        ahead = _ratio(peer["us"], found["attnc"]["us"])
        shown = (f"{peer['gb_s']:.0f}", " / ".join(ratios), ahead, " / ".join(smaller))
        rows.append((cell["name"], *speeds, *shown))
    return table(rows)


def decode_hopper() -> str:
    """Decoding on Hopper, of a tensor and of pages, beside the Triton kernels of the same specs and cuDNN."""
    record = json.loads((ROOT / "docs" / "figures" / "decode_hopper_h200.json").read_text(encoding="utf-8"))
    head = ("cell", "us", "GB/s", "Triton, us", "to Triton", "cuDNN, us", "to cuDNN")
    rows: list[tuple[str, ...]] = [(*head, "page 16, us", "Triton, us", "to Triton"), ("---",) * 10]
    for cell in record["cells"]:
        found = {name: its["us"] for name, its in cell["results"].items()}
        mine, paged = found["attnc"], found["paged"]
        shown = [cell["name"], f"{mine:.1f}", f"{cell['bytes'] / mine * 1e-3:.0f}"]
        for name, ours in (("triton_attnc", mine), ("cudnn", mine), ("", paged), ("triton_paged", paged)):
            theirs = found.get(name)
            beside = ("n/a", "n/a") if theirs is None else (f"{theirs:.1f}", _ratio(theirs, ours))
            shown += beside if name else (f"{ours:.1f}",)
        rows.append(tuple(shown))
    return table(rows)


def latent_hopper() -> str:
    """Latent attention and drafts on Hopper, beside Triton and two matrix products of cuBLAS."""
    record = json.loads((ROOT / "docs" / "figures" / "decode_hopper_h200.json").read_text(encoding="utf-8"))
    head = ("cell", "us", "TFLOP/s", "of roofline", "Triton, us", "to Triton", "two products, us", "to these")
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for cell in record["serving"]:
        found = {name: its["us"] for name, its in cell["results"].items()}
        if "attnc" not in found:
            continue
        mine = found["attnc"]
        shown = [cell["name"], f"{mine:.1f}", f"{cell['flops'] / mine * 1e-6:.0f}"]
        shown.append(f"{100 * cell['roofline_us'] / mine:.0f} %")
        for name in ("triton", "bare"):
            theirs = found.get(name)
            shown += ("n/a", "n/a") if theirs is None else (f"{theirs:.1f}", _ratio(theirs, mine))
        rows.append(tuple(shown))
    return table(rows)


def f32() -> str:
    """Single precision: TFLOP/s of both targets and of PyTorch, and ratios to its memory-efficient kernel."""
    names = {
        "attnc": "CUDA",
        "two_pass": "CUDA, `two_pass`",
        "triton": "Triton",
        "efficient": "memory-efficient",
        "eager": "PyTorch math",
    }
    rows: list[tuple[str, ...]] = [("cell", *names.values(), "CUDA to it", "Triton to it")]
    rows.append(("---",) * len(rows[0]))
    for phase in ("forward", "backward"):
        path = ROOT / "docs" / "figures" / f"f32_{phase}_h200.json"
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            found = cell["results"]
            speeds = (f"{found[name]['tflops']:.1f}" if name in found else "" for name in names)
            ratios = (_ratio(found["efficient"]["ms"], found[name]["ms"]) for name in ("attnc", "triton"))
            rows.append((f"{phase} {cell['name']}", *speeds, *ratios))
    return table(rows)


def schedules() -> str:
    """Microseconds of each schedule of an attention, what the committed table takes in bold; and how much
    longer than the fastest each takes, and what the table takes, where that is most.
    """
    record = json.loads((ROOT / "docs" / "figures" / "schedules_h200.json").read_text(encoding="utf-8"))
    path = ROOT / "specs" / "tuned" / "extend.dispatch.json"
    tables = load_tables(Source(str(path), path.read_text(encoding="utf-8")))
    measured = (record["device"], record["toolchain"])
    (chosen,) = (found for found in tables if (found.device, found.toolchain) == measured)
    cells: dict[int, dict[tuple[int, int], str]] = {}
    worst: dict[str, tuple[float, str]] = {}
    for point in record["points"]:
        M, N, B, times = point["M"], point["N"], point["B"], point["microseconds"]
        taken = choice(chosen.rows, M, N, B * point["heads"])["schedule"]
        shown = ((f"**{time:.1f}**" if label == taken else f"{time:.1f}") for label, time in times.items())
        cells.setdefault(M, {})[B, N] = " / ".join(shown)
        place = f"M = {M}, N = {N}, B = {B}"
        for name, label in {**{f"`{label}`": label for label in times}, "the table": taken}.items():
            worst[name] = max(worst.get(name, (0.0, "")), (times[label] / min(times.values()), place))
    columns = sorted({column for row in cells.values() for column in row})
    grid = [("M", *(f"B{B} N{N}" for B, N in columns)), ("---",) * (1 + len(columns))]
    grid += [(str(M), *(row.get(column, "-") for column in columns)) for M, row in sorted(cells.items())]
    longest = [("for all sizes", "times the fastest, at most", "at"), ("---",) * 3]
    longest += [(name, f"{ceil(100 * times) / 100:.2f}x", place) for name, (times, place) in worst.items()]
    return f"{table(grid)}\n{table(longest)}"


def ranks(kernels: str) -> str:
    """One GPU and several that run these kernels, once that has been measured."""
    path = ROOT / "docs" / "figures" / f"ranks_{kernels}.json"
    if not path.exists():
        return "Not measured yet.\n"
    return ranks_report.markdown(json.loads(path.read_text(encoding="utf-8")))
