"""Tables of dispatch: the fastest choice by device and sizes, measured once and kept beside the specs.

One mechanism for every choice that depends on sizes (FlashDecoding++, arXiv 2311.01282, section 5): among
the implementations of a projection by M, and among the schedules of an attention by M, N and batch times
heads. `specs/tuned/<spec>.dispatch.json` is written by `attnc tune` and committed; the compiler embeds the
rows in the generated text, so that nothing is measured when a kernel is imported or called.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from attnc.expr.construct import ZERO
from attnc.files import update_text
from attnc.model.dtypes import DType
from attnc.model.tensors import Role
from attnc.model.variants import variant_name
from attnc.plan import ir
from attnc.plan.projection import ProjectionModule
from attnc.plan.signature import feature
from attnc.plan.targets import target_of
from attnc.source import Source
from attnc.tuned.choices import read_measured, version_of

FORMAT = 1
#: What a projection is chosen by, and an attention.
PROJECTION_SIZES = ("M",)
ATTENTION_SIZES = ("M", "N", "BH")
#: What a target is chosen by: whether gradients are wanted is 0 or 1.
TARGET_SIZES = (*ATTENTION_SIZES, "grad")
#: The target of a table that picks among targets.
ANY_TARGET = "any"
#: What tables look at, and what a row of each has to say; of projections, all knobs of a config.
_SAYS = {PROJECTION_SIZES: (), ATTENTION_SIZES: ("schedule",), TARGET_SIZES: ("target",)}
#: Rows of a call up to which keys of 8 bits are converted in tiles, where another schedule converts them
#: before; and the most bytes that it may take for them, by steps of batch times heads. Measured on an H200.
TILES_ROWS, MOST_CONVERTED, _HEADS = 256, 1 << 30, (16, 64, 256, 1024)
#: Tiles of rows from which on blocks of all segments of their rows are as fast as blocks of one: 0.75 for
#: each multiprocessor of a Hopper GPU, whose kernels alone have both. Measured on an H200. Rows are written
#: when a spec is compiled, for GPUs of 132 multiprocessors: one with fewer (114, 78) is full a little sooner.
#: Functions (`api.fastest`, `adapters.pages`) ask the GPU at hand instead.
_BUSY = 0.75 * 132
#: Queries of a call that are few: decode kernels take them.
_FEW = 16
#: Of more queries, for Hopper: how many there may be, where heads fill tiles and where each has its own, and
#: of how many tiles of rows of all heads; and what `api.fastest` says of when such tiles share keys, of an
#: H200, whose number of multiprocessors rows keep on every GPU.
_CHUNKS, _PARTS, _CHUNK_TILES = (128, 256, 512), (32, 64), (16, 32, 64, 96)
PROCESSORS, SHARED_ROWS, ROUNDED, BEGUN, JOINED, CROWDED = 132, 128, 1.03, 800, 9, 26
#: Queries of a call that have tiles of their own, where others share them over the union of their lists. With
#: shared ones steps of decoding take longer, and 4,096 queries a third of the time. Measured on an H200.
ALONE = 256
#: The same where lists name blocks, of latents; and where tiles of several queries share the blocks of their
#: lists out among splits, and each query alone has Triton's kernels. 8 queries of one sequence take 10 us by
#: these and 11 to 13 together, 32 take 19 and 14 to 21, and 128 take 52 and 26 to 44 (NSA, 64 heads on 4,
#: 16,384 keys, lists that share nothing or 90 %).
BLOCKS_ALONE, FEW_ALONE = 128, 8
#: Packed queries whose tiles share out their blocks: 64 of one sequence take 54 us unsplit and 33 split, and
#: 64 of as many sequences 42 and 49.
SPLIT_QUERIES = 64
#: The largest sizes that a row admits, and the label of the schedule that it picks.
LabelRows: TypeAlias = tuple[tuple[tuple[int | None, ...], str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """limits: the largest value of each size for which the choice holds, None for any; choice: knobs by their
    text; microseconds: median of one call at the largest of the measured sizes that they admit.
    """

    limits: tuple[int | None, ...]
    choice: Mapping[str, str]
    microseconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceTable:
    """The choices for one variant on one device: the first row that admits the sizes decides, the last admits
    all.

    sizes: what is looked at; notes: what the measurement found worth saying, one line each.
    """

    name: str
    target: str
    variant: str
    device: str
    toolchain: str
    sizes: tuple[str, ...]
    rows: tuple[TableRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        return (self.name, self.target, self.variant, self.device, self.toolchain)


def load_tables(source: Source) -> tuple[ChoiceTable, ...]:
    """Returns the tables of a file. Raises DiagnosticError (E0603) when it is not such a file."""
    return read_measured(source, FORMAT, lambda data: tuple(_table(entry) for entry in data["tables"]))


def merge_tables(path: Path, tables: Sequence[ChoiceTable]) -> None:
    """Adds tables to a file, in place of those with their keys; no file is made for none.

    Raises DiagnosticError where the file is malformed.
    """
    if tables:
        update_text(path, lambda: dump_tables([*known_tables(path), *tables]))


def known_tables(path: Path) -> tuple[ChoiceTable, ...]:
    """Returns the tables of a file, none where there is no file. Raises DiagnosticError where it is
    malformed.
    """
    if not path.exists():
        return ()
    return load_tables(Source(str(path), path.read_text(encoding="utf-8", errors="replace")))


def dump_tables(tables: Iterable[ChoiceTable]) -> str:
    """Returns the text of a file with these tables, a line for each row; of two with one key, the later one
    stays.
    """
    newest = {table.key: table for table in tables}
    entries = []
    for _, table in sorted(newest.items()):
        head = {
            "name": table.name,
            "target": table.target,
            "variant": table.variant,
            "device": table.device,
            "toolchain": table.toolchain,
            "sizes": list(table.sizes),
            "notes": list(table.notes),
        }
        rows = ",\n".join(f"      {json.dumps(_entry(row))}" for row in table.rows)
        entries.append(f'    {json.dumps(head)[:-1]},\n     "rows": [\n{rows}\n    ]}}')
    body = ",\n".join(entries)
    return f'{{\n  "format": {FORMAT},\n  "tables": [\n{body}\n  ]\n}}\n'


def newest(tables: Iterable[ChoiceTable], name: str, target: str, variant: str) -> dict[str, ChoiceTable]:
    """Maps a device to the table of this variant; of several toolchains the newest one speaks."""
    found: dict[str, ChoiceTable] = {}
    for table in tables:
        if (table.name, table.target, table.variant) == (name, target, variant):
            other = found.get(table.device)
            if other is None or version_of(table.toolchain) >= version_of(other.toolchain):
                found[table.device] = table
    return dict(sorted(found.items()))


def projection_rows(
    module: ProjectionModule, tables: Iterable[ChoiceTable]
) -> dict[str, tuple[tuple[int | None, int], ...]]:
    """Returns the table that a module embeds: for each device (largest M, position in its configs), the last
    open.

    Rows whose config the schedule no longer offers are dropped.
    """
    positions = {json.dumps(config.texts(), sort_keys=True): at for at, config in enumerate(module.configs)}
    found: dict[str, tuple[tuple[int | None, int], ...]] = {}
    for device, table in newest(tables, module.name, module.target, module.variant.name).items():
        known = [
            (row.limits[0], at)
            for row in table.rows
            if (at := positions.get(json.dumps(dict(row.choice), sort_keys=True))) is not None
        ]
        if known:
            found[device] = (*known[:-1], (None, known[-1][1]))
    return found


def schedule_rows(
    family: Sequence[ir.Module], tables: Iterable[ChoiceTable]
) -> dict[tuple[str, str], LabelRows]:
    """Returns the table that the dispatcher of an attention's schedules embeds: (device, variant without
    label) -> rows.
    """
    labels = {module.label for module in family}
    tables = tuple(tables)
    found: dict[tuple[str, str], LabelRows] = {}
    for variant in dict.fromkeys(plain_name(module) for module in family):
        attention, target = family[0].variant.attention.name, family[0].target
        for device, table in newest(tables, attention, target, variant).items():
            rows = tuple(
                (row.limits, row.choice["schedule"]) for row in table.rows if row.choice["schedule"] in labels
            )
            if rows and all(limit is None for limit in rows[-1][0]):
                found[device, variant] = rows
    return found


def target_rows(
    modules: Sequence[ir.Module], tables: Iterable[ChoiceTable]
) -> dict[tuple[str, str], LabelRows]:
    """Returns the table by which an attention picks a target: (device, variant without label) -> rows. Rows
    of targets that do not have the variant are dropped.
    """
    tables = tuple(tables)
    found: dict[tuple[str, str], LabelRows] = {}
    for variant in dict.fromkeys(plain_name(module) for module in modules):
        known = {module.target for module in modules if plain_name(module) == variant}
        for device, table in newest(tables, modules[0].variant.attention.name, ANY_TARGET, variant).items():
            picked = ((row.limits, row.choice["target"]) for row in table.rows)
            if rows := tuple(row for row in picked if row[1] in known):
                found[device, variant] = rows
    return found


def guess_rows(family: Sequence[ir.Module]) -> LabelRows:
    """Returns rows for a device without measurements: decode kernels up to as many rows as a tile has, and
    for chunks beside many keys, then the first other schedule; where one converts keys and values of 8 bits
    in tiles and another before, the first for few rows, and for more keys than should be converted, unless
    the other alone has gradients; of two that decode in segments, the one that shares them out while tiles of
    rows leave multiprocessors idle; of two over lists, the one whose queries have tiles of their own for few
    of them.
    """
    anything: tuple[int | None, ...] = (None,) * len(ATTENTION_SIZES)
    others = [module for module in family if module.kernel.structure != "decode"]
    decode = next((module.label for module in family if module.kernel.structure == "decode"), None)
    if not others:
        return (*_guess_segments(family), *_guess_unions(family), (anything, family[0].label))
    rows: LabelRows = () if decode is None else (((_FEW, *anything[1:]), decode), *_guess_chunks(family))
    before = next((module for module in others if module.conversion is not None), None)
    tiles = next((module for module in others if module.conversion is None), None)
    if before is None or before.conversion is None or tiles is None or not _reads_narrow(tiles):
        return (*rows, (anything, others[0].label))
    if before.backward is not None and tiles.backward is None:  # any call may want gradients
        return (*rows, (anything, before.label))
    key_bytes = sum(2 * feature(tensor.made.tensor) for tensor in before.conversion.tensors)
    stairs = [((None, MOST_CONVERTED // key_bytes // heads, heads), before.label) for heads in _HEADS]
    return (*rows, ((TILES_ROWS, *anything[1:]), tiles.label), *stairs, (anything, tiles.label))


def _guess_chunks(family: Sequence[ir.Module]) -> LabelRows:
    """Returns rows for chunks of prompts beside many keys, whose tiles of rows would leave most of a Hopper
    GPU idle: its decode kernel takes these, where queries see all keys up to theirs, and it lacks no
    gradients, which calls of so many queries may want.
    """
    decode = next(module for module in family[::-1] if module.kernel.structure == "decode")
    other = next(module for module in family if module.kernel.structure != "decode")
    kernel = decode.kernel
    has_segments = decode.variant.attention.segment is not None
    is_shared = isinstance(kernel, ir.Decode) and kernel.split is not None and not has_segments
    if not target_of(decode.target).decodes_chunks or not is_shared or _reads_narrow(decode):
        return ()
    if kernel.configs[0].tile_q != SHARED_ROWS:
        return ()
    lacks_gradients = decode.backward is None and other.backward is not None
    if lacks_gradients or other.kernel.regions.loops[0].start != ZERO:
        return ()
    parts = _PARTS if _is_grouped(decode) else ()  # rows of several heads fill a tile
    steps: list[tuple[int, LabelRows]] = []
    for tiles in _CHUNK_TILES:
        most = ((queries, None, SHARED_ROWS * tiles // queries) for queries in (*parts, *_CHUNKS))
        rows = tuple((limits, decode.label) for limits in most)
        steps.append((_count_spared_keys(tiles), rows))
    for queries in parts:  # of any number of heads, for tiles of one are as empty
        keys = _count_spared_keys(PROCESSORS * queries // SHARED_ROWS)
        steps.append((keys, (((queries, None, None), decode.label),)))
    return tuple(row for keys, rows in sorted(steps) for row in (((None, keys, None), other.label), *rows))


def _count_spared_keys(tiles: int) -> int:
    """Returns the keys up to which tiles of rows of one head, as many as there are multiprocessors at most,
    are as fast as so many whose programs share keys.
    """
    begun = CROWDED * tiles if 2 * tiles > PROCESSORS else BEGUN + JOINED * tiles
    return int(PROCESSORS * begun / (PROCESSORS - ROUNDED * tiles))


def _is_grouped(module: ir.Module) -> bool:
    attention = module.variant.attention
    return attention.q.size(Role.HEAD) != attention.k.size(Role.HEAD)


def _guess_segments(family: Sequence[ir.Module]) -> LabelRows:
    """Returns rows for a kernel whose blocks have a segment of keys each, beside one with all segments."""
    apart = [module for module in family if isinstance(module.kernel, ir.Decode) and module.kernel.split]
    whole = [module for module in family if isinstance(module.kernel, ir.Decode) and module.kernel.segments]
    if not apart or not whole:
        return ()
    keys, rows = whole[0].variant.attention.segment_keys, apart[0].kernel.configs[0].tile_q
    most = int(_BUSY * rows) - 1  # query rows of all heads and sequences
    stairs = (2**step for step in range(most.bit_length()))
    few = (((queries, None, most // queries), apart[0].label) for queries in stairs)
    return (((None, keys, None), whole[0].label), *few)


def _guess_unions(family: Sequence[ir.Module]) -> LabelRows:
    """Returns rows for a kernel whose queries share tiles over the union of their lists, beside one where
    each has its own; and for one that shares out what lists name, beside one that does not.
    """
    united = [module for module in family if _unites(module)]
    apart = [module for module in family if module not in united]
    split = [module for module in united if isinstance(module.kernel, ir.Decode) and module.kernel.split]
    if 0 < len(split) < len(united):
        return (((SPLIT_QUERIES, None, None), split[0].label),)
    if not united or not apart:
        return ()
    most = BLOCKS_ALONE if united[0].listed_rows is None else ALONE
    return (((most, None, None), apart[0].label),)


def _unites(module: ir.Module) -> bool:
    made = module.listed_rows or module.lists
    return made is not None and made.queries > 1


def _reads_narrow(module: ir.Module) -> bool:
    return any(
        DType(tensor.dtype).is_narrow for tensor in (module.variant.attention.k, module.variant.attention.v)
    )


def plain_name(module: ir.Module) -> str:
    """Returns the name of the module's variant, whatever its schedule."""
    return variant_name(module.variant.params)


