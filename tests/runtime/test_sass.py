"""What is read from machine code: where waits, sums and addresses ended up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attnc.runtime.cubin import disassemble
from attnc.runtime.loader import load_module, program_of
from attnc.runtime.nvrtc import compile_cubin
from attnc.runtime.toolchains import tool
from tests.by_day import each_by_day, some_by_day
from tests.compiled import compile_configs
from tests.sass import Loop, findings, loops, staying, unwritten
from tests.verify.judging import modules_of, spec

GENERATED = Path(__file__).parents[2] / "generated"
needs_nvdisasm = pytest.mark.skipif(tool("nvdisasm") is None, reason="Triton's wheel has nvdisasm")

#: Two products a turn; a wait for a barrier whose loop lies elsewhere, and a loop that does not multiply.
TEXT = """
	.section	.text.attention,"ax",@progbits
.text.attention:
        /*0000*/                   R2UR UR4, R2 ;
.L_x_9:
        /*0010*/                   IADD3 R1, R1, -0x1, RZ ;
        /*0020*/               @P1 BRA `(.L_x_9) ;
.L_x_1:
        /*0030*/                   R2UR UR8, R2 ;
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0 ;
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R88, R4, gdesc[UR8].tnspB, R88, gsb0 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0070*/                   MUFU.EX2 R24, R24 ;
        /*0080*/                   MUFU.EX2 R25, R25 ;
        /*0090*/                   FADD R1, R24, R25 ;
        /*00a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R5 ;
        /*00b0*/              @!P0 BRA `(.L_x_2) ;
.L_x_3:
        /*00c0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00d0*/                   MUFU.EX2 R26, R26 ;
        /*00e0*/                   LDL R7, [R1] ;
        /*00f0*/               @P0 BRA `(.L_x_4) ;
        /*0100*/                   FADD R1, R1, R26 ;
        /*0110*/                   FADD R1, R1, R27 ;
.L_x_4:
        /*0120*/               @P1 BRA `(.L_x_1) ;
        /*0130*/                   HGMMA.64x128x16.F32.BF16 R88, R4, gdesc[UR8].tnspB, R88, gsb0 ;
        /*0140*/                   EXIT ;
.L_x_2:
        /*0150*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R5 ;
        /*0160*/              @!P0 BRA `(.L_x_2) ;
        /*0170*/                   BRA `(.L_x_3) ;
.L_x_5:
        /*0180*/                   BRA `(.L_x_5);
"""

#: A matrix that stays in R88 to R91 and is put aside, and one that is overwritten in the second turn.
STAYS = """
.text.attention:
        /*0000*/                   FADD R88, R4, -R5 ;
        /*0010*/                   FADD R92, R6, -R7 ;
.L_x_1:
        /*0020*/                   HGMMA.64x64x8.F32.TF32 R24, R88, gdesc[UR8], RZ, !UPT ;
        /*0030*/                   HGMMA.64x64x8.F32.TF32 R24, R92, gdesc[UR8], R24, gsb0 ;
        /*0040*/                   STL.128 [R1+0x10], R88 ;
        /*0050*/                   LDS.128 R88, [R5] ;
        /*0060*/                   LDS.128 R96, [R4] ;
        /*0070*/                   HGMMA.64x64x8.F32.TF32 R56, R88, gdesc[UR8], RZ, !UPT ;
        /*0080*/                   HGMMA.64x64x8.F32.TF32 R56, R96, gdesc[UR8], R56, gsb0 ;
        /*0090*/                   LDL.LU.128 R88, [R1+0x10] ;
        /*00a0*/               @P0 BRA `(.L_x_1) ;
        /*00b0*/                   EXIT ;
