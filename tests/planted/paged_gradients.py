"""Bugs planted in how gradients take rows from pages, and sum them by page."""

from __future__ import annotations

from tests.planted.bug import TritonBug

BUGS: tuple[TritonBug, ...] = (
    TritonBug(
        name="the last sequence's alone",
        attention="paged_training",
        story="a page was thought to be of one sequence, so that nothing had to be added",
        anchor="sums.index_add_(0, places, given)",
        patch="sums[places] = given",
    ),
    TritonBug(
        name="rows behind the end are anything",
        attention="paged_training",
        story="no entry of a table names them, it was thought: but the last page does",
        anchor="kept = (begins < keys[:, None])",
        patch="kept = (begins <= keys[:, None])",
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
        anchor="gather_rows(source, numbers, made[at], axes)",
        patch="gather_rows(sources[0], numbers, made[at], axes)",
    ),
)
