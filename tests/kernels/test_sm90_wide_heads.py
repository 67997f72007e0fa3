"""Heads of more than 256 columns on Hopper, on the CPU: any width, and K in one stage beside two of V."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from attnc.target.files import render_files
from attnc.verify.case import Case
from attnc.verify.check import check
from attnc.verify.subject import subject_of
from tests.by_day import some_by_day
from tests.targets import needs_gxx
from tests.verify.judging import modules_of, spec, subject_with_changes

pytestmark = [needs_gxx, pytest.mark.slow]


def text_of(
    mask: str = "causal",
    *,
    more: Sequence[str] = (),
    d: int = 512,
    dv: int = 512,
    storage: str = "",
    score: str = "dot(q, k) / 20",
    normalize: str = "softmax",
    schedule: str = "split.kv in {1, 3}",
) -> str:
    lines = [
        f"input q: bf16[B, M, Hkv * G, {d}]",
        f"input k: bf16[B, N, Hkv, {d}]{storage}",
        f"input v: bf16[B, N, Hkv, {dv}]{storage}",
        *more,
        f"score = {score}",
        f"mask = {mask}",
        f"normalize = {normalize}",
        f"output o: bf16[B, M, Hkv * G, {dv}]",
        "output lse: f32[B, Hkv * G, M]",
    ]
    return spec(lines, f"loops = [kv], pack = gqa, {schedule}", target="cuda.sm_90a")


LENGTHS = ("input lens: i32[B]", "length N = lens[b]")
KINDS = {
    "causal": text_of(),
    "window_in_pages": text_of(
        "window(60, 0)",
        more=("input table: i32[B, P]", *LENGTHS),
        storage=" via paged(table, page = 16)",
        d=384,
        dv=384,
    ),
    "tiles_left_out": text_of("kv_idx < 4 or (kv_idx <= q_idx and q_idx - kv_idx <= 20)", d=320),
    "slopes_in_documents": text_of(
        "causal and doc[b, q_pos] == doc[b, kv_idx]",
        more=("input slope: f32[Hkv * G]", "input doc: i32[B, N] is sorted"),
        score="dot(q, k) / 20 + slope[h] * (kv_idx - q_pos)",
        d=448,
        dv=448,
    ),
    "segments": text_of(
        "window(100, 0)",
        more=("input sink: f32[Hkv * G]", "order = absolute(64)"),
        score="softcap(dot(q, k) / 20, 30)",
        normalize="softmax(sink = sink[h])",
        schedule="split.kv = fixed(64)",
        d=320,
        dv=320,
    ),
    "two_tiles_of_keys": text_of(schedule="tile.kv = 32, split.kv = 2", more=LENGTHS),
    "other_columns_of_v": text_of(d=264, dv=384),
    "columns_that_are_not_stored": text_of(d=320, dv=320),
    "no_whole_panels_for_each": text_of(d=448, dv=448),
    "no_whole_panels_in_pages": text_of(
        more=("input table: i32[B, P]", *LENGTHS), storage=" via paged(table, page = 4)", d=320, dv=320
    ),
    "rows_of_pages": text_of(
        "window(60, 0)",
        more=("input table: i32[B, P]", *LENGTHS),
        storage=" via paged(table, page = 4)",
        d=264,
        dv=264,
    ),
}
#: B, Hkv, G, M and N: one tile of rows for each head, an odd number of such blocks, two tiles, three, four.
SIZES = ((1, 1, 2, 1, 200), (3, 1, 3, 21, 70), (1, 2, 1, 100, 150), (1, 1, 5, 30, 130), (1, 1, 2, 128, 100))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", some_by_day(KINDS, of=3))
def test_wide_heads_are_right_with_any_number_of_tiles_of_rows(kind: str) -> None:
    made = subject_with_changes(KINDS[kind])
    for seed, sizes in enumerate(SIZES):
        dims = dict(zip(("B", "Hkv", "G", "M", "N"), sizes, strict=True))
        found = check(made, Case(dims=dims, seed=seed, config=seed % len(made.configs)), fills=("nan",))
        assert found.ok, (dims, found.message)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("pages", [False, True])
def test_weights_without_a_softmax_are_shared_too(*, pages: bool) -> None:
    storage, more = (
        (" via paged(table, page = 16)", ("input table: i32[B, P]", *LENGTHS)) if pages else ("", ())
    )
    lines = [
        "input q: bf16[B, M, Hkv * G, 320]",
        f"input k, v: bf16[B, N, Hkv, 320]{storage}",
        *more,
        "score = dot(q, k) / 20",
        "weight = max(score, 0) * max(score, 0) / N",
        "mask = causal",
        "normalize = none",
        "output o: bf16[B, M, Hkv * G, 320]",
    ]
    text = spec(lines, "loops = [kv], pack = gqa, split.kv in {1, 3}", target="cuda.sm_90a")
    made = subject_with_changes(text)
    for number, sizes in enumerate(SIZES[:3]):
        dims = dict(zip(("B", "Hkv", "G", "M", "N"), sizes, strict=True))
        found = check(made, Case(dims=dims, config=number % 2), fills=("nan",))
        assert found.ok, (dims, found.message)


def test_one_gradient_and_no_lse_where_nobody_asks_for_them() -> None:
    """The gradient of q alone has no walk over keys to cut; without gradients nothing is kept for them."""
    lines = [
        "input q: bf16[B, M, Hkv * G, 320]",
        "input k, v: bf16[B, N, Hkv, 320]",
        "score = dot(q, k) / 20",
        "normalize = softmax",
        "output o: bf16[B, M, Hkv * G, 320]",
        "grad q",
    ]
    made = subject_with_changes(
        spec(lines, "loops = [kv], pack = gqa, split.kv in {1, 3}", target="cuda.sm_90a")
    )
    found = check(made, Case(dims={"B": 1, "Hkv": 1, "G": 1, "M": 2, "N": 40}), fills=("nan",))
    assert found.ok, found.message


def trained(
    score: str = "dot(q, k) / 20",
    normalize: str = "softmax",
    *,
    more: Sequence[str] = (),
    mask: str = "causal",
    d: int = 264,
    dv: int = 264,
    grads: str = "q, k, v",
    packed: bool = False,
) -> str:
    rows, ends, storage = (
        ("T", ("input ends: i32[B + 1]",), " via ragged(ends)") if packed else ("B, M", (), "")
    )
    keys = "T" if packed else "B, N"
    lines = [
        f"input q: bf16[{rows}, Hkv * G, {d}]{storage}",
        f"input k: bf16[{keys}, Hkv, {d}]{storage}",
        f"input v: bf16[{keys}, Hkv, {dv}]{storage}",
        *ends,
        *more,
        f"score = {score}",
        *(("weight = score * sigmoid(score) / N",) if normalize == "none" else ()),
        f"mask = {mask}",
        f"normalize = {normalize}",
        f"output o: bf16[{rows}, Hkv * G, {dv}]",
        f"grad {grads}",
    ]
    return spec(lines, "loops = [kv], pack = gqa", target="cuda.sm_90a")


DRAWS = ("input rate: f32[]", "input draws: i64[]")
DROPOUT = "softmax(dropout = rate, seed = draws)"
#: Gradients whose ds needs more than p: its slope, a sign, what is kept, the keys behind it. Kernels of
#: `mma.sync` make the last four.
TRAINED = {
    "temperatures": trained("softcap(dot(q, k) * heat[h], 30)", more=("input heat: f32[Hkv * G]",), d=320),
    "weights": trained(normalize="none", dv=72),
    "no_whole_panels": trained(d=272, dv=304),
    "packed_weights": trained(normalize="none", packed=True, d=320),
    "softpick": trained(normalize="softpick", dv=320),
    "packed_softpick": trained(normalize="softpick", packed=True),
    "dropout": trained(normalize=DROPOUT, more=DRAWS, d=320),
    "packed_dropout": trained("softcap(dot(q, k) / 20, 30)", DROPOUT, more=DRAWS, packed=True),
    "dropout_in_gaps": trained(normalize=DROPOUT, more=DRAWS, mask="kv_idx % 3 != 1 and window(40, 9)"),
    "sticks": trained(normalize="stick_breaking", d=288),
    "capped_softpick": trained("softcap(dot(q, k) / 20, 30)", "softpick"),
    "sink_alone": trained(normalize="softmax(sink = s[h])", more=("input s: f32[Hkv * G]",), grads="s"),
    "bias": trained("dot(q, k) / 20 + w[h, kv_idx]", more=("input w: f32[Hkv * G, N]",), grads="q, k, v, w"),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", some_by_day(TRAINED, of=3))
def test_other_forms_of_wide_heads_have_gradients(kind: str) -> None:
    made = subject_with_changes(TRAINED[kind])
    for seed, sizes in enumerate(((1, 1, 2, 33, 100), (2, 2, 2, 70, 40))):
        dims = dict(zip(("B", "Hkv", "G", "M", "N"), sizes, strict=True))
        if kind.startswith("packed"):
            dims["N"] = dims["M"]
        found = check(made, Case(dims=dims, seed=seed, config=seed % len(made.configs)), fills=("nan",))
        assert found.ok, (dims, found.message)


#: By name: the attention, what is changed in its text, and the gradient that shows it.
BUGS_OF_FORMS: Mapping[str, tuple[str, str, str, str]] = {
    "no_slope": ("temperatures", "(1.0f - t * t)", "1.0f", "dq|dk"),
    "a_sign_is_lost": ("softpick", "copysignf(p, value)", "p", "dq|dk"),
    "dp_of_all": ("dropout", "dp * keep_scale : 0.0f", "dp * keep_scale : dp", "dq|dk"),
    "o_of_all": ("dropout", "& 1 ? scores[j][i] : 0.0f", "& 1 ? scores[j][i] : scores[j][i]", "o"),
    "the_others_stick_is_whole": ("sticks", "alpha[r] = exp2_(-broken);", "alpha[r] = 1.0f;", "o"),
    "a_part_of_the_rest_is_lost": ("sticks", "rest[r] += broken;", "", "d"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bug", BUGS_OF_FORMS)
def test_what_is_wrong_in_other_forms_shows(bug: str) -> None:
    kind, text, instead, told = BUGS_OF_FORMS[bug]
    (module,) = modules_of(TRAINED[kind])
    files = render_files(module, path="a.attn", sha256="")
    changed = {name: file.replace(text, instead) for name, file in files.items() if text in file}
    assert changed
    dims = {"B": 1, "Hkv": 1, "G": 2, "M": 70, "N": 200}
    found = check(subject_of(module, changed), Case(dims=dims), fills=("nan",))
    assert not found.ok
    assert any(found.message.startswith(part) for part in told.split("|")), found.message


#: By name: what is changed in the text of the causal kernel, and what shows.
BUGS: Mapping[str, tuple[tuple[tuple[str, str], ...], str]] = {
    "the_other_k_is_not_waited_for": (
        (("K_STAGES < STAGES ? last_stage : next_stage", "next_stage"),),
        "may still read|has not arrived yet",
    ),
    "the_first_part_of_k_is_given_back_early": (
        (("wgmma_wait<1>();\n        give_back(own, K_PART);", "give_back(own, K_PART);"),),
        "may still read",
    ),
    "the_second_part_of_k_is_not_waited_for": (
        (("wait(own, K_PART + 1);", ""),),
        "has not arrived yet",
    ),
    "rows_of_the_first_tile_twice": (
        (("(row_tiles - 1 - tile % row_tiles)", "max(row_tiles - 1 - tile % row_tiles, 1)"),),
        "is off|are off",
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bug", BUGS)
def test_what_is_wrong_between_warpgroups_shows(bug: str) -> None:
    changes, told = BUGS[bug]
    found = check(
        subject_with_changes(KINDS["causal"], *changes),
        Case(dims={"B": 1, "Hkv": 2, "G": 1, "M": 200, "N": 300}),
        fills=("nan",),
    )
    assert not found.ok
    assert any(part in found.message for part in told.split("|")), found.message
