"""Kernels for Hopper on the CPU, thread by thread: masks, scores, and the lazy maximum with its fallback."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest
import torch

from attnc.target.files import render_files
from attnc.verify.case import Case
from attnc.verify.check import check
from attnc.verify.problem import build
from attnc.verify.subject import Subject, subject_of
from attnc.verify.verdict import Verdict
from tests.by_day import some_by_day
from tests.targets import needs_gxx
from tests.verify.judging import modules_of, spec

pytestmark = needs_gxx

LAZY = "softmax = online(maximum = lazy(20)), consumers = 2, tile.kv = 32"
INPUTS: Mapping[str, tuple[str, ...]] = {
    "bias": ("input bias: f32[B, N]",),
    "doc": ("input doc: i32[B, N] is sorted",),
    "table": ("input at: i64[N]", "input table: f32[N, N]"),
    "sink": ("input sink: f32[H]",),
    "slope": ("input slope: f32[H]",),
    "lens": ("input lens: i32[B]", "length N = lens[b]"),
    "dropout": ("input p: f32[]", "input seed: i64[]"),
}
SCORE = "dot(q, k) / sqrt(32)"


def text_of(
    mask: str = "",
    *,
    score: str = SCORE,
    more: str = "",
    normalize: str = "softmax",
    schedule: str = LAZY,
    dtype: str = "bf16",
) -> str:
    lines = [
        f"input q: {dtype}[B, M, H, 32]",
        f"input k, v: {dtype}[B, N, H, 32]",
        *INPUTS.get(more, ()),
        f"score = {score}",
        *([f"mask = {mask}"] if mask else []),
        f"normalize = {normalize}",
        f"output o: {dtype}[B, M, H, 32]",
        "output lse: f32[B, H, M]",
    ]
    return spec(lines, schedule, target="cuda.sm_90a")


@cache
def subject(text: str, wrong: str = "", instead: str = "") -> Subject:
    """The module of a spec, with a line of its kernel changed."""
    (module,) = modules_of(text)
    if not wrong:
        return subject_of(module)
    source = render_files(module, path="a.attn", sha256="")["default.cu"]
    assert source.count(wrong) == 1, wrong
    return subject_of(module, {"default.cu": source.replace(wrong, instead)})


def verdict(made: Subject, logits: str = "random", m: int = 130, n: int = 200, seed: int = 0) -> Verdict:
    case = Case(dims={"B": 1, "H": 2, "M": m, "N": n}, logits=logits, seed=seed)
    return check(made, case, fills=("nan",))


#: Styles of scores that a maximum has to follow.
JUMPS = ("rising", "falling", "spike", "huge", "very_negative", "low")
KINDS = {
    "eager": text_of("causal", schedule="softmax = online(rescale = lazy(8)), consumers = 2, tile.kv = 32"),
    "not_overlapped": text_of("causal", schedule=f"{LAZY}, overlap = false"),
    "window": text_of("window(40, 3)"),
    "wide_tiles": text_of("window(150, 3)", schedule=LAZY.replace("32", "160")),
    "prefix": text_of("causal or kv_idx < 70"),
    "documents": text_of("causal and doc[b, q_pos] == doc[b, kv_idx]", more="doc"),
    "documents_of_three": text_of(
        "causal and doc[b, q_pos] == doc[b, kv_idx]",
        more="doc",
        schedule=LAZY.replace("consumers = 2", "consumers = 3"),
    ),
    "key_bias": text_of("causal", score=f"{SCORE} + bias[b, kv_idx]", more="bias"),
    "key_bias_and_mask": text_of("bias[b, kv_idx] < 1", score=f"{SCORE} + 2 * bias[b, kv_idx]", more="bias"),
    "key_table": text_of("causal", score=f"{SCORE} + 2 * table[at[kv_idx], kv_idx]", more="table"),
    "alibi": text_of("causal", score=f"{SCORE} - slope[h] * (q_pos - kv_idx)", more="slope"),
    "alibi_both": text_of(score=f"{SCORE} - slope[h] * abs(q_idx - 2 * kv_idx + 3)", more="slope"),
    "alibi_window": text_of("window(40, 3)", score=f"slope[h] * kv_idx + {SCORE}", more="slope"),
    "alibi_of_distances": text_of("causal", score=f"{SCORE} - slope[h] * abs(q_pos - kv_idx)", more="slope"),
    "alibi_of_positions": text_of(
        score=f"{SCORE} + (kv_idx - 3) + slope[h] * (kv_idx - q_pos)", more="slope"
    ),
    "alibi_and_key_bias": text_of(
        "causal", score=f"bias[b, kv_idx] - 0.5 * (q_pos - kv_idx) - {SCORE}", more="bias"
    ),
    "softcap": text_of("causal", score=f"softcap({SCORE}, 2)"),
    "softcap_window": text_of(
        "window(80, 3)", score=f"softcap({SCORE}, -20) + slope[h] * kv_idx", more="slope"
    ),
    "sink": text_of("causal", normalize="softmax(sink = sink[h])", more="sink"),
    "lengths": text_of("causal", more="lens"),
    "dropout": text_of("causal", normalize="softmax(dropout = p, seed = seed)", more="dropout"),
    "dropout_of_48_keys": text_of(
        "causal",
        normalize="softmax(dropout = p, seed = seed)",
        more="dropout",
        schedule=LAZY.replace("32", "48"),
    ),
    "negative": text_of("causal", score=f"-3 * {SCORE}"),
}


@pytest.mark.one_in(12)
@pytest.mark.slow
@pytest.mark.parametrize("kind", some_by_day(KINDS, of=3))
def test_masks_and_scores_are_right(kind: str) -> None:
    made = subject(KINDS[kind])
    found = verdict(made)
    assert found.ok, found.message


@pytest.mark.slow
def test_a_length_is_that_of_its_own_tile() -> None:
    """A block that takes several tiles has sequences of several lengths."""
    case = Case(dims={"B": 131, "H": 1, "M": 1, "N": 3}, lengths="drawn")
    found = check(subject(KINDS["lengths"]), case, fills=("nan",))
    assert found.ok, found.message


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("lengths", ["one", "full"])
def test_rows_that_are_nobodys_do_not_move_a_maximum(lengths: str) -> None:
    """A tile at the end of a packed sequence has rows of whatever lies behind it."""
    lines = [
        "input q: bf16[T, H, 32] via ragged(cu_q)",
        "input k, v: bf16[S, H, 32] via ragged(cu_k)",
        "input cu_q, cu_k: i32[B + 1]",
        f"score = {SCORE}",
        "mask = causal",
        "normalize = softmax",
        "output o: bf16[T, H, 32]",
    ]
    case = Case(dims={"B": 1, "H": 1, "M": 129, "N": 129}, lengths=lengths, seed=7)
    found = check(subject(spec(lines, LAZY, target="cuda.sm_90a")), case, fills=("nan", "zero"))
    assert found.ok, found.message


@pytest.mark.slow
def test_tiles_without_rows_are_passed_over() -> None:
    """There is one where a packed sequence ends with a tile; blocks take several."""
    lines = [
        "input q: bf16[T, H, 16] via ragged(cu_q)",
        "input k, v: bf16[S, H, 16] via ragged(cu_k)",
        "input cu_q, cu_k: i32[B + 1]",
        "score = dot(q, k)",
        "mask = true",
        "normalize = softmax",
        "output o: bf16[T, H, 16]",
    ]
    case = Case(dims={"B": 36, "H": 2, "M": 128, "N": 4}, lengths="full")
    found = check(subject(spec(lines, LAZY, target="cuda.sm_90a")), case, fills=("nan",))
    assert found.ok, found.message


def in_pages(values: str, mask: str, schedule: str = LAZY) -> str:
    """A prompt whose keys lie in pages. values: the storage of v."""
    lines = [
        "input q: f16[B, M, Hkv * G, 48]",
        "input k: f16[B, N, Hkv, 48] via paged(table, page = 16)",
        f"input v: f16[B, N, Hkv, 32] via {values}",
        "input table: i32[B, P]",
        "input kv_len: i32[B]",
        "length N = kv_len[b]",
        "score = dot(q, k)",
        f"mask = {mask}",
        "normalize = softmax",
        "output o: f16[B, M, Hkv * G, 32]",
    ]
    return spec(lines, schedule, target="cuda.sm_90a")


#: More queries than keys: most tiles of a block see none.
MANY_QUERIES = [
    Case(dims={"B": 1, "M": m, "N": n, "Hkv": heads, "G": 1}, seed=m)
    for m, n, heads in ((2600, 3, 1), (1300, 0, 2), (700, 40, 3))
]


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("values", ["paged(table, page = 16)", "prefix(k)"])
def test_warps_that_copy_pages_meet_where_no_key_is_visible(values: str) -> None:
    """Nobody waits for their boxes there, so one could fall behind by two phases of a barrier."""
    made = subject(in_pages(values, "window(64, 0)"))
    for case in MANY_QUERIES:
        found = check(made, case, fills=("nan",))
        assert found.ok, found.message


@pytest.mark.slow
def test_a_warp_that_copies_pages_and_falls_behind_shows() -> None:
    text = in_pages("paged(table, page = 16)", "window(64, 0)")
    (module,) = modules_of(text)
    source = render_files(module, path="a.attn", sha256="")["default.cu"]
    wrong = {
        "(barrier_of(base, Q_FULL, i), PRODUCERS)": "(barrier_of(base, Q_FULL, i), 1)",
        "mbarrier_arrive_if(barrier_of(base, Q_FULL, q.index), producer > 0 && lane == 0);": "",
    }
    for line, instead in wrong.items():
        assert source.count(line) == 1, line
        source = source.replace(line, instead)
    found = [check(subject_of(module, {"default.cu": source}), case, fills=("nan",)) for case in MANY_QUERIES]
    assert any("a deadlock" in verdict.message for verdict in found)


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "dv", "more", "mask"),
    [
        (192, 128, "", "causal"),
        (80, 80, "", "window(40, 3)"),
        (256, 256, " - slope[h] * (q_pos - kv_idx)", "causal"),
        (112, 16, "", "true"),
    ],
)
def test_values_of_a_prompt_are_columns_of_its_keys(d: int, dv: int, more: str, mask: str) -> None:
    lines = [
        f"input q: bf16[B, M, H, {d}]",
        f"input k: bf16[B, N, H, {d}]",
        f"input v: bf16[B, N, H, {dv}] via prefix(k)",
        *(INPUTS["slope"] if more else ()),
        f"score = dot(q, k) / sqrt({d}){more}",
        f"mask = {mask}",
        "normalize = softmax",
        f"output o: bf16[B, M, H, {dv}]",
        "output lse: f32[B, H, M]",
    ]
    found = verdict(subject(spec(lines, "", target="cuda.sm_90a")))
    assert found.ok, found.message


MEET = "            __syncwarp();\n            mbarrier_arrive_if(barrier_of(base, "


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "wrong", "instead"),
    [
        ("key_bias", "half[0] = half[1] = half[2] = 0.5f;", "half[0] = 0.5f;"),
        (
            "key_bias",
            f"proxy_fence();\n{MEET}K_FULL",
            f"{MEET}K_FULL",
        ),
        ("alibi", "half[1] : t == 1", "half[0] : t == 1"),
        ("dropout", "mbarrier_wait(barrier_of(base, DRAWN_EMPTY, drawn.index), drawn.phase);", ""),
        ("dropout", "t % 2 ? 0x2103 : 0x3210", "0x3210"),
    ],
    ids=["one_bf16_of_three", "no_proxy_fence", "a_piece_twice", "drawn_too_early", "bits_of_another_byte"],
)
def test_wrong_columns_and_draws_show(kind: str, wrong: str, instead: str) -> None:
    assert not verdict(subject(KINDS[kind], wrong, instead)).ok


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        "proxy_fence();  // before the async proxy overwrites it",
        "__syncwarp();\n            mbarrier_arrive_if(barrier_of(base, PAIR",
    ],
    ids=["no_proxy_fence", "lanes_do_not_meet"],
)
def test_pairs_that_are_given_back_while_they_are_read_show(wrong: str) -> None:
    """Copies write by another proxy than threads read."""
    lines = [
        "input q: bf16[B, M, H, 32]",
        "input k, v: bf16[B, N, H, 32]",
        "input pairs: f32[H, M, N]",
        f"score = {SCORE} + pairs[h, q_idx, kv_idx]",
        "normalize = softmax",
        "output o: bf16[B, M, H, 32]",
    ]
    found = verdict(
        subject(spec(lines, LAZY, target="cuda.sm_90a"), wrong, wrong.partition(";")[2].lstrip("\n"))
    )
    assert "have read without a fence.proxy.async and a __syncwarp since" in found.message


@pytest.mark.slow
def test_what_comes_as_tiles_is_loaded_at_other_places_too() -> None:
    """Its map serves tiles of queries and keys alone; a row of it for all queries has an address."""
    lines = [
        "input q: bf16[B, M, H, 32]",
        "input k, v: bf16[B, N, H, 32]",
        "input pairs: f32[H, M, N]",
        f"score = {SCORE} + pairs[h, q_idx, kv_idx]",
        "mask = pairs[h, 0, kv_idx] > -0.5",
        "normalize = softmax(sink = pairs[h, 0, 0])",
        "output o: bf16[B, M, H, 32]",
    ]
    found = verdict(subject(spec(lines, LAZY, target="cuda.sm_90a")))
    assert found.ok, found.message


@pytest.mark.slow
def test_columns_are_bf16_whatever_k_is() -> None:
    text = text_of("causal", score=f"{SCORE} + 1000 * bias[b, kv_idx]", more="bias").replace("bf16", "f16")
    found = verdict(subject(text))
    assert found.ok, found.message


@pytest.mark.one_in(12)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("logits", JUMPS)
def test_a_lazy_maximum_follows_scores_that_jump(dtype: str, logits: str) -> None:
    found = verdict(subject(text_of(dtype=dtype)), logits)
    assert found.ok, found.message


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "instead"),
    [
        ("if (exceeds) {", "if (false) {"),
        ("m[r] += up;", ""),
        ("sum[r] *= alpha[r];", ""),
    ],
    ids=["never_moves", "m_stays", "sums_stay"],
)
def test_a_maximum_that_does_not_move_shows(wrong: str, instead: str) -> None:
    made = subject(text_of(), wrong, instead)
    assert not all(verdict(made, logits).ok for logits in JUMPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "instead"),
    [
        ("failed |= (u32)(!(most < 1e30f)) << r;", ""),
        ("        failed_mask = failing;", "        ;"),
    ],
    ids=["never_gives_up", "never_marked"],
)
def test_a_tile_that_is_not_computed_again_shows(wrong: str, instead: str) -> None:
    """What jumps by more than 2^100 has no exponentials to move by."""
    made = subject(text_of(), wrong, instead)
    assert not all(verdict(made, logits).ok for logits in JUMPS)


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("lengths", [("N",), ("M",), ("M", "N")], ids="".join)
def test_a_block_takes_tiles_of_sequences_of_other_lengths(lengths: tuple[str, ...]) -> None:
    """More tiles than blocks: what a length shortened was short for the tiles behind it too."""
    lines = [
        "input q: bf16[B, M, H, 16]",
        "input k, v: bf16[B, N, H, 16]",
        "input count: i32[B]",
        "score = dot(q, k)",
        "normalize = softmax",
        "output o: bf16[B, M, H, 16]",
        "output lse: f32[B, H, M]",
        *(f"length {name} = count[b]" for name in lengths),
    ]
    (module,) = modules_of(spec(lines, "consumers = 2, tile.kv = 32", target="cuda.sm_90a"))
    found = check(subject_of(module), Case(dims={"B": 6, "M": 20, "N": 40, "H": 3}))
    assert found.ok, found.message


@pytest.mark.slow
def test_wide_values_are_summed_in_parts_beside_a_warpgroup_that_draws() -> None:
    """A thread starts with too few registers for the result of one product."""
    lines = [
        "input q: bf16[B, M, H, 16]",
        "input k: bf16[B, N, H, 16]",
        "input v: bf16[B, N, H, 208]",
        *INPUTS["dropout"],
        "score = dot(q, k)",
        "normalize = softmax(dropout = p, seed = seed)",
        "output o: bf16[B, M, H, 208]",
    ]
    text = spec(lines, "consumers = 2, tile.kv = 48", target="cuda.sm_90a")
    found = verdict(subject(text), m=70, n=50)
    assert found.ok, found.message
    assert not verdict(subject(text, "* 128 + 3 * BLOCK_N * 128", "* 128 + 1 * BLOCK_N * 128"), m=70, n=50).ok


SLOPES = {
    "kink": "min(dot(q, k), 0)",
    "absolute": "abs(dot(q, k))",
    "two slopes": "where(dot(q, k) > 0.3, 2 * dot(q, k), dot(q, k))",
    "square": "dot(q, k) * abs(dot(q, k)) / 8",
    "softcap": "softcap(dot(q, k), 2)",
}


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("slope", "way", "mask"),
    [
        *(
            pytest.param(slope, "two_pass", "", marks=pytest.mark.nightly if number % 3 else ())
            for number, slope in enumerate(SLOPES)
        ),
        ("kink", "two_pass", "causal"),
        pytest.param("square", "atomic", "", marks=pytest.mark.nightly),
    ],
)
def test_the_slope_of_a_score_is_that_of_the_product(slope: str, way: str, mask: str) -> None:
    """And not of what stands in its register once p is known."""
    text = text_of(mask, score=SLOPES[slope], schedule=f"{LAZY}\n  backward {{ accumulate.dq = {way} }}")
    made = subject(text.replace("  output lse", "  grad q, k, v\n  output lse"))
    found = verdict(made, m=70, n=130)
    assert found.ok, found.message


@pytest.mark.slow
def test_gradients_of_packed_keys_where_no_sequence_has_any() -> None:
    """Tensors without elements have no address, and the kernels copy a tile for each sequence."""
    lines = [
        "input q: bf16[B, M, H, 192]",
        "input k, v: bf16[S, H, 192] via ragged(ends)",
        "input ends: i32[B + 1]",
        "score = dot(q, k)",
        "normalize = softmax",
        "output o: bf16[B, M, H, 192]",
        "grad q, k, v",
    ]
    made = subject(spec(lines, "consumers = 2, tile.kv = 32", target="cuda.sm_90a"))
    case = Case(dims={"B": 2, "H": 1, "M": 15, "N": 0}, lengths="full", seed=800)
    keys = build(made.variant.attention, case).inputs["k"]
    assert isinstance(keys, torch.Tensor)
    assert keys.data_ptr() == 0
    found = check(made, case, fills=("nan",))
    assert found.ok, found.message


@pytest.mark.slow
def test_the_slope_is_that_of_the_product_where_dk_and_dv_are_of_wide_heads() -> None:
    """Which keep p times the slope for dk, and p for dv."""
    lines = [
        "input q: bf16[B, M, H, 144]",
        "input k, v: bf16[B, N, H, 144]",
        "score = -dot(q, k) * dot(q, k) / 64",
        "mask = causal",
        "normalize = softmax",
        "output o: bf16[B, M, H, 144]",
        "grad q, k, v",
    ]
    found = verdict(subject(spec(lines, "tile.kv = 64", target="cuda.sm_90a")), m=40, n=50)
    assert found.ok, found.message