def join_rows(rows: Iterable[TableRow]) -> tuple[TableRow, ...]:
    """Returns the rows of a grid in lexical order of their limits from the last size to the first, as few as
    decide alike: neighbours along the first size with one choice become one, and boxes that decide as the
    next one does are left out.
    """
    boxes: dict[tuple[int | None, ...], list[TableRow]] = {}
    for row in rows:
        box = boxes.setdefault(row.limits[1:], [])
        if box and box[-1].choice == row.choice:
            box.pop()
        box.append(row)
    kept: list[list[TableRow]] = []
    for box in boxes.values():
        same = kept and _decides_alike(kept[-1], box) and _wider(kept[-1][0].limits, box[0].limits)
        kept[-1:] = [box] if same else [*kept[-1:], box]
    found = [row for box in kept for row in box]
    return tuple(row for at, row in enumerate(found) if not _is_idle(row, found[at + 1 :]))


def _is_idle(row: TableRow, later: Sequence[TableRow]) -> bool:
    for other in later:
        if other.choice != row.choice:
            return False
        if _wider((None, *row.limits), (None, *other.limits)):
            return True
    return False


def _decides_alike(one: Sequence[TableRow], other: Sequence[TableRow]) -> bool:
    return [(row.limits[0], row.choice) for row in one] == [(row.limits[0], row.choice) for row in other]


