"""Random specs whose masks list blocks or single keys, beside whatever else a random spec says."""

from __future__ import annotations

import re

from hypothesis import assume
from hypothesis import strategies as st

from tests.verify.random_specs import is_lowered, specs

#: Schedules for blocks of queries, and for single queries whose heads fill a tile.
_WALKS = (
    "schedule spec for triton {{\n  tile.q = 16, tile.kv = 16\n"
    "  backward {{ tile.q = 16, tile.kv = 16 }}\n}}\n"
)
_SELECTS = (
    "schedule spec for triton {{\n  loops = [kv], pack = gqa, tile.q = 16, tile.kv = 16\n"
    "  backward {{ tile.q = 16, tile.kv = {keys} }}\n}}\n"
)


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