"""


def test_a_matrix_that_stays_is_not_overwritten() -> None:
    """What is put aside, or made in each turn, is as it was."""
    first, last = (f"HGMMA.64x64x8.F32.TF32 R24, {matrix}, gdesc[UR8]" for matrix in ("R88", "R92"))
    both = f"{first}, RZ, !UPT", f"{last}, R24, gsb0"
    lost = STAYS.replace("LDL.LU.128 R88, [R1+0x10]", "NOP")
    for text in (STAYS, lost):
        assert staying(text) == both
    assert staying(STAYS, is_lost=True) == ()
    assert staying(lost, is_lost=True) == both[:1]
    assert staying(lost.replace("LDS.128 R96", "LDS.128 R92"), is_lost=True) == both
    apart = lost.replace("LDS.128 R88", "LDS.128 R84").replace("R56, R88", "R56, R84")
    assert staying(apart, is_lost=True) == ()


FOUND = Loop(
    kernel="attention", products=2, exponentials=3, hidden=2, moves=1, sums=3, apart=2, local=1, untimely=2
)


def test_the_loop_that_multiplies_is_found_and_counted() -> None:
    assert loops(TEXT) == (FOUND,)


def test_products_in_turns_are_told_from_others() -> None:
    product = "                   HGMMA.64x128x16.F32.BF16 "
    first, second = (f"{product}{result}" for result in ("R24", "R88"))
    taken = TEXT.replace(first, f" BAR.SYNC.DEFER_BLOCKING R5, 0x100 ;\n/*0038*/{first}")
    assert [loop.untimely for loop in loops(taken)] == [0]
    early = taken.replace(second, f" BAR.ARV R6, 0x100 ;\n/*0048*/{second}", 1)
    assert [loop.untimely for loop in loops(early)] == [1]


def test_every_kernel_is_read_by_itself() -> None:
    both = loops(TEXT + TEXT.replace("attention", "second"))
    assert both == (FOUND, replace(FOUND, kernel="second"))


def test_outer_loops_are_not_counted() -> None:
    outer = TEXT.replace(
        "        /*0140*/", "        /*0138*/               @P3 BRA `(.L_x_9) ;\n        /*0140*/"
    )
    assert loops(outer) == (FOUND,)


#: A kernel that adds to what nothing wrote, as ptxas 12.8 made one, and one that does not.
READS = """
.text.attention:
        /*0000*/                   S2UR UR6, SR_CTAID.X ;
        /*0010*/                   ULDC.64 UR8, c[0x0][0x208] ;
        /*0020*/                   USHF.R.U32.HI UR4, URZ, 0x4, UR6 ;
        /*0030*/                   UIADD3 UR14, UP0, UR14, 0x20, URZ ;
        /*0040*/                   UMOV UR15, 0xc0000010 ;
        /*0050*/                   UIMAD.WIDE.U32 UR10, UR4, UR6, URZ ;
        /*0058*/                   SYNCS.EXCH.64 URZ, [UR6+0x8000], UR8 ;
        /*005c*/                   MOV R186, UR50 ;
        /*0060*/                   LDG.E.U16 R66, desc[UR8][R68.64] ;
        /*0070*/                   HGMMA.64x64x16.F32 R24, gdesc[UR8], RZ, !UPT ;
        /*0080*/                   HGMMA.64x16x16.F32 R56, R24, gdesc[UR12].tnspB, R56 ;
        /*0090*/                   EXIT ;
.text.other:
        /*0000*/                   UIADD3 UR4, UR14, 0x1, URZ ;
