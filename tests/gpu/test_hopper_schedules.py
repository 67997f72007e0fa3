"""Schedules for Hopper that no committed module has, judged on the GPU as `attnc verify` judges modules:
clusters, ping-pong, pages of any size, values that are columns of the keys, slopes that read the product, and
rows of a multiple of 8 columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.verify.judging import spec, subject_of_text, verify

TARGET = "cuda.sm_90a"
LAZY = "softmax = online(maximum = lazy(20)), order = longest_first"
EAGER = "softmax = online"
#: Cases of each.
CASES = 16


@pytest.fixture(autouse=True)
def hopper(device: torch.device) -> None:
    """Skips what no other GPU runs."""
    pytest.importorskip("cupy", reason="CUDA kernels are launched through CuPy")
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


def prompts(
    d: int, mask: str, score: str = "", *, dv: int = 0, values: str = "", grads: bool = False
) -> list[str]:
    """Queries of whole prompts. dv: columns of values, 0: as many; values: the storage of v, if it has
    one.
    """
    dv = dv or d
    return [
        f"input q: bf16[B, M, Hkv * G, {d}]",
        f"input k: bf16[B, N, Hkv, {d}]",
        f"input v: bf16[B, N, Hkv, {dv}]{values}",
        f"score = {score or f'dot(q, k) / sqrt({d})'}",
        f"mask = {mask}",
        "normalize = softmax",
        f"output o: bf16[B, M, Hkv * G, {dv}]",
        *(["grad q, k, v"] if grads else []),
    ]


def pages(page: int, d: int, *, dv: int = 0) -> list[str]:
    """Tokens whose keys lie in pages. dv: of values that are columns of the keys, 0: they have pages too."""
    values = "prefix(k)" if dv else f"paged(table, page = {page})"
    heads, kv_heads = ("H", "1") if dv else ("Hkv * G", "Hkv")
    return [
        f"input q: bf16[B, M, {heads}, {d}]",
        f"input k: bf16[B, N, {kv_heads}, {d}] via paged(table, page = {page})",
        f"input v: bf16[B, N, {kv_heads}, {dv or d}] via {values}",
        "input table: i32[B, P]",
        "input lens: i32[B]",
        "length N = lens[b]",
        f"score = dot(q, k) / sqrt({d})",
        "mask = window(700, 0)",
        "normalize = softmax",
        f"output o: bf16[B, M, {heads}, {dv or d}]",
    ]


def texts() -> Iterator[tuple[str, str]]:
    """Yields names and specs."""
    for d in (64, 128, 256):
        for mask in ("true", "causal", "window(300, 40)"):
            for knobs in ("cluster = 2", "pingpong = true", "cluster = 2, pingpong = true, overlap = false"):
                name = f"d{d} {mask}, {knobs}"
                yield name, spec(prompts(d, mask), f"{LAZY}, {knobs}", target=TARGET)
    yield "eager cluster", spec(prompts(128, "causal"), f"{EAGER}, cluster = 2", target=TARGET)
    for page in (1, 4, 12, 20):
        for d in (64, 128, 256):
            yield f"prompts d{d}, pages of {page}", spec(pages(page, d), LAZY, target=TARGET)
            yield (
                f"decoding d{d}, pages of {page}",
                spec(pages(page, d), "loops = [kv], pack = gqa, split.kv = auto", target=TARGET),
            )
        latent = pages(page, 576, dv=512)
        yield (
            f"latent, pages of {page}",
            spec(latent, "loops = [kv], pack = gqa, split.kv = auto", target=TARGET),
        )
    yield "prompts past short sequences", spec(pages(16, 128), LAZY, target=TARGET)
    for d in (64, 128, 256):
        yield f"prefix d{d}", spec(prompts(d, "causal", values=" via prefix(k)"), LAZY, target=TARGET)
    for d in (64, 192):
        for way in ("two_pass", "ordered", "atomic")[: 3 if d == 64 else 1]:
            for score in (
                "min(dot(q, k), 0)",
                "abs(dot(q, k)) / 4",
                "where(dot(q, k) > 0, 2, 1) * dot(q, k)",
            ):
                lines = prompts(d, "causal", score, grads=True)
                knobs = f"{LAZY}\n  backward {{ accumulate.dq = {way} }}"
                yield f"{score}, d{d} {way}", spec(lines, knobs, target=TARGET)


def padded() -> Iterator[tuple[str, str]]:
    """Yields those of rows that are narrower than products."""
    decode = "loops = [kv], pack = gqa, split.kv = auto"
    for d, dv in ((8, 8), (40, 40), (72, 72), (72, 64), (64, 72), (136, 136), (192, 136), (248, 248)):
        for way in ("two_pass", "ordered", "atomic")[: 3 if d >= dv and d <= 128 else 1]:
            knobs = f"{LAZY}\n  backward {{ accumulate.dq = {way} }}"
            yield f"d{d} dv{dv} {way}", spec(prompts(d, "causal", dv=dv, grads=True), knobs, target=TARGET)
    for d in (72, 136):
        *lines, _ = prompts(d, "causal", grads=True)
        yield f"d{d} f32", spec([*lines, "grad q", "grad k, v: f32"], LAZY, target=TARGET)
    for d in (40, 72, 136):
        for knobs in ("cluster = 2", "pingpong = true, overlap = false"):
            yield f"d{d} {knobs}", spec(prompts(d, "causal"), f"{LAZY}, {knobs}", target=TARGET)
        for page in (4, 16):
            yield f"prompts d{d}, pages of {page}", spec(pages(page, d), LAZY, target=TARGET)
            yield f"decoding d{d}, pages of {page}", spec(pages(page, d), decode, target=TARGET)
    alibi = [
        "input slope: f32[Hkv * G]",
        *prompts(72, "causal", "dot(q, k) / 8 - slope[h] * (q_pos - kv_idx)"),
    ]
    yield "d72 alibi", spec(alibi, LAZY, target=TARGET)
    yield "prefix d72", spec(prompts(72, "causal", dv=40, values=" via prefix(k)"), LAZY, target=TARGET)
    for consumers in (2, 3):  # o leaves through q, and from registers
        knobs = f"{LAZY}, consumers = {consumers}, tile.kv = 64, stages = 2"
        yield f"d136 {consumers} consumers", spec(prompts(136, "causal"), knobs, target=TARGET)
    for d, dv in ((264, 256), (520, 512), (528, 512), (568, 512), (584, 512)):  # 8 to 72 columns in no value
        for page in (1, 64):
            text = spec(pages(page, d, dv=dv), f"{decode}, consumers = 2", target=TARGET)
            yield f"latent d{d}, pages of {page}", text
    for page in (4, 64):
        yield f"latent d72 dv40, pages of {page}", spec(pages(page, 72, dv=40), decode, target=TARGET)
    lines = [
        "input q, k: bf16[T, H, 72] via ragged(cu)",
        "input v: bf16[T, H, 40] via ragged(cu)",
        "input cu: i32[B + 1]",
        "score = dot(q, k) / 8",
        "mask = causal",
        "normalize = softmax",
        "output o: bf16[T, H, 40]",
        "grad q, k, v",
    ]
    yield "packed d72 dv40", spec(lines, LAZY, target=TARGET)


TEXTS = dict([*texts(), *padded()])


@pytest.mark.parametrize("name", TEXTS)
def test_it_obeys_its_bound(name: str) -> None:
    report = verify(subject_of_text(TEXTS[name]), count=CASES)
    assert report.ok, [failure.verdict.message for failure in report.failures]
    assert report.examples >= CASES
