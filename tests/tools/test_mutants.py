"""Mutants of kernels: what each operator changes, which are drawn, and what becomes of one."""

from __future__ import annotations

import pytest

from tools.mutants.__main__ import list_table
from tools.mutants.judge import judge
from tools.mutants.operators import OPERATORS, Mutant, list_mutants
from tools.mutants.sample import Draw, Place, draw_mutants, list_places, texts_of

CUDA = """
// i < 7 in a comment is no code
__device__ void add(const Args& args, float* out, int lane, int k_row, int v_row)
{
    long long at = args.stride_km;
    float sum = 0.0f;
    sum = 0.0f;
    for (int i = 0; i < args.N; ++i) {
        if (i == lane)
            continue;
        sum += args.x[at + args.stride_vm - k_row + v_row] * (i > 2 ? 3.0f : 4.0f);
    }
    mbarrier_wait(out, k.parity);
    store(out, sum);
    float scale = exp2(sum);
}
"""
TRITON = '''
def host(a, b):
    return a < b


@triton.jit
def kernel(X, Y, m, BLOCK_M: tl.constexpr, stride_xm, stride_ym):
    """a < b in a docstring is no code."""
    alpha = tl.exp2(m)
    for lo in range(0, stop, BLOCK_M):
        x = tl.load(X + lo.to(tl.int64) * stride_xm, mask=lo < stop, other=0.0)
        alpha = tl.where(x == 0, alpha, x)
    Y += stride_ym
    tl.store(Y, alpha)
'''

#: An operator, and one change of CUDA and one of Triton that it makes: old and new text.
CHANGES = {
    "compare": (("<", "<="), ("<", ">")),
    "bound": (("args.N", "(args.N + 1)"), ("stop", "(stop - 1)")),
    "constant": (("2", "3"), ("0", "1")),
    "arithmetic": (("*", "+"), ("+", "-")),
    "exchange": (
        ("at + args.stride_vm - k_row", "(k_row - at + args.stride_vm)"),
        ("tl.store(Y, alpha)", "tl.store(alpha, Y)"),
    ),
    "index": (("k_row", "v_row"), None),
    "stride": (("stride_km", "stride_vm"), ("stride_xm", "stride_ym")),
    "drop": (("sum += args.x[at + args.stride_vm - k_row + v_row] * (i > 2 ? 3.0f : 4.0f);", ";"), None),
    "drop synchronisation": (("mbarrier_wait(out, k.parity);", ";"), None),
    "drop store": (("store(out, sum);", ";"), ("tl.store(Y, alpha)", "pass")),
    "drop reset": (("sum = 0.0f;", ";"), None),
    "condition": (("(i == lane)", "(!(i == lane))"), ("lo < stop", "True")),
    "leave": (("continue;", "break;"), ("range(0, stop, BLOCK_M)", "range(0 + BLOCK_M, stop, BLOCK_M)")),
    "phase": (("k.parity", "(k.parity ^ 1)"), None),
    "narrow integer": (("long long", "int"), ("lo.to(tl.int64)", "lo")),
    "narrow float": (
        ("exp2(sum)", "__uint_as_float(__float_as_uint(exp2(sum)) & 0xffff0000u)"),
        ("tl.exp2(m)", "(tl.exp2(m)).to(tl.bfloat16).to(tl.float32)"),
    ),
    "lane": (("store(out, sum);", "if (!(threadIdx.x % 32 == 5)) { store(out, sum); }"), None),
    "row": (None, ("tl.exp2(m)", "tl.where(tl.arange(0, BLOCK_M) == 11, 0.0, tl.exp2(m))")),
}


def test_every_operator_makes_its_change() -> None:
    assert CHANGES.keys() == OPERATORS.keys()
    found = [list_mutants(name, text) for name, text in (("a.cu", CUDA), ("a.py", TRITON))]
    for operator, changes in CHANGES.items():
        for mutants, change in zip(found, changes, strict=True):
            made = {(mutant.old, mutant.new) for mutant in mutants if mutant.operator == operator}
            assert change is None or change in made, (operator, made)


def test_a_mutant_changes_its_place_alone() -> None:
    for name, text in (("a.cu", CUDA), ("a.py", TRITON)):
        for mutant in list_mutants(name, text):
            made = mutant.apply(text)
            assert made != text
            assert made.startswith(text[: mutant.start])
            assert made.endswith(text[mutant.stop :])
            assert text.splitlines()[mutant.line - 1].strip() != ""


def test_neither_comments_nor_host_code_are_changed() -> None:
    assert not [m for m in list_mutants("a.cu", CUDA) if m.line == 2]
    assert {m.function for m in list_mutants("a.py", TRITON)} == {"kernel"}
    assert not [m for m in list_mutants("a.py", TRITON) if '"""' in m.old]


def test_a_seed_draws_the_same_mutants_and_takes_phases_in_turn() -> None:
    places = [place for place in list_places(["triton"]) if place.spec in ("causal_gqa", "decode")]
    draws = list(draw_mutants(30, 3, places))
    assert draws == list(draw_mutants(30, 3, places))
    assert draws != list(draw_mutants(30, 4, places))
    assert len(set(draws)) == 30
    assert [draw.phase for draw in draws[:3]] == ["backward", "decode", "forward"]


def test_draws_end_where_there_are_no_more() -> None:
    place = Place(spec="linear", attention="none", variant="none", target="triton")
    assert list(draw_mutants(5, 0, [])) == []
    with pytest.raises(KeyError):
        _ = place.module


#: Of the smallest spec with a schedule for Triton.
PLACE = Place(spec="prefix_lm", attention="prefix_lm", variant="d64", target="triton")


def drawn(old: str, new: str) -> Draw:
    """Returns the mutant that replaces a text which stands once in the module."""
    text = texts_of(PLACE)["d64.py"]
    assert text.count(old) == 1, text.count(old)
    start = len(text[: text.index(old)].encode())
    mutant = Mutant(
        operator="drop",
        file="d64.py",
        function="",
        line=1,
        start=start,
        stop=start + len(old.encode()),
        old=old,
        new=new,
    )
    return Draw(place=PLACE, phase="forward", mutant=mutant)


@pytest.mark.parametrize(
    ("new", "outcome"),
    [("l_new = l + tl.sum(p, 1)", "killed"), ("l_new = nothing", "invalid"), ("l_new = (", "invalid")],
)
def test_what_becomes_of_a_mutant(new: str, outcome: str) -> None:
    verdict = judge(drawn("l_new = l * alpha + tl.sum(p, 1)", new))
    assert verdict.outcome == outcome, verdict


def test_a_table_counts_what_compiles() -> None:
    mutant = {"place": {"target": "triton"}, "phase": "forward", "mutant": {"operator": "drop"}}
    outcomes = ("killed", "fault", "hung", "survived", "invalid")
    lines = list(list_table([{**mutant, "outcome": outcome} for outcome in outcomes]))
    assert [line.split() for line in lines[1:]] == [
        [*name, "5", "3", "1", "1", "75.0", "%"] for name in (["all"], ["triton", "forward"], ["drop"])
    ]