"""


def test_reads_of_registers_that_nothing_wrote_are_found() -> None:
    added, other = "UIADD3 UR14, UP0, UR14, 0x20, URZ", "UIADD3 UR4, UR14, 0x1, URZ"
    assert unwritten(READS) == (added, other)
    right = READS.replace("UR14, 0x20", "UR4, 0x20").replace("UR14, 0x1", "URZ, 0x1")
    assert unwritten(right) == ()
    assert unwritten(right.replace("R56, R24, gdesc", "R56, gdesc")) == (
        "HGMMA.64x16x16.F32 R56, gdesc[UR12].tnspB, R56",
    )
    assert unwritten(right.replace("ULDC.64", "ULDC")) != ()


GOOD = Loop(kernel="f", products=16, exponentials=64, hidden=64, moves=4, sums=70, apart=4)


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (replace(GOOD, hidden=17), "47 of 64 exponentials wait for the product that should hide them"),
        (replace(GOOD, moves=48), "48 R2UR for 16 HGMMA: addresses are not uniform"),
        (replace(GOOD, apart=66), "66 of 70 FADD come after the exponentials and not among them"),
        (replace(GOOD, local=3), "3 loads and stores of spilled registers"),
    ],
)
def test_what_is_slow_is_said(loop: Loop, said: str) -> None:
    assert findings(loop, overlaps=True) == (said,)


def test_a_good_loop_is_passed_over_and_so_is_one_that_does_not_overlap() -> None:
    assert findings(GOOD, overlaps=True) == ()
    assert findings(replace(GOOD, hidden=0), overlaps=False) == ()


SOURCE = """
typedef unsigned long long u64;
extern "C" __global__ void __launch_bounds__(128, 1)
f(float* x, const u64* matrices, u64 matrix, const volatile int* ready, int n)
{
    float d[4], e[16];
    u64 a = PER_THREAD ? matrices[threadIdx.x] : matrix;
    for (int i = 0; i < 16; ++i) e[i] = x[16 * threadIdx.x + i];
    for (int i = 0; i < 4; ++i) d[i] = 0.0f;
#pragma unroll 1
    for (int k = 0; k < n; ++k, a += 8) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
                     "{%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (EARLY) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        for (int i = 0; i < 16; ++i) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(e[i]) :: "memory");
        if (!EARLY) {  // behind a branch, over which ptxas moves no wait
            while (*ready < k);
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        }
    }
    float sum = d[0] + d[1] + d[2] + d[3];
    for (int i = 0; i < 16; ++i) sum += e[i];
    x[threadIdx.x] = sum;
}
"""


def compiled(*, early: bool = False, per_thread: bool = False) -> Loop:
    options = ["-arch=sm_90a", f"-DEARLY={int(early)}", f"-DPER_THREAD={int(per_thread)}"]
    text = disassemble(compile_cubin(SOURCE, options).image)
    assert text is not None
    (loop,) = loops(text)
    return loop


@needs_nvdisasm
def test_exponentials_behind_the_wait_are_told_from_those_in_front() -> None:
    good, bad = compiled(), compiled(early=True)
    assert (good.products, good.exponentials) == (1, 16)
    assert 12 < good.hidden <= 16
    assert (bad.products, bad.exponentials) == (1, 16)
    assert bad.hidden < 8
    assert findings(bad, overlaps=True)
    assert not findings(good, overlaps=True)


@needs_nvdisasm
def test_addresses_that_differ_between_threads_are_told_from_uniform_ones() -> None:
    assert compiled().moves == 0
    assert compiled(per_thread=True).moves > 0


@needs_nvdisasm
@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    each_by_day(
        [
            "causal_gqa/cuda_sm_90a/bf16_d128.py",
            "causal_gqa/cuda_sm_90a/bf16_d256.py",
            "local_sink/cuda_sm_90a/w128_d64.py",
            "softcap/cuda_sm_90a/d128.py",
            "varlen/cuda_sm_90a/d128.py",
        ],
        of=8,
    ),
)
def test_committed_kernels_hide_their_exponentials(module: str) -> None:
    """Waits are behind the softmax, addresses in uniform registers, and sums among the exponentials."""
    for _, cubin in compile_configs(GENERATED / module, "sm_90a"):
        text = disassemble(cubin.image)
        assert text is not None
        assert unwritten(text) == ()
        found = loops(text)
        assert found
        assert [told for loop in found for told in findings(loop, overlaps=True)] == []


@pytest.mark.one_in(2)
@needs_nvdisasm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiles", "overlap"),
    some_by_day(
        [
            (64, "consumers = 2"),
            (128, ""),
            (256, ""),
            (64, "consumers = 3"),
            (64, "consumers = 4, tile.kv = 64"),
        ],
        ["true", "false"],
        of=5,
    ),
)
def test_turns_cost_no_wait_and_hold_all_products(tiles: tuple[int, str], overlap: str) -> None:
    """Products are issued between the barrier of a turn and the arrival at the next one's, and ptxas
    serialises none of them (C7510 to C7520).
    """
    d, knobs = tiles
    lines = [
        f"input q: bf16[B, M, H, {d}]",
        f"input k, v: bf16[B, N, H, {d}]",
        f"score = dot(q, k) / sqrt({d})",
        "mask = causal",
        "normalize = softmax",
        f"output o: bf16[B, M, H, {d}]",
    ]
    schedule = f"softmax = online(maximum = lazy(20)), overlap = {overlap}, pingpong = true\n  {knobs}"
    (module,) = modules_of(spec(lines, schedule, target="cuda.sm_90a"))
    program = program_of(load_module(module))
    config = program.kernels[module.kernel.name].configs[0]
    cubin = compile_cubin(program.source(module.kernel.name), program.options(config, True, "sm_90a"))
    assert cubin.warnings == ()
    assert cubin.spills <= (16 if d == 256 else 0)  # outside of these loops
    found = loops(disassemble(cubin.image) or "")
    assert [loop.untimely for loop in found] == [0, 0]
    assert [told for loop in found for told in findings(loop, overlaps=overlap == "true")] == []


@pytest.mark.nightly
@needs_nvdisasm
@pytest.mark.slow
def test_exponentials_of_wide_heads_run_beside_the_product_of_the_other_warpgroup() -> None:
    """ptxas had moved the wait for it before them, in front of which there was no branch."""
    module = GENERATED / "wide" / "cuda_sm_90a" / "d512.py"
    ((_, cubin),) = compile_configs(module, "sm_90")
    text = disassemble(cubin.image)
    assert text is not None
    (loop,) = loops(text)
    assert loop.exponentials - loop.hidden <= 2  # those that rescale sums
    assert (loop.moves, loop.local) == (0, 0)
