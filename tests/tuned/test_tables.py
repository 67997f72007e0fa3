"""Tables of dispatch: the file, and what of it a projection's module embeds."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from attnc.api import fastest
from attnc.build import add_schedules, compile_program, front, plan_program, schedules_for
from attnc.plan import ir
from attnc.plan.projection import ProjectionModule
from attnc.plan.targets import schedule_for
from attnc.source import Source
from attnc.tuned import tables
from attnc.tuned.tables import (
    ATTENTION_SIZES,
    PROJECTION_SIZES,
    ChoiceTable,
    LabelRows,
    TableRow,
    dump_tables,
    guess_rows,
    join_rows,
    load_tables,
    projection_rows,
    schedule_rows,
)
from tests.model.resolving import resolve_text
from tests.plans import plans_of
from tests.refusals import refused
from tests.tables import choice
from tests.verify.judging import modules_of

EXTEND = Path(__file__).parents[2] / "specs" / "extend.attn"
SPEC = Path(__file__).parents[2] / "specs" / "llama_7b.attn"


@pytest.fixture(scope="module")
def module() -> ProjectionModule:
    return plans_of(SPEC).projections[0]


def table(
    module: ProjectionModule, *rows: tuple[int | None, int], toolchain: str = "triton 3.6.0"
) -> ChoiceTable:
    return ChoiceTable(
        name=module.name,
        target=module.target,
        variant=module.variant.name,
        device="NVIDIA H200",
        toolchain=toolchain,
        sizes=PROJECTION_SIZES,
        rows=tuple(
            TableRow(limits=(limit,), choice=module.configs[at].texts(), microseconds=12.346)
            for limit, at in rows
        ),
        notes=("gemv up to M = 1",),
    )


def test_tables_survive_the_file(module: ProjectionModule) -> None:
    tables = (table(module, (2, 0), (None, 3)),)
    assert load_tables(Source("t.json", dump_tables(tables))) == (
        replace(tables[0], rows=tuple(replace(row, microseconds=12.35) for row in tables[0].rows)),
    )


def test_a_newer_measurement_replaces_the_older(module: ProjectionModule) -> None:
    text = dump_tables([table(module, (None, 1)), table(module, (None, 2))])
    (kept,) = load_tables(Source("t.json", text))
    assert kept.rows[0].choice == module.configs[2].texts()


def test_the_newest_toolchain_speaks_and_the_last_row_is_open(module: ProjectionModule) -> None:
    tables = [
        table(module, (4, 5), (None, 1), toolchain="triton 3.10.0"),
        table(module, (None, 2), toolchain="triton 3.9.1"),
    ]
    assert projection_rows(module, tables) == {"NVIDIA H200": ((4, 5), (None, 1))}


def test_configs_that_are_gone_are_dropped(module: ProjectionModule) -> None:
    gone = TableRow(limits=(8,), choice={"impl": "flat", "tile.n": "7"}, microseconds=1.0)
    known = table(module, (4, 5), (None, 1))
    tables = [replace(known, rows=(known.rows[0], gone, known.rows[1]))]
    assert projection_rows(module, tables) == {"NVIDIA H200": ((4, 5), (None, 1))}


def test_rows_are_embedded(module: ProjectionModule) -> None:
    last = len(module.configs) - 1
    text = Source("t.json", dump_tables([table(module, (2, 0), (None, last))]))
    compiled = compile_program(front(SPEC), "llama_7b.attn", None, text)
    page = next(o.text for o in compiled.outputs if o.path == "qkv_proj/triton/default.py")
    assert (
        f'    # gemv up to M = 2, then conventional\n    "NVIDIA H200": ((2, 0), (None, {last})),\n' in page
    )


def _open_row(count: int, **said: object) -> dict[str, object]:
    return {"limits": [None] * count, "microseconds": 1.0, **said}


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(format=2),
        lambda data: data["tables"][0]["rows"][0].update(limits=[4]),
        lambda data: data["tables"][0]["rows"][0].update(limits=["x"]),
        lambda data: data["tables"][0].update(rows=[]),
        lambda data: data["tables"][0].pop("device"),
        lambda data: data["tables"][0].update(sizes=["K"]),
        lambda data: data["tables"][0].update(sizes=["M", "N", "BH"], rows=[_open_row(3, choice={})]),
        lambda data: data["tables"][0].update(sizes=["M", "N", "BH", "grad"], rows=[_open_row(4, choice={})]),
        lambda data: data["tables"][0]["rows"][0].update(microseconds=10**400),
    ],
)
def test_other_files_are_refused(module: ProjectionModule, change: object) -> None:
    data = json.loads(dump_tables([table(module, (None, 1))]))
    assert callable(change)
    change(data)
    assert refused(load_tables, Source("t.json", json.dumps(data))).code == "E0603"


# --- several schedules of one attention ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def family() -> tuple[ir.Module, ...]:
    return plans_of(EXTEND).modules


def grid(*rows: tuple[tuple[int | None, ...], str]) -> list[TableRow]:
    return [TableRow(limits=limits, choice={"schedule": label}, microseconds=1.0) for limits, label in rows]


def picked(rows: Sequence[TableRow], sizes: tuple[int, ...]) -> str:
    return choice(rows, *sizes)["schedule"]


def test_modules_are_named_after_their_schedules(family: tuple[ir.Module, ...]) -> None:
    assert [module.variant.name for module in family] == ["d128_split", "d128_drafts", "d128_rows"]
    assert [module.label for module in family] == ["split", "drafts", "rows"]


def test_a_device_that_nobody_measured_splits_keys_for_few_rows(family: tuple[ir.Module, ...]) -> None:
    assert guess_rows(family) == (((16, None, None), "split"), ((None, None, None), "rows"))
    assert guess_rows(family[2:]) == (((None, None, None), "rows"),)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("sizes", "label"),
    [
        ((16, 300, 4096), "decode"),
        ((17, 300, 1), "prompt"),  # few keys
        ((17, 2048, 8), "chunk"),
        ((20, 2048, 32), "chunk"),  # Llama-3-8B
        ((64, 1450, 64), "prompt"),
        ((64, 1451, 64), "chunk"),
        ((64, 1451, 65), "prompt"),
        ((128, 8192, 32), "chunk"),
        ((64, 2874, 256), "prompt"),
        ((64, 2875, 256), "chunk"),  # of one head each, their tiles would be half empty
        ((128, 8192, 256), "prompt"),
        ((512, 4096, 16), "chunk"),
        ((512, 4096, 17), "prompt"),
        ((512, 32768, 24), "chunk"),
        ((4096, 32768, 1), "prompt"),
    ],
    ids=str,
)
def test_chunks_beside_many_keys_share_them(sizes: tuple[int, int, int], label: str) -> None:
    def rows_of(mask: str) -> LabelRows:
        program = resolve_text(CHUNKS.format(mask=mask))
        (schedules, *_) = schedules_for(program, "chunks", "cuda.sm_90a")
        return guess_rows(plan_program(add_schedules(program, schedules)).modules)

    def pick(rows: LabelRows) -> str:
        return next(
            picked
            for limits, picked in rows
            if all(most is None or n <= most for n, most in zip(sizes, limits, strict=True))
        )

    assert pick(rows_of("mask = causal")) == label
    assert pick(rows_of("mask = window(99, 0)")) == ("decode" if sizes[0] <= 16 else "prompt")


def test_functions_and_tables_choose_alike() -> None:
    """The one cannot import the other: functions run without the compiler, which needs no torch."""
    names = ("SHARED_ROWS", "ROUNDED", "BEGUN", "JOINED", "CROWDED")
    assert [getattr(tables, name) for name in names] == [getattr(fastest, name) for name in names]


def test_chunks_that_may_want_gradients_have_them() -> None:
    text = CHUNKS.format(mask="mask = causal\n  grad q")
    steps = "schedule chunks for cuda.sm_90a as steps { loops = [kv], pack = gqa, split.kv = auto }"
    modules = modules_of(f"{text}{steps}\nschedule chunks for cuda.sm_90a as rows {{ loops = [q, kv] }}")
    assert [module.backward is None for module in modules] == [True, False]
    assert guess_rows(modules) == (((16, None, None), "steps"), ((None, None, None), "rows"))


CHUNKS = """attention chunks {{
  input q: bf16[B, M, Hkv * G, 128]
  input k, v: bf16[B, N, Hkv, 128]
  score = dot(q, k)
  {mask}
  normalize = softmax
  output o: bf16[B, M, Hkv * G, 128]
}}
"""


@pytest.mark.parametrize(
    ("sizes", "label"),
    [
        ((1, 8192, 128), "decode"),
        ((1, 8192, 48 * 128), "decode"),
        ((1, 8192, 64 * 128), "prompt"),
        ((2, 8192, 48 * 128), "prompt"),
        ((4, 8192, 8 * 128), "decode"),
        ((4096, 4096, 16), "prompt"),
        ((1, 1024, 128), "prompt"),  # one segment has nothing to share
    ],
    ids=str,
)
def test_segments_are_shared_out_while_multiprocessors_idle(sizes: tuple[int, int, int], label: str) -> None:
    """Latents under an absolute order, whose prompts have the kernel that decodes."""
    rows = guess_rows(plans_of(Path(__file__).parents[2] / "specs" / "latent_invariant.attn").modules)
    admits = (
        picked
        for limits, picked in rows
        if all(most is None or n <= most for n, most in zip(sizes, limits, strict=True))
    )
    assert next(admits) == label


CACHE = """attention cache {
  input q: bf16[B, M, Hkv * G, 128]
  input k, v: e4m3[B, N, Hkv, 128] via paged(table, page = 16)
  input table: i32[B, P]
  input lens: i32[B]
  length N = lens[b]
  score = dot(q, k)
  normalize = softmax
  output o: bf16[B, M, Hkv * G, 128]
}
schedule cache for cuda.sm_90a as few { loops = [kv], pack = gqa }
schedule cache for cuda.sm_90a as before { convert = before }
schedule cache for cuda.sm_90a as tiles { convert = tiles }
"""


@pytest.mark.parametrize(
    ("sizes", "label"),
    [
        ((16, 2**20, 2**10), "few"),
        ((17, 1024, 16), "tiles"),
        ((256, 1024, 16), "tiles"),
        ((257, 1024, 16), "before"),
        ((4096, 2**17, 16), "before"),  # 1 GiB of converted keys and values, were each head a KV head
        ((4096, 2**17 + 1, 16), "tiles"),
        ((4096, 2**17, 17), "tiles"),
        ((4096, 2048, 1024), "before"),
        ((4096, 16, 1025), "tiles"),
    ],
)
def test_long_calls_convert_a_cache_before_as_far_as_it_has_room(sizes: tuple[int, ...], label: str) -> None:
    rows = guess_rows(modules_of(CACHE))
    admits = (
        all(most is None or size <= most for size, most in zip(sizes, limits, strict=True))
        for limits, _ in rows
    )
    assert next(found for is_admitted, (_, found) in zip(admits, rows, strict=True) if is_admitted) == label


def test_schedules_that_convert_alike_are_not_told_apart() -> None:
    text = CACHE.replace("convert = tiles", "convert = before, stages = 2")
    assert guess_rows(modules_of(text)) == (((16, None, None), "few"), ((None, None, None), "before"))
    of_16_bits = CACHE.replace("e4m3", "bf16")
    assert guess_rows(modules_of(of_16_bits)) == (((16, None, None), "few"), ((None, None, None), "before"))


def test_calls_beside_a_cache_that_may_want_gradients_have_them() -> None:
    of_rows = CACHE.replace(" via paged(table, page = 16)", "").replace("input table: i32[B, P]", "grad q")
    modules = modules_of(of_rows)
    assert [module.backward is None for module in modules] == [True, False, True]
    assert guess_rows(modules) == (((16, None, None), "few"), ((None, None, None), "before"))


def test_measured_schedules_are_embedded(family: tuple[ir.Module, ...]) -> None:
    known = ChoiceTable(
        name="extend",
        target="triton",
        variant="d128",
        device="NVIDIA H200",
        toolchain="triton 3.6.0",
        sizes=ATTENTION_SIZES,
        rows=tuple(grid(((4, None, None), "split"), ((9, None, None), "gone"), ((None,) * 3, "rows"))),
    )
    rows: LabelRows = (((4, None, None), "split"), ((None, None, None), "rows"))
    assert schedule_rows(family, [known]) == {("NVIDIA H200", "d128"): rows}
    text = Source("t.json", dump_tables([known]))
    page = next(
        output.text
        for output in compile_program(front(EXTEND), "extend.attn", None, text).outputs
        if output.path == "extend/triton/__init__.py"
    )
    assert '    ("NVIDIA H200", (128,)): (\n        ((4, None, None), "split"),\n' in page


def test_joining_rows_changes_no_choice() -> None:
    rows = grid(
        ((1, 1024, 32), "a"), ((4, 1024, 32), "a"), ((None, 1024, 32), "b"),
        ((1, None, 32), "a"), ((4, None, 32), "a"), ((None, None, 32), "b"),
        ((1, 1024, None), "a"), ((4, 1024, None), "b"), ((None, 1024, None), "b"),
        ((1, None, None), "c"), ((4, None, None), "c"), ((None, None, None), "c"),
    )  # fmt: skip
    few = join_rows(rows)
    assert len(few) == 5
    for sizes in ((M, N, BH) for M in (1, 3, 4, 5, 99) for N in (1, 1024, 4096) for BH in (1, 32, 33)):
        assert picked(few, sizes) == picked(rows, sizes)


@pytest.mark.parametrize(
    ("name", "few", "label"), [("selected_rank", 256, "each"), ("selected_prompts", 64, "split")]
)
def test_few_queries_that_select_keys_have_tiles_of_their_own_or_share_out_blocks(
    name: str, few: int, label: str
) -> None:
    text = (Path(__file__).parents[2] / "specs" / f"{name}.attn").read_text(encoding="utf-8")
    spec = text[: text.index("schedule")]
    schedules = schedule_for(resolve_text(spec), name, "cuda.sm_90a")
    rows = guess_rows(modules_of(f"{spec}\n{schedules}"))
    assert rows == (((few, None, None), label), ((None, None, None), "union"))
