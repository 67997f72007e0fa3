"""Mistakes of page managers, planted one at a time: a place in `attnc.paging`, a piece of its text that
occurs there once, and what stands there instead. Lines are indented as outside of a class.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One mistake. place: `module.Class.method` or `module.function` in `attnc.paging`; seed: of random calls
    that show it.
    """

    name: str
    place: str
    old: str
    new: str
    seed: int = 0


BUGS = (
    Bug(
        name="lists of an append change before its step is made",
        place="cache.PagedCache.append",
        old="""    step = self._make_step(change, counts)
    self._allocator.commit(change)
""",
        new="""    self._entries(change)
    self._allocator.commit(change)
    step = self._make_step(change, counts)
""",
    ),
    Bug(
        name="lists change before the device does",
        place="cache.PagedCache._carry_out",
        old="""        self._publish(places, numbers)
    self._allocator.commit(change)
""",
        new="""        self._allocator.commit(change)
        self._publish(places, numbers)
        return
    self._allocator.commit(change)
""",
        seed=18,
    ),
    Bug(
        name="tables are published before the step is made",
        place="cache.PagedCache._make_step",
        old="    block_table = self.block_table.index_select(0, rows)",
        new="""    self._publish(places, numbers)
    block_table = self.block_table.index_select(0, rows)""",
    ),
    Bug(
        name="pages are copied after tables name them",
        place="cache.PagedCache._make_step",
        old="    if copied:",
        new="""    self._publish(places, numbers)
    if copied:""",
        seed=14,
    ),
    Bug(
        name="tables are written in two operations",
        place="cache.PagedCache._publish",
        old="    self._tables.index_copy_(0, places, numbers)",
        new="""    half = len(places) // 2
    self._tables.index_copy_(0, places[:half], numbers[:half])
    self._tables.index_copy_(0, places[half:], numbers[half:])""",
        seed=25,
    ),
    Bug(
        name="keys stay where values fail",
        place="cache._store",
        old="    if before is not None:",
        new="    if before is None:",
    ),
    Bug(
        name="rows of the step are those before the append",
        place="cache.PagedCache._make_step",
        old="    if entries.of_step:",
        new="    if not entries.of_step:",
    ),
    Bug(
        name="a page that is copied keeps its sharer",
        place="allocator.PageAllocator.commit",
        old="self._release(pages[keep:])",
        new="self._release(pages[keep:] if not new else ())",
        seed=8,
    ),
    Bug(
        name="all that share a last page copy it",
        place="allocator.PageAllocator._page_to_copy",
        old="== 1 + left.get(page, 0)",
        new="== 1",
        seed=10,
    ),
    Bug(
        name="who shares a last page writes into it",
        place="allocator.PageAllocator._page_to_copy",
        old="== 1 + left.get(page, 0)",
        new="<= 2 + left.get(page, 0)",
        seed=8,
    ),
    Bug(
        name="a token is decoded into a page that others share",
        place="allocator.PageAllocator.grow",
        old="sharers[pages[-1]] == 1",
        new="sharers[pages[-1]]",
        seed=8,
    ),
    Bug(
        name="pages of two sequences overlap",
        place="allocator.PageAllocator.grow",
        old="len(free) - taken - wanted : len(free) - taken",
        new="len(free) - max(taken, 1) - wanted : len(free) - max(taken, 1)",
    ),
    Bug(
        name="an append of nothing copies a page",
        place="allocator.PageAllocator._page_to_copy",
        old="if not count or not",
        new="if not",
        seed=14,
    ),
    Bug(
        name="a truncation keeps a page too many",
        place="allocator.PageAllocator.truncate",
        old="-(-length // self._page)",
        new="length // self._page + 1",
    ),
    Bug(
        name="a truncation leaves the length on the device",
        place="cache.PagedCache._entries",
        old="if length != holding.length:",
        new="if length > holding.length or not length:",
    ),
    Bug(
        name="slots of a third page are those of the second",
        place="allocator.PageAllocator._slots",
        old="edit.page(column)",
        new="edit.page(min(column, start // size + 1))",
    ),
    Bug(
        name="a fork shares the list of its parent",
        place="allocator.PageAllocator.commit",
        old="            pages[keep:] = new",
        new="""            pages[keep:] = new
            if change.begun:
                holding.pages = next(x.pages for x in self._holdings.values() if x.pages == pages)""",
    ),
    Bug(
        name="a fork does not count as a sharer",
        place="allocator.PageAllocator.commit",
        old="self._sharers[page] += 1",
        new="self._sharers[page] += not change.begun or not self._sharers[page]",
    ),
    Bug(
        name="rows of freed sequences keep their length",
        place="cache.PagedCache._entries",
        old="if length != holding.length:",
        new="if length > holding.length or keep:",
    ),
    Bug(
        name="free ends the first of several before it looks at the rest",
        place="allocator.PageAllocator.free",
        old="holdings = self.holdings(sequences)",
        new="""holdings = []
    for sequence in sequences:
        holdings.append(self.holding(sequence))
        self._rows.append(holdings[-1].row)""",
    ),
    Bug(
        name="pages that are taken stay in the list",
        place="allocator.PageAllocator.commit",
        old="len(self._free) - change.taken :",
        new="len(self._free) - change.taken + bool(change.copies) :",
        seed=8,
    ),
    Bug(
        name="nowhere is the last page of HND",
        place="cache.PagedCache._bound_slots",
        old="return slots.clamp(-1, last)",
        new="return slots.clamp(-1, last) % (last + 1 - (self.page if self.layout == 'HND' else 0))",
        seed=5,
    ),
    Bug(
        name="rows of HND are heads",
        place="cache.PagedCache._by_slot",
        old="pool.transpose(1, 2)",
        new="pool.reshape(len(pool), self.page, -1, pool.shape[-1])",
        seed=7,
    ),
    Bug(
        name="kept tokens move one by one, the last first",
        place="cache.PagedCache._moved",
        old="""        for pool, rows in zip(pools, moved, strict=True):
            pool[there] = rows
""",
        new="""        for pool in pools:
            for (a, b), (c, d) in reversed(list(zip(zip(*here[1:]), zip(*there[1:])))):
                pool[:, c, d] = pool[:, a, b]
""",
        seed=3,
    ),
    Bug(
        name="kept tokens are counted from the first of all",
        place="allocator.PageAllocator.keep",
        old="self._slot(holding, start + place)",
        new="self._slot(holding, place)",
    ),
    Bug(
        name="kept tokens of the first layer alone",
        place="cache.PagedCache._moved",
        old="(slice(None), slots // self.page",
        new="(slice(1), slots // self.page",
    ),
    Bug(
        name="kept tokens move though others share them",
        place="allocator.PageAllocator.keep",
        old="[(start + at) // self._page]] > 1",
        new="[(start + at) // self._page]] > 2",
        seed=1,
    ),
    Bug(
        name="every layer is the first",
        place="cache.PagedCache.write",
        old="layer, device = self._layer(layer),",
        new="layer, device = 0 * self._layer(layer),",
    ),
)
