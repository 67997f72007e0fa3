"""The backward of the Hopper target: compiled by NVRTC, and run on the CPU in any order of warps."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnc.plan.ir import Module
from attnc.plan.sm90.backward import CONSUMERS, Sm90Backward
from attnc.plan.sm90.layout import entry_registers
from attnc.runtime.cubin import disassemble
from attnc.runtime.loader import load_module, program_of
from attnc.runtime.nvrtc import compile_cubin
from attnc.target.files import render_files
from attnc.verify.case import Case
from attnc.verify.check import check
from attnc.verify.simt import SimtFault, attach, available
from attnc.verify.subject import subject_of
from tests.by_day import each_by_day, some_by_day
from tests.plan.test_sm90_backward import CAUSAL, planned
from tests.sass import loops, staying
from tests.target.test_defined_names import HOPPERS
from tests.verify.judging import modules_of, spec

#: Bytes of what a thread that copies keeps in local memory, with 24 registers. That none that multiplies
#: spills in its loop was seen in the machine code; more than this would be one that does.
SPILLED_BY_COPIES = 96
KERNEL = "under_test_backward_"
#: What is said of a missing wait, and of tiles that two use at a time, in one order of warps or another.
EARLY, RACE = "not arrived|deadlock", "may still read|without a barrier|is under way"


def compiled(kernel: str, mask: str, *, parts: bool = False, **options: Any) -> Any:
    program = program_of(load_module(planned(mask, **options)))
    _, source, configs = program.kernels[KERNEL + kernel]
    config = next(config for config in configs if (config.parts > 1) is parts)
    assert source.endswith(f"_backward_{kernel}.cu")
    return compile_cubin(program.source(KERNEL + kernel), program.options(config, True, "sm_90"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("d", range(8, 129, 8))
def test_rows_of_rounded_dq_lie_in_different_banks(d: int) -> None:
    """A warp stores pairs of 8 rows and 8 columns at once, 4 bytes each; chunks of 16 bytes leave."""
    files = render_files(planned(d=d), path="a.attn", sha256="")
    found = re.search(r"constexpr int PITCH = D \+ (\d+);", files["default_backward_finish.cu"])
    assert found is not None
    pitch = d + int(found[1])
    assert len({(row * pitch // 2 + pair) % 32 for row in range(8) for pair in range(4)}) == 32
    assert 2 * pitch % 16 == 0
    assert f'"shared": "{2 * pitch} * config.BLOCK_M"' in files["default.py"]


@pytest.mark.one_in(6)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "d", "accumulate"),
    some_by_day(["true", CAUSAL], [40, 64, 72, 96, 128], ["atomic", "ordered", "two_pass"], of=5),
)
def test_products_are_not_serialised(mask: str, d: int, accumulate: str) -> None:
    """ptxas says so by C75xx alone, and the kernel is a fifth slower."""
    cubin = compiled("dkdv", mask, d=d, accumulate=accumulate)
    assert cubin.warnings == ()
    assert cubin.registers == entry_registers(CONSUMERS)
    assert cubin.spills <= SPILLED_BY_COPIES


@pytest.mark.nightly
@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "accumulate"),
    each_by_day(
        [(64, "atomic"), (128, "atomic"), (128, "ordered"), (128, "two_pass"), (256, "two_pass")], of=2
    ),
)
def test_products_of_parts_are_not_serialised(d: int, accumulate: str) -> None:
    cubin = compiled("dkdv", CAUSAL, d=d, accumulate=accumulate, parts=True)
    assert cubin.warnings == ()
    assert cubin.registers == entry_registers(CONSUMERS)
    assert cubin.spills <= SPILLED_BY_COPIES


@pytest.mark.nightly
@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize(("mask", "d"), some_by_day(["true", CAUSAL], [64, 72, 128, 136, 192, 256], of=3))
def test_products_of_dq_are_not_serialised(mask: str, d: int) -> None:
    cubin = compiled("dq", mask, d=d, accumulate="two_pass")
    assert cubin.warnings == ()
    assert cubin.registers == entry_registers(CONSUMERS)
    assert cubin.spills <= SPILLED_BY_COPIES
    text = disassemble(cubin.image)
    if text is not None:
        assert [loop.local for loop in loops(text)] == [0]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize(
    ("d", "dv", "accumulate"),
    [
        *((d, d, way) for d in (72, 88, 96) for way in ("atomic", "ordered", "two_pass")),
        *((d, dv, "two_pass") for d in (64, 72, 96, 112, 128) for dv in (64, 72, 96, 112, 128)),
        *((d, dv, "two_pass") for d, dv in ((136, 136), (192, 128), (192, 192))),
    ],
)
def test_rows_that_are_held_stay(d: int, dv: int, accumulate: str, parts: bool) -> None:
    """ptxas may give their registers to another matrix in the loop, as where d is 64 and dv is more."""
    cubin = compiled("dkdv", CAUSAL, d=d, dv=dv, accumulate=accumulate, parts=parts)
    assert cubin.warnings == ()
    text = disassemble(cubin.image)
    if text is None:
        pytest.skip("nvdisasm reads the machine code")
    assert staying(text, is_lost=True) == ()


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("mask", [CAUSAL, "true"])
def test_exponentials_do_not_wait_for_dp(mask: str) -> None:
    """Nor is delta subtracted behind that wait: dp begins at -delta, in front of both products."""
    cubin = compiled("dkdv", mask, d=128, accumulate="atomic")
    assert cubin.warnings == ()
    text = disassemble(cubin.image)
    if text is None:
        pytest.skip("nvdisasm reads the machine code")
    (loop,) = (loop for loop in loops(text) if loop.exponentials)
    assert (loop.exponentials, loop.hidden, loop.local) == (32, 32, 0)
    assert loop.sums <= 16


@pytest.mark.nightly
@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(("mask", "d"), some_by_day(["true", CAUSAL], [136, 144, 192, 256], of=4))
def test_warpgroups_of_wide_heads_have_a_loop_each(mask: str, d: int) -> None:
    """One with the exponentials, one with none; each multiplies twice, d columns deep and 64 queries."""
    cubin = compiled("dkdv", mask, d=d, accumulate="two_pass")
    assert cubin.warnings == ()
    assert cubin.registers == entry_registers(CONSUMERS)
    assert cubin.spills <= SPILLED_BY_COPIES
    text = disassemble(cubin.image)
    if text is None:
        pytest.skip("nvdisasm reads the machine code")
    found = [(loop.products, loop.exponentials, loop.local) for loop in loops(text)]
    products = -(-d // 16) + 4
    assert sorted(found) == [(products, 0, 0), (products, 32, 0)]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a module run on the CPU, its kernel after a change; undone, for equal modules are one."""

    def load(module: Module, kernel: str = "preprocess", change: Callable[[str], str] = str) -> Any:
        host: Any = load_module(module)
        of_all = host.CALL.program.source
        for name in ("launch_type", "gpu_of", "tensor_map"):
            monkeypatch.setattr(host.CALL, name, getattr(host.CALL, name))
        changed = {KERNEL + kernel: change(of_all(KERNEL + kernel))}
        monkeypatch.setattr(host.CALL.program, "source", lambda name: changed.get(name) or of_all(name))
        attach(host)
        return host

    return load


