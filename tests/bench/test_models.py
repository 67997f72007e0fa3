"""Calls as models make them: what they count, whom they reach, and what is written of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnc.bench import models
from attnc.bench.model_cells import ModelCell, ModelInputs, draw_inputs, model_cells
from attnc.bench.model_peers import DETERMINISTIC, ONE_TENSOR, OURS, PEERS, ours, ours_of_one_tensor
from attnc.bench.models import ModelBenchmark, figures_of, summary
from attnc.bench.odd_cells import odd_cells
from attnc.bench.peers import options_of_flash3, options_of_flash4
from attnc.bench.run import Result, Unavailable
from attnc.runtime.timing import Timing
from tools import documented_figures

CELL = ModelCell(model="It", job="prompt", batch=2, queries=8, keys=8, heads=4, kv_heads=2, width=16)
MACHINE = {"device": "NVIDIA H200", "attnc": "0.1.0"}


def timing(ms: float) -> Timing:
    return Timing(median=ms, low=0.9 * ms, high=1.1 * ms, samples=5)


def result(cell: ModelCell, missing: dict[str, str] | None = None, **ms: float) -> Result[ModelCell]:
    called = {"same": DETERMINISTIC, "tensor": ONE_TENSOR}
    times = {called.get(name, name): timing(value) for name, value in ms.items()}
    return Result(cell=cell, timings=times, flushed=times, missing=missing or {})


# --- cells --------------------------------------------------------------------------------------------------


def test_there_are_models_of_all_kinds() -> None:
    cells = model_cells()
    assert len({cell.name for cell in cells}) == len(cells) >= 60
    assert {cell.job for cell in cells} == {"training", "prompt", "chunk", "drafts", "decoding"}
    named = " ".join(cell.model for cell in cells)
    for model in (
        "Llama-3-8B", "Llama-3-70B TP4", "Llama-3-70B TP8", "Qwen3", "Gemma-2", "Gemma-3", "Mistral",
        "gpt-oss", "DeepSeek", "BERT", "ViT", "Whisper", "SDXL", "Flux", "video",
    ):  # fmt: skip
        assert model in named
    assert any(cell.lengths for cell in cells)
    assert any(cell.page for cell in cells)
    assert all(cell.keys % cell.page == 0 for cell in cells if cell.page)


def test_odd_sizes_are_of_all_kinds_and_no_models() -> None:
    cells = odd_cells()
    assert len({cell.name for cell in cells}) == len(cells) >= 150
    assert {cell.job for cell in cells} == {"training", "prompt", "chunk", "drafts", "decoding"}
    assert {cell.dtype for cell in cells} == {"bf16", "f16"}
    assert {cell.page for cell in cells} >= {0, 1, 16, 64, 256}
    assert all(cell.keys % cell.page == 0 for cell in cells if cell.page)
    assert {cell.heads / cell.kv_heads for cell in cells} >= {1, 2, 3, 4, 5, 7, 8, 12, 16}
    assert {cell.width for cell in cells} >= {32, *range(40, 137, 8), 160, 192, 224, 256}
    assert ModelBenchmark(peers=[], is_odd=True).cells == cells
    assert not {replace(cell, model="") for cell in cells} & {
        replace(cell, model="") for cell in model_cells()
    }


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"causal": False}, 64),
        ({}, 36),
        ({"window": 3}, 1 + 2 + 3 + 4 * 5),
        ({"queries": 1}, 8),
        ({"queries": 2}, 7 + 8),
        ({"queries": 2, "window": 3}, 4 + 4),
    ],
)
def test_what_a_mask_keeps_is_counted(changes: dict[str, Any], kept: int) -> None:
    cell = replace(CELL, **changes)
    assert cell.flops == 2 * 2 * 4 * kept * (16 + 16)
    assert replace(cell, job="training").flops == 2.5 * cell.flops


def test_packed_sequences_are_counted_one_by_one() -> None:
    cell = replace(CELL, lengths=(3, 5), causal=False)
    assert cell.flops == 2 * 4 * (9 + 25) * 32
    assert cell.bytes == 2 * (8 * 4 * 32 + 8 * 2 * 32)


def test_kernels_are_compiled_once_for_models_that_share_them() -> None:
    benchmark = ModelBenchmark(peers=[])
    cells = [CELL, replace(CELL, model="Another", batch=7, heads=8), replace(CELL, width=32)]
    assert len(benchmark.jobs(cells)) == 2


# --- who takes part -----------------------------------------------------------------------------------------


def drawn(cell: ModelCell) -> ModelInputs:
    return draw_inputs(cell, "cpu")


def dense(cell: ModelCell, x: ModelInputs) -> torch.Tensor:
    """Returns what a cell of whole sequences means, in float64."""
    q, k, v = (y.double().transpose(1, 2) for y in (x.q, x.k, x.v))
    k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
    score = q @ k.transpose(2, 3) / cell.width**0.5
    if cell.softcap:
        score = cell.softcap * torch.tanh(score / cell.softcap)
    distance = torch.arange(cell.keys) - torch.arange(cell.keys - cell.queries, cell.keys)[:, None]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if cell.causal:
        hidden |= distance > 0
    if cell.window is not None:
        hidden |= distance < -cell.window
    o: torch.Tensor = score.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return o.transpose(1, 2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "cell",
    [
        CELL,
        replace(CELL, causal=False, keys=16, value=32),
        replace(CELL, dtype="f16"),
        replace(CELL, window=2, softcap=20.0),
        replace(CELL, job="chunk", queries=18, keys=32, page=16),
        replace(CELL, job="drafts", queries=3, keys=32, page=16),
        replace(CELL, job="decoding", queries=1, keys=24),
        replace(CELL, job="decoding", queries=1, keys=16, heads=4, kv_heads=1, value=8, page=16, latent=True),
    ],
    ids=lambda cell: cell.name,
)
def test_public_functions_compute_the_cell(cell: ModelCell) -> None:
    x = drawn(cell)
    with torch.no_grad():
        o: Any = ours(deterministic=False).make(cell, x)()
    torch.testing.assert_close(o.double(), dense(cell, x), rtol=2e-2, atol=2e-2)


def test_pages_are_compared_with_one_tensor_too() -> None:
    """cuDNN and PyTorch read no pages: attnc is timed beside them from the tensor that they read."""
    cell = replace(CELL, model="Decoded", job="decoding", queries=1, keys=32, page=16)
    benchmark = ModelBenchmark(peers=["sdpa"])
    x = drawn(cell)
    with torch.no_grad():
        found: dict[str, Any] = {who.name: who.make(cell, x)() for who in benchmark.candidates(cell)}
    assert [*found] == [OURS, ONE_TENSOR, "sdpa"]
    for o in (found[OURS], found[ONE_TENSOR]):
        torch.testing.assert_close(o.double(), dense(cell, x), rtol=2e-2, atol=2e-2)
    assert x.pages is not None
    x.pages[0].zero_()
    again: Any = ours_of_one_tensor().make(cell, x)()
    assert torch.equal(again, found[ONE_TENSOR])
    assert [who.name for who in benchmark.candidates(replace(cell, page=0))] == [OURS, "sdpa"]
    with pytest.raises(Unavailable, match="from pages"):
        ours_of_one_tensor().make(replace(cell, latent=True), x)


def test_a_summary_compares_readers_of_the_same_memory() -> None:
    cell = replace(CELL, model="Decoded", job="decoding", queries=1, keys=32, page=16)
    one = result(cell, None, attnc=2.0, tensor=1.8, cudnn=1.9, fa3=2.2)
    found = {line.split(" | ")[0][2:]: line.split(" | ")[2][:5] for line in summary([figures_of(one)])[2:]}
    assert found == {
        "drafts and decoding": "0.95x",
        "the same, beside peers that read pages": "1.10x",
        "the same from one tensor, beside peers that read one": "1.06x",
    }


def test_training_is_the_gradients_of_everybody() -> None:
    cell = replace(CELL, job="training")
    benchmark = ModelBenchmark(peers=["sdpa"])
    assert [who.name for who in benchmark.candidates(cell)] == [OURS, DETERMINISTIC, "sdpa"]
    assert [who.name for who in benchmark.candidates(CELL)] == [OURS, "sdpa"]
    x = drawn(cell)
    found: Any = [who.make(cell, x)() for who in benchmark.candidates(cell)]
    for gradients in found:
        assert [gradient.shape for gradient in gradients] == [y.shape for y in x.leaves]


def test_a_peer_is_asked_for_the_same_bits_as_long_as_it_runs() -> None:
    cell, seen = replace(CELL, job="training"), []
    peer = PEERS["sdpa_deterministic"].make
    launch = peer(cell, drawn(cell))
    hook = drawn(cell)
    again = peer(cell, hook)
    leaf: Any = hook.leaves[0]
    leaf.register_hook(lambda gradient: seen.append(torch.are_deterministic_algorithms_enabled()))
    for run in (launch, again):
        gradients: Any = run()
        assert [gradient.shape for gradient in gradients] == [y.shape for y in hook.leaves]
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(Unavailable, match="about gradients"):
        peer(CELL, drawn(CELL))


def test_the_same_bits_are_beside_those_of_peers_too() -> None:
    training = replace(CELL, model="Trained", job="training")
    times = {"attnc": 2.0, "same": 2.5, "cudnn": 2.2, "sdpa_deterministic": 4.0, "fa3_deterministic": 3.0}
    lines = summary([figures_of(result(training, None, **times))])
    assert [line.split(" | ")[2][:5] for line in lines[2:]] == ["1.10x", "0.88x", "1.20x"]


def test_pytorch_is_asked_for_what_it_has() -> None:
    plain = PEERS["sdpa"].make
    x = drawn(CELL)
    o: Any = plain(CELL, x)()
    torch.testing.assert_close(o.transpose(1, 2).double(), dense(CELL, x), rtol=2e-2, atol=2e-2)
    refused: dict[str, dict[str, Any]] = {
        "windows": {"window": 3}, "softcap": {"softcap": 30.0}, "sinks": {"sink": True},
        "latent": {"latent": True},
    }  # fmt: skip
    for reason, changes in refused.items():
        with pytest.raises(Unavailable, match=reason):
            plain(replace(CELL, **changes), x)
    with pytest.raises(Unavailable, match="packed"):
        PEERS["cudnn"].make(replace(CELL, lengths=(3, 5)), drawn(replace(CELL, lengths=(3, 5))))
    with pytest.raises(Unavailable, match="begin at the first key"):
        PEERS["cudnn"].make(replace(CELL, queries=4), x)


def test_flash_attention_is_asked_for_masks_and_scores_in_its_own_words() -> None:
    assert options_of_flash3(64, causal=True) == {"softmax_scale": 0.125, "is_causal": True}
    assert options_of_flash3(64, causal=True, window=512, softcap=30.0) == {
        "softmax_scale": 0.125, "is_causal": False, "window_size_left": 512, "window_size_right": 0,
        "softcap": 30.0,
    }  # fmt: skip
    assert options_of_flash4(causal=True) == {"causal": True, "softcap": 0.0}
    assert options_of_flash4(causal=True, window=512) == {
        "causal": False, "softcap": 0.0, "window_size": (512, 0),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["fa3", "fa3_vllm", "fa4", "flashmla"])
def test_libraries_that_are_not_there_say_so(name: str) -> None:
    cell = replace(CELL, latent=True, page=16, keys=16) if name == "flashmla" else CELL
    with pytest.raises(Unavailable, match="not installed"):
        PEERS[name].make(cell, drawn(cell))


# --- what is written ----------------------------------------------------------------------------------------


def test_a_run_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 5.0, 20.0])
    benchmark = ModelBenchmark(peers=[], seconds=10.0, clock=lambda: next(moments))
    monkeypatch.setattr(ModelBenchmark, "measure_cell", lambda self, cell, rounds: result(cell, attnc=1.0))
    cells = model_cells()[3:7]
    results = benchmark.measure(cells, 3, lambda name: None)
    assert [one.cell for one in results] == list(cells[:2])
    left = f"{cells[2].name}, {cells[3].name}."
    assert f"Not measured, for lack of time: {left}" in benchmark.page(results, MACHINE).markdown


def test_the_page_and_the_data() -> None:
    training = replace(CELL, model="Trained", job="training")
    decoding = replace(CELL, model="Decoded", job="decoding", queries=1)
    results = [
        result(CELL, attnc=1.0, cudnn=1.2, sdpa=1.5),
        result(training, attnc=2.0, same=2.5, cudnn=2.2),
        result(decoding, {"cudnn": "takes no cells"}, attnc=3.0, sdpa=2.7),
    ]
    page = ModelBenchmark(peers=["cudnn", "sdpa"]).page(results, MACHINE)
    lines = page.markdown.splitlines()
    assert "| forward | 1 | 1.20x (It prompt b2 n8) | 1.20x | 1.20x | 0 |" in lines
    assert (
        "| gradients, the same bits in every run | 1 | 0.88x (Trained training b2 n8) | 0.88x | 0.88x | 1 |"
        in lines
    )
    assert not any("beside those of peers" in line for line in lines)
    assert "| drafts and decoding | 1 | 0.90x (Decoded decoding b2 n8) | 0.90x | 0.90x | 1 |" in lines
    assert any(line.startswith("| It prompt b2 n8 | h4/2 d16 causal | 1000 |") for line in lines)
    assert lines[-1] == "* n/a for cudnn in Decoded decoding b2 n8: takes no cells"
    cells = json.loads(json.dumps(page.data))["cells"]
    assert [cell["took_part"] for cell in cells] == [
        ["attnc", "cudnn", "sdpa"], ["attnc", DETERMINISTIC, "cudnn"], ["attnc", "sdpa"],
    ]  # fmt: skip
    assert cells[0]["results"]["cudnn"]["flushed"]["ms"] == 1.2


def test_the_documentation_says_who_took_part() -> None:
    decoding = replace(CELL, model="Decoded", job="decoding", queries=1)
    results = [result(CELL, attnc=1.0, cudnn=1.2), result(decoding, attnc=3.0, sdpa=2.7)]
    record = json.loads(json.dumps(ModelBenchmark(peers=["cudnn", "sdpa"]).page(results, MACHINE).data))
    head, _, first, second = documented_figures.models(record).splitlines()
    assert head.startswith("| call | shape | us | attnc | the same bits | cuDNN | PyTorch | to the best |")
    assert first.startswith("| It prompt b2 n8 | h4/2 d16 causal | 1000 |")
    assert first.endswith(" |  | 1.20x | 1.20x |")
    assert second.endswith("| 0.90x | 0.90x |")
    assert "| forward | 1 | 1.20x (It prompt b2 n8) |" in documented_figures.models_summary(record)
    assert "*" not in first
    record["cells"][0]["results"]["cudnn"]["joined"] = {"through": "attnc"}
    assert "* |  | 1.20x |" in documented_figures.models(record).splitlines()[2]


def test_a_summary_leaves_out_cells_without_a_peer() -> None:
    assert summary([figures_of(result(CELL, attnc=1.0))]) == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("job", ["training", "prompt", "chunk", "drafts", "decoding"])
def test_a_cell_is_timed_warm_and_flushed(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: every candidate is called once, as it would be captured."""
    called: list[int] = []

    def together(launches: Any) -> Any:
        called.append(len(launches))
        return lambda: [launch() for launch in launches[:1]]

    def timed(launches: Any, rounds: int, **options: Any) -> dict[str, Timing]:
        return {name: (launch(), timing(20.0))[1] for name, launch in launches.items()}

    monkeypatch.setattr(models, "capture_calls", together)
    monkeypatch.setattr(models, "interleave", timed)
    monkeypatch.setattr(models, "interleave_flushed", timed)
    monkeypatch.setattr(models, "draw_inputs", drawn)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    cell = replace(CELL, job=job, queries={"drafts": 3, "decoding": 1}.get(job, 8))
    found = ModelBenchmark(peers=["sdpa", "fa3"]).measure_cell(cell, 3)
    others = [DETERMINISTIC] if job == "training" else []
    assert list(found.timings) == list(found.flushed) == [OURS, *others, "sdpa"]
    assert found.missing == {"fa3": "flash_attn_3 is not installed"}
    replays = job in ("drafts", "decoding")
    assert called == ([1, 1, 20, 20] if replays else [])
    assert found.timings[OURS].median == (1.0 if replays else 20.0)
