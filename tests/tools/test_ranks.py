"""The tables of `attnc bench --ranks`, from what a run writes: whole, and cut off."""

import json
from pathlib import Path

import torch

from attnc.build import front, plan_program
from attnc.distributed.derive import Form, derive
from attnc.model.resolve import resolve
from attnc.model.variants import variants
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from tools.bench.ranks import CELLS, SPEC, RanksBenchmark, documents
from tools.bench.ranks_peers import GROUPS, PEERS
from tools.bench.ranks_report import markdown

OURS = {
    "strategy": "need", "groups": 4, "owners": "longest first", "imbalance": 1.0, "bytes": 780_140_544,
    "least_bytes": 780_140_544,
    "flops": 3.5e13, "same_bits": True, "gradients_differ": 4e-3,
    "T1 forward": 64.0, "T4 forward": 16.5, "T1 forward + backward": 240.0, "T4 forward + backward": 62.0,
    "T1 slowest forward": 66.0,
}  # fmt: skip


def test_tables_say_what_was_measured(tmp_path: Path) -> None:
    parts = {
        "planning": {"causal 64k": {"2": 0.41, "4": 0.523}},
        "links": {"all_gather of 8 MB a rank": 123.4},
        "attnc: causal 64k": {**OURS, "copied": {**OURS, "T4 forward": 16.25}},
        "ulysses + cuDNN: causal 64k": {"T4 forward": 20.0, "T4 forward + backward": 70.0},
        "torch Flex CP: causal 64k": {"error": "RuntimeError: no"},
        "torch Flex CP": {"error": "TimeoutError: late"},
    }
    data = {"machine": {}, "ranks": 4, "parts": parts}
    text = markdown(data)
    assert (
        "| causal 64k | 64.000 ms | 16.500 ms | 97.0 % | 100.0 % | 530 | ulysses + cuDNN 20.000 ms | 1.21x |"
        in text
    )
    assert "| causal 64k, copied | 64.000 ms | 16.250 ms | 98.5 % | 101.5 % | 538 |" in text
    assert "| causal 64k | 240.000 ms | 62.000 ms | 96.8 % | 494 |" in text
    assert "| causal 64k | need | 4 | longest first | 1.000 | 780.1 MB | 1.00x | True | 4e-03 apart |" in text
    assert "| causal 64k | 0.41 | 0.52 |" in text
    assert "| ulysses + cuDNN | 20.00 / 70.00 |\n| torch Flex CP | no (1) |\n\n1. RuntimeError: no\n" in text
    assert "### What did not end\n\n- torch Flex CP: TimeoutError: late\n" in text
    assert "- all_gather of 8 MB a rank: 123.4" in text
    benchmark = RanksBenchmark(ranks=4, seconds=60, out=tmp_path)
    table, written, *plot = benchmark.page(data, {}).write(tmp_path, benchmark.stem)
    assert table.read_text(encoding="utf-8") == text
    assert json.loads(written.read_text(encoding="utf-8")) == data
    assert [made.stat().st_size > 1000 for made in plot] in ([], [True])  # without matplotlib, and with it


def test_a_run_that_was_cut_off_has_its_part() -> None:
    part = {name: x for name, x in OURS.items() if not name.startswith("T1")}
    data = {"machine": {}, "ranks": 4, "parts": {"attnc: causal 64k": part}}
    assert "| causal 64k | - | 16.500 ms | - | 530 | none can | - |" in markdown(data)


def test_cells_are_what_ranks_can_run() -> None:
    program = front(SPEC)
    assert {cell.mask for cell in CELLS} == {attention.name for attention in program.attentions}
    assert plan_program(program).warnings == ()
    for attention in program.attentions:
        form: Form = "keys" if attention.lengths else "rows"
        made = derive(program, attention, variants(program, attention)[0].params, "triton", form)
        derived = plan_program(resolve(parse(Source("derived.attn", made.text)), prelude()))
        assert derived.warnings == ()
        assert (derived.modules[0].backward is None) == (form == "keys")
    assert {name for group in GROUPS for name in group} == set(PEERS)


def test_documents_are_long_and_sorted() -> None:
    numbers = documents(65536)
    assert len(numbers) == 65536
    assert torch.equal(numbers, numbers.sort().values)
    counts = torch.bincount(numbers)
    assert 4000 < float(counts.float().mean()) < 9000