def gradients(
    host: Any, shape: tuple[int, int, int, int], d: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """dq, dk and dv of a causal attention by its kernels, and by float64. shape: B, H, M, N."""
    b, h, m, n = shape
    torch.manual_seed(m + n)
    q, do = (torch.randn(b, h, m, d).bfloat16() for _ in range(2))
    k, v = (torch.randn(b, h, n, d).bfloat16() for _ in range(2))
    given = [x.requires_grad_() for x in (q, k, v)]
    o, _ = host.under_test(*given)
    found = torch.autograd.grad(o, given, do)
    exact = [x.detach().double().requires_grad_() for x in given]
    seen = torch.arange(n)[None] <= torch.arange(m)[:, None] + n - m
    scores = exact[0] @ exact[1].mT / math.sqrt(d)
    p = torch.softmax(scores.masked_fill(~seen, -math.inf), -1).nan_to_num(0)
    return list(found), list(torch.autograd.grad(p @ exact[2], exact, do.double()))


@pytest.mark.one_in(8)
@pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")
@pytest.mark.parametrize(
    ("d", "accumulate"),
    [
        (64, "atomic"),
        (64, "ordered"),
        (80, "atomic"),
        pytest.param(40, "atomic", marks=pytest.mark.slow),
        pytest.param(40, "ordered", marks=pytest.mark.slow),
        pytest.param(72, "ordered", marks=pytest.mark.slow),
        pytest.param(128, "atomic", marks=pytest.mark.slow),
        pytest.param(128, "ordered", marks=pytest.mark.nightly),
        pytest.param(64, "two_pass", marks=pytest.mark.slow),
        pytest.param(128, "two_pass", marks=pytest.mark.nightly),
        pytest.param(256, "two_pass", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_right_whatever_warps_are_first(
    d: int, accumulate: str, on_cpu: Callable[..., Any]
) -> None:
    host = on_cpu(planned(CAUSAL, d=d, accumulate=accumulate))
    for shape in ((1, 2, 100, 200), (1, 1, 150, 40)):
        for found, wanted in zip(*gradients(host, shape, d), strict=True):
            assert torch.linalg.vector_norm(found.double() - wanted) < 6e-3 * torch.linalg.vector_norm(wanted)


@pytest.mark.one_in(3)
@pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")
@pytest.mark.parametrize(
    ("kernel", "right", "wrong", "said"),
    [
        ("dkdv", r"(left_ds\[m\]\[3\]\);\n\s+)proxy_fence\(\);", r"\1", "without a fence.proxy.async"),
        ("dkdv", r"mbarrier_wait\(barrier_of\(base, DS_FULL[^;]*;", "", RACE),
        (
            "dkdv",
            r"(mbarrier_wait\(barrier_of\(base, DO_FULL, q\.index\)), q\.phase",
            r"\1, q.phase ^ 1",
            EARLY,
        ),
        ("dkdv", r"DS_EMPTY, i\), 4 \* CONSUMERS", "DS_EMPTY, i), 4 * CONSUMERS - 1", RACE),
        ("dq", r"mbarrier_wait\(barrier_of\(base, V_FULL, v\.index\), v\.phase\);", "", EARLY),
        ("dq", r"\bK_EMPTY, i\), 4 \* CONSUMERS", "K_EMPTY, i), 4 * CONSUMERS - 1", RACE),
        ("dq", r"(PipelineState<STAGES> k = \{0, )0\}", r"\g<1>1}", f"{EARLY}|{RACE}"),
        ("dq", r"Q_EMPTY, q\.index\), last &&", "Q_EMPTY, q.index),", EARLY),
        ("dq", r"(DO_FULL, q\.index\)), q\.phase\);\n", r"\1, q.phase ^ 1);\n", EARLY),
    ],
)
def test_a_mistake_in_it_is_found(
    kernel: str, right: str, wrong: str, said: str, on_cpu: Callable[..., Any]
) -> None:
    def change(source: str) -> str:
        changed, count = re.subn(right, wrong, source)
        assert count == 1
        return changed

    accumulate = "two_pass" if kernel == "dq" else "atomic"
    host = on_cpu(planned(CAUSAL, accumulate=accumulate), kernel, change)
    with pytest.raises(SimtFault, match=said):
        gradients(host, (1, 2, 400, 300), 64)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")
@pytest.mark.parametrize(
    ("accumulate", "kernel", "right", "wrong"),
    [
        ("atomic", "dkdv", r"DQ_PANEL = 64 \* 64", "DQ_PANEL = 64 * 60"),
        ("atomic", "finish", r"warp < 4 \? 8 : 2", "warp < 4 ? 8 : 1"),
        ("ordered", "dkdv", r"w < 4 \? 64 : 16", "w < 4 ? 64 : 8"),
    ],
)
def test_a_share_of_dq_that_is_not_the_columns_left_is_found(
    accumulate: str, kernel: str, right: str, wrong: str, on_cpu: Callable[..., Any]
) -> None:
    def change(source: str) -> str:
        changed, count = re.subn(right, wrong, source)
        assert count == 1
        return changed

    host = on_cpu(planned(CAUSAL, d=80, accumulate=accumulate), kernel, change)
    (dq, *_), (wanted, *_) = gradients(host, (1, 2, 100, 200), 80)
    far = torch.linalg.vector_norm(dq.double() - wanted) / torch.linalg.vector_norm(wanted)
    assert not far < 6e-3


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated holds NaN, not the zeros that a new page has."""
    empty_strided = torch.empty_strided
    monkeypatch.setattr(
        torch, "empty_strided", lambda *a, **options: empty_strided(*a, **options).fill_(math.nan)
    )


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")
@pytest.mark.parametrize("accumulate", ["atomic", "ordered", "two_pass"])
def test_heads_of_every_section_have_their_gradients(accumulate: str, on_cpu: Callable[..., Any]) -> None:
    """Of 32 heads a cache so small holds few: there are several sections, and a larger one last."""
    host = on_cpu(planned(CAUSAL, accumulate=accumulate))
    for found, wanted in zip(*gradients(host, (2, 16, 30, 40), 64), strict=True):
        assert torch.linalg.vector_norm(found.double() - wanted) < 6e-3 * torch.linalg.vector_norm(wanted)


#: Sequences whose rows follow each other, and ones that a length shortens: neither ends where a tensor does.
ENDS = {
    "packed": (
        "input q: bf16[T, Hkv * G, 32] via ragged(cu_q)",
        "input k, v: bf16[S, Hkv, 32] via ragged(cu_k)",
        "input cu_q, cu_k: i32[B + 1]",
        "output o: bf16[T, Hkv * G, 32]",
        "output lse: f32[T, Hkv * G]",
    ),
    "shortened": (
        "input q: bf16[B, M, H, 32]",
        "input k, v: bf16[B, N, H, 32]",
        "input lens: i32[B]",
        "length N = lens[b]",
        "output o: bf16[B, M, H, 32]",
        "output lse: f32[B, H, M]",
    ),
}


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")
@pytest.mark.parametrize(
    ("ends", "accumulate", "d"),
    [
        ("packed", "two_pass", 32),
        pytest.param("packed", "ordered", 32, marks=pytest.mark.nightly),
        ("packed", "atomic", 128),
        pytest.param("packed", "two_pass", 144, marks=pytest.mark.nightly),
        pytest.param("shortened", "two_pass", 32, marks=pytest.mark.nightly),
        ("shortened", "two_pass", 144),
        pytest.param("shortened", "atomic", 32, marks=pytest.mark.nightly),
        ("shortened", "ordered", 32),
    ],
)
def test_rows_of_other_sequences_are_kept_out(ends: str, accumulate: str, d: int) -> None:
    """They are NaN where nobody may read them, and gradients of theirs stay as they were."""
    lines = [line.replace(", 32]", f", {d}]") for line in ENDS[ends]]
    inputs = [line for line in lines if not line.startswith("output")]
    middle = ["score = dot(q, k) / sqrt(32)", "mask = causal", "normalize = softmax"]
    outputs = [line for line in lines if line.startswith("output")]
    schedule = f"tile.kv = 32\n  backward {{ accumulate.dq = {accumulate} }}"
    text = spec([*inputs, *middle, *outputs, "grad q, k, v"], schedule, target="cuda.sm_90a")
    (module,) = modules_of(text)
    assert module.backward is not None
    layout = module.backward.layout
    assert isinstance(layout, Sm90Backward)
    assert layout.by_wgmma == {"dkdv", *(("dq",) if accumulate == "two_pass" else ())}
    sizes = {"Hkv": 1, "G": 2} if ends == "packed" else {"H": 2}
    sequences = 3 if ends == "packed" else 1
    for m, n in ((150, 200), (70, 33)):
        case = Case(dims={"B": sequences, "M": m, "N": n, **sizes}, lengths="drawn", seed=m)
        found = check(subject_of(module), case)
        assert found.ok, found.message


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")
@pytest.mark.parametrize(
    ("capped", "widths"), some_by_day([True, False], [(192, 64, 0), (32, 144, 3 * 2048)], of=2)
)
def test_keys_and_values_have_widths_of_their_own(capped: bool, widths: tuple[int, int, int]) -> None:
    """dv leaves through rows of k where they are as wide; and a tile that nobody sees is left as zeros."""
    d, dv, staged = widths
    lines = [
        f"input q: bf16[B, M, H, {d}]",
        f"input k: bf16[B, N, H, {d}]",
        f"input v: bf16[B, N, H, {dv}]",
        "score = softcap(dot(q, k) / 8, 20)" if capped else "score = dot(q, k) / 8",
        "mask = causal and kv_idx >= 150",
        "normalize = softmax",
        f"output o: bf16[B, M, H, {dv}]",
        "output lse: f32[B, H, M]",
        "grad q, k, v",
    ]
    (module,) = modules_of(spec(lines, "backward { accumulate.dq = two_pass }", target="cuda.sm_90a"))
    assert module.backward is not None
    layout = module.backward.layout
    assert isinstance(layout, Sm90Backward)
    assert layout.by_wgmma == {"dq", *(("dv", "dk") if capped else ("dkdv",))}
    assert layout.staged("dv") == staged
    found = check(subject_of(module), Case(dims={"B": 1, "M": 130, "N": 300, "H": 1}))
    assert found.ok, found.message


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="g++ compiles the kernels for the CPU")
@pytest.mark.parametrize(
    ("accumulate", "d"),
    each_by_day([("atomic", 80), ("ordered", 80), ("two_pass", 144), ("two_pass", 80)], of=2),
)
def test_lanes_share_what_a_mask_asks_of_columns(accumulate: str, d: int) -> None:
    """Of 96 keys, which three loads of a lane are, and of queries; some lie outside of the sequence."""
    lines = [
        f"input q: bf16[B, M, H, {d}]",
        f"input k, v: bf16[B, N, H, {d}]",
        "input doc: i32[B, N] is sorted",
        "score = dot(q, k) / 9",
        "mask = causal and doc[b, q_pos] == doc[b, kv_idx]",
        "normalize = softmax",
        f"output o: bf16[B, M, H, {d}]",
        "output lse: f32[B, H, M]",
        "grad q, k, v",
    ]
    schedule = f"backward {{ accumulate.dq = {accumulate} }}"
    (module,) = modules_of(spec(lines, schedule, target="cuda.sm_90a"))
    text = render_files(module, path="a.attn", sha256="")["default_backward_dkdv.cu"]
    assert "doc_q_of[i] = " in text
    for m, n in ((130, 200), (270, 263)):
        found = check(subject_of(module), Case(dims={"B": 1, "M": m, "N": n, "H": 1}))
        assert found.ok, found.message


@pytest.mark.nightly
@pytest.mark.one_in(6)
@pytest.mark.slow
@pytest.mark.parametrize("name", each_by_day(HOPPERS, of=2))
def test_who_finds_tiles_computes_all_that_bounds_are_made_from(name: str) -> None:
    """Nothing else, and who copies nothing of it: the compiler remarks on what is not read."""
    lines = [
        "input q: bf16[B, M, H, 16]",
        "input k, v: bf16[B, N, H, 16]",
        "score = dot(q, k)",
        "normalize = softmax",
        "output o: bf16[B, M, H, 16]",
        *{"grad q, k, v": None, **dict.fromkeys(HOPPERS[name])},
    ]
    schedule = "tile.kv = 32\n  backward { accumulate.dq = two_pass }"
    (module,) = modules_of(spec(lines, schedule, target="cuda.sm_90a"))
    program = program_of(load_module(module))
    for kernel in ("spec_backward_dq", "spec_backward_dkdv"):
        (config, *_) = program.kernels[kernel].configs
        assert compile_cubin(program.source(kernel), program.options(config, True, "sm_90")).warnings == ()
