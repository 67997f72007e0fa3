"""What a plan says of lists of blocks: how loops walk over them, and what is made of them first."""

from __future__ import annotations

from attnc.expr.nodes import Const, Dim, Ref, show
from attnc.plan.ir import Loop
from attnc.plan.ir.list_making import ListMaking
from attnc.plan.ir.lists import ListWalk
from attnc.plan.ir.text import module_text
from tests.plan.planning import planned


def test_the_last_axis_is_along_a_list() -> None:
    made = ListMaking(
        tensor="idx",
        extents=(Dim("B"), Dim("R"), Dim("S")),
        keys=64,
        limit=None,
        rows=64,
        row_axis=1,
    )
    assert made.lines == (Dim("B"), Dim("R"))
    assert (made.by_entry, made.is_distinct) == (False, False)


def test_a_loop_reads_the_line_and_the_stride_of_its_list() -> None:
    """So that what they read is a parameter of the kernel, or published to those that need it."""
    line, stride = Ref("list_line", "int"), Dim("S")
    walked = ListWalk(memory="lists", line=line, stride=stride, block=64)
    assert not walked.gathers
    loop = Loop(start=Const(0), stop=Dim("N"), masked=False, listed=walked)
    assert loop.expressions[-2:] == (line, stride)


def test_a_plan_tells_what_is_walked_over_and_what_is_made() -> None:
    text = module_text(
        planned(
            "listed(idx, rows = 32, keys = 48) and causal",
            inputs=("idx: i32[B, H, R, S]",),
            schedule="  tile.q = 16, tile.kv = 16",
            grads="q, k, v",
        )
    )
    assert "for kv_lo in blocks of 48 of lists[list_line: S + 1] step BLOCK_N" in text
    assert "for q_lo in blocks of 32 of columns[list_line: list_rows + 1] step BLOCK_M" in text
    told = text[text.index("  lists {") :].split("}")[0]
    assert [line.strip() for line in told.strip().splitlines()[1:]] == [
        "tensor = idx",
        "extents = [B, H, R, S]",
        "keys = 48",
        "limit = None",
        "rows = 32",
        "row_axis = 2",
        "by_entry = false",
        "is_distinct = false",
        "queries = 1",
        "places = []",
        "exists = true",
    ]


def test_entries_of_single_keys_are_gathered() -> None:
    module = planned(
        "listed(idx, rows = 1, keys = 1)",
        inputs=("idx: i32[B, M, S] is distinct",),
        schedule="  loops = [kv], pack = gqa, tile.q = 16, tile.kv = 16",
    )
    (loop,) = module.kernel.regions.loops
    assert loop.listed is not None
    assert (loop.listed.block, loop.listed.gathers, show(loop.listed.stride)) == (1, True, "S + 1")
    assert module.lists is not None
    assert (module.lists.by_entry, module.lists.is_distinct) == (True, True)
    assert "for kv_lo in gathered keys of blocks of 1 of lists[list_line: S + 1]" in module_text(module)
