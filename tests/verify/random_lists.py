"""Random specs whose masks list blocks or single keys, beside whatever else a random spec says."""

from __future__ import annotations

import re

from hypothesis import assume
from hypothesis import strategies as st

from tests.verify.random_specs import HOPPER, is_lowered, specs

#: Schedules for blocks of queries, and for single queries whose heads fill a tile.
_WALKS = (
    "schedule spec for triton {{\n  tile.q = 16, tile.kv = 16\n"
    "  backward {{ tile.q = 16, tile.kv = 16 }}\n}}\n"
)
_SELECTS = (
    "schedule spec for triton {{\n  loops = [kv], pack = gqa, tile.q = 16, tile.kv = 16\n"
    "  backward {{ tile.q = 16, tile.kv = {keys} }}\n}}\n"
)

_TOKENS = "schedule spec for cuda.sm_90a {{\n  loops = [kv], pack = gqa{split}\n}}\n"
_UNITED = "schedule spec for cuda.sm_90a {{\n  loops = [kv], pack = gqa, lists = union{more}\n}}\n"


@st.composite
def listed_specs(draw: st.DrawFn) -> str:
    """The text of a drawn spec, for Triton, with a list in its mask: for blocks of queries, for several
    queries, or for each one.
    """
    text = draw(specs(depth=1))
    head, _, _ = text.partition("\nschedule ")
    shared = {"B": "b", "Hkv": "h // G"} if "Hkv" in head else {"B": "b"}
    named = draw(st.sets(st.sampled_from(sorted(shared))))
    selects = draw(st.booleans())
    rows = draw(st.sampled_from((1, 1, 3) if selects else (16, 32)))
    keys = draw(st.sampled_from((1, 1, 4, 16) if selects else (16, 48)))
    indices = ", ".join((*(shared[axis] for axis in sorted(named)), f"q_idx // {rows}"))
    counted = draw(st.sampled_from(("", "", ", count = 3")))
    listed = f"listed(chosen[{indices}], keys = {keys}{counted})"
    if (mask := re.search(r"\n  mask = (.*)", head)) is not None:
        head = head.replace(mask[0], f"\n  mask = {listed} and ({mask[1]})")
    else:
        head = head.replace("\n  normalize", f"\n  mask = {listed}\n  normalize")
    axes = ", ".join((*sorted(named), "R_rows", "S_entries"))
    kind = draw(st.sampled_from(("i32", "i64")))
    head = head.replace("\n  score =", f"\n  input chosen: {kind}[{axes}]\n  score =", 1)
    schedule = _SELECTS.format(keys=draw(st.sampled_from((16, 32)))) if selects else _WALKS.format()
    found = f"{head}\n{schedule}"
    assume(is_lowered(found))
    return found


@st.composite
def listed_rows_specs(draw: st.DrawFn) -> str:
    """The text of a drawn spec, for Hopper, with lists of single keys in its mask: beside whatever mask,
    lengths and storages a random spec has.
    """
    drawn = specs(targets=(HOPPER,), with_gradients=False, depth=1)
    head, _, _ = draw(drawn).partition("\nschedule ")
    score = re.search(r"\n  (?:score|weight) = (.*)", head)
    assert score is not None
    head = head.replace(score[1], draw(st.sampled_from(("dot(q, k) / 8", "softcap(dot(q, k), 9)"))), 1)
    packed = re.search(r"input q: .*ragged\((\w+)\)", head)
    row = f"{packed[1]}[b] + q_idx" if packed else "q_idx"
    of_rows = draw(st.sampled_from((row, "q_idx // 3", "(q_idx + 1) % 4", "")))
    shared = {"B": "b", "Hkv": "h // G"} if "Hkv" in head else {"B": "b"}
    named = sorted(draw(st.sets(st.sampled_from(sorted(shared)))))
    places = [*(shared[axis] for axis in named), *([of_rows] if of_rows else [])]
    axes = [*named, *(["R_rows"] if of_rows else []), "S_entries"]
    kind, counted = draw(st.sampled_from(("i32", "i64"))), draw(st.sampled_from(("", "", ", count = 3")))
    listed = f"listed(chosen{'[' + ', '.join(places) + ']' if places else ''}, keys = 1{counted})"
    if (mask := re.search(r"\n  mask = (.*)", head)) is not None:
        head = head.replace(mask[0], f"\n  mask = {listed} and ({mask[1]})")
    else:
        head = head.replace("\n  normalize", f"\n  mask = {listed}\n  normalize")
    head = head.replace("\n  score =", f"\n  input chosen: {kind}[{', '.join(axes)}]\n  score =", 1)
    split = draw(st.sampled_from(("", ", split.kv = auto", ", split.kv = 3")))
    found = f"{head}\n{_TOKENS.format(split=split)}"
    assume(is_lowered(found))
    return found


@st.composite
def united_specs(draw: st.DrawFn) -> str:
    """The text of a drawn spec, for Hopper, whose queries share tiles over the union of their lists, of
    single keys or of blocks: beside whatever mask, lengths and storages a random spec has, and beside blocks
    also its score and softmax.
    """
    drawn = specs(targets=(HOPPER,), with_gradients=False, depth=1).filter(lambda text: "G" in text)
    head, _, _ = draw(drawn).partition("\nschedule ")
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from((2, 3, 8, 16, 20, 32)))
    head = head.replace("Hkv * G", str(kv_heads * group))
    head = re.sub(r"\bG\b", str(group), re.sub(r"\bHkv\b", str(kv_heads), head))
    keys = draw(st.sampled_from((1, 16, 16, 32, 48, 64)))
    if keys == 1:
        score = re.search(r"\n  (?:score|weight) = (.*)", head)
        assert score is not None
        head = head.replace(score[1], draw(st.sampled_from(("dot(q, k) / 8", "softcap(dot(q, k), 9)"))), 1)
    packed = re.search(r"input q: .*ragged\((\w+)\)", head)
    row = f"{packed[1]}[b] + q_idx" if packed else "q_idx"
    named = sorted(draw(st.sets(st.sampled_from(("B", "heads")))) - ({"B"} if packed else set()))
    places = [*({"B": "b", "heads": f"h // {group}"}[axis] for axis in named), row]
    axes = [*(str(kv_heads) if axis == "heads" else axis for axis in named), "R_rows", "S_entries"]
    kind, counted = draw(st.sampled_from(("i32", "i64"))), draw(st.sampled_from(("", "", ", count = 3")))
    listed = f"listed(chosen[{', '.join(places)}], keys = {keys}{counted})"
    if (mask := re.search(r"\n  mask = (.*)", head)) is not None:
        head = head.replace(mask[0], f"\n  mask = {listed} and ({mask[1]})")
    else:
        head = head.replace("\n  normalize", f"\n  mask = {listed}\n  normalize")
    head = head.replace("\n  score =", f"\n  input chosen: {kind}[{', '.join(axes)}]\n  score =", 1)
    more = draw(st.sampled_from(("", ", split.kv = auto", ", split.kv = 3", ", split.kv = fixed(64)")))
    more += draw(st.sampled_from(("", ", overlap = true"))) if keys > 1 else ""
    found = f"{head}\n{_UNITED.format(more=more)}"
    assume(is_lowered(found))
    return found