def _wider(inner: Sequence[int | None], outer: Sequence[int | None]) -> bool:
    return all(
        wide is None or (narrow is not None and narrow <= wide)
        for narrow, wide in zip(inner[1:], outer[1:], strict=True)
    )


def _entry(row: TableRow) -> dict[str, Any]:
    return {
        "limits": list(row.limits),
        "choice": dict(row.choice),
        "microseconds": round(row.microseconds, 2),
    }


def _table(entry: Mapping[str, Any]) -> ChoiceTable:
    sizes = tuple(str(size) for size in entry["sizes"])
    if sizes not in _SAYS:
        raise ValueError(f"sizes {entry['sizes']!r} are none that a table looks at")
    rows = tuple(_row(row, len(sizes)) for row in entry["rows"])
    if any(key not in row.choice for row in rows for key in _SAYS[sizes]):
        raise ValueError(f"a row does not say which {_SAYS[sizes][0]}")
    if not rows or any(limit is not None for limit in rows[-1].limits):
        raise ValueError("the last row does not admit all sizes")
    return ChoiceTable(
        name=str(entry["name"]),
        target=str(entry["target"]),
        variant=str(entry["variant"]),
        device=str(entry["device"]),
        toolchain=str(entry["toolchain"]),
        sizes=sizes,
        rows=rows,
        notes=tuple(str(note) for note in entry["notes"]),
    )


def _row(entry: Mapping[str, Any], count: int) -> TableRow:
    limits = tuple(entry["limits"])
    if len(limits) != count or not all(limit is None or type(limit) is int for limit in limits):
        raise ValueError(f"limits {entry['limits']!r} are not {count} sizes")
    return TableRow(
        limits=limits,
        choice={str(key): str(value) for key, value in dict(entry["choice"]).items()},
        microseconds=float(entry["microseconds"]),
    )
