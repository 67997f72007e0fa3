"""Bugs planted in how gradients take rows from pages, and sum them by page."""

from __future__ import annotations

from tests.planted.bug import TritonBug

BUGS: tuple[TritonBug, ...] = (
    TritonBug(
        name="the last sequence's alone",
        attention="paged_training",
        story="a page was thought to be of one sequence, so that nothing had to be added",
        anchor="sums.index_add_(0, numbers.view(-1), given)",
        patch="sums[numbers.view(-1)] = given",
    ),
    TritonBug(
        name="rows behind the end are anything",
        attention="paged_training",
        story="no entry of a table names them, it was thought: but the last page does",
        anchor='Made("dk", like="k", type="f32", zero=True)',
        patch='Made("dk", like="k", type="f32")',
    ),
    TritonBug(
        name="pages of another size",
        attention="paged_training",
        story="tables were read by the tiles of a kernel",
        anchor='table="block_table", page=16',
        patch='table="block_table", page=64',
    ),
    TritonBug(
        name="the length of the next sequence",
        attention="paged_training",
        story="lengths were taken for ends",
        anchor='length="at(kv_len, b)"',
        patch='length="at(kv_len, b + 1)"',
    ),
    TritonBug(
        name="keys in the place of values",
        attention="paged_training",
        story="one loop copied both, and looked up one name",
        anchor="gather_rows(tensors[source], numbers, made[at], self.axes[name])",
        patch="gather_rows(tensors[pairs[0][0]], numbers, made[at], self.axes[name])",
    ),
)
