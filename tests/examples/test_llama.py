"""The serving example on the CPU: tokens over pages are those of a decoder without, whatever the search."""

from __future__ import annotations

import pytest
import torch

from attnc.paging import CacheFull, OutOfPages
from examples.llama_graph import greedy_graph
from examples.llama_model import TINY, DenseDecoder, Llama
from examples.llama_paged import PagedDecoder
from examples.llama_search import greedy
from examples.llama_serving import SMALL, serve
from examples.llama_tree import SMALL as OF_TREES
from examples.llama_tree import Shape, TreeDecoder


@pytest.fixture(scope="module")
def llama() -> Llama:
    return Llama(TINY, dtype=torch.float32, device="cpu")


@pytest.mark.slow
@torch.no_grad()
def test_tokens_over_pages_equal_dense_ones(llama: Llama) -> None:
    rows = serve(llama, SMALL)
    assert [row.task for row in rows] == [
        "greedy, 3 prompts",
        "parallel sampling, 4 samples",
        "beam search, 4 beams",
    ]
    for row in rows:
        assert row.equal == row.tokens > 0, row
        of_16, *_, of_1 = row.memory
        assert 0 == of_1.waste < of_16.waste < 0.5
        assert (of_16.saved > 0.3) == ("greedy" not in row.task)


@torch.no_grad()
def test_a_step_that_does_not_fit_can_be_done_again(llama: Llama) -> None:
    """What a scheduler does: it ends a sequence, then asks for the same step."""
    paged = PagedDecoder(llama, pages=3, sequences=3, max_length=40)
    plain = DenseDecoder(llama)
    prompts = [[5, 9, 2] * 5 + [7], [3]]
    sequences, _ = paged.prefill(prompts)
    others, _ = plain.prefill(prompts)
    last = paged.cache.allocate()  # takes the only page that is left
    paged.cache.append([last])
    with pytest.raises(OutOfPages):
        paged.step(sequences, [4, 6])
    paged.free([last])
    ours, theirs = paged.step(sequences, [4, 6]), plain.step(others, [4, 6])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_steps_of_the_graph_run_over_rows_without_a_sequence(llama: Llama) -> None:
    paged = PagedDecoder(llama, pages=6, sequences=4, max_length=32)
    holes = [paged.cache.allocate() for _ in range(3)]
    paged.cache.append(holes, 1)
    paged.cache.free(holes[1])
    prompts = [[11, 12, 13]]
    assert greedy_graph(paged, prompts, 4) == greedy(DenseDecoder(llama), prompts, 4)


@torch.no_grad()
def test_a_prompt_that_does_not_fit_leaves_no_trace(llama: Llama) -> None:
    paged = PagedDecoder(llama, pages=2, sequences=3, max_length=40)
    for prompts in ([[1] * 40], [[1], [2], [3], [4]]):
        with pytest.raises(CacheFull):
            paged.prefill(prompts)
        assert len(paged.cache) == 0
        assert paged.cache.statistics().free == 2


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("least", [0.0, 0.05])
@torch.no_grad()
def test_trees_of_drafts_make_the_tokens_of_greedy_decoding(least: float) -> None:
    """Several a step, also where trees differ in size (`least`)."""
    llama = Llama(OF_TREES, dtype=torch.float32, device="cpu")
    prompts = [[5, 9, 2] * 5 + [7], [3]]
    paged = PagedDecoder(llama, pages=8, sequences=2, max_length=60)
    decoder = TreeDecoder(paged, Shape(layers=4, widths=(4, 4, 4), least=least))
    found = decoder.greedy(prompts, 12)
    assert found == greedy(DenseDecoder(llama), prompts, 12)
    assert sum(decoder.accepted) >= (2.0 if least == 0 else 1.5) * len(decoder.accepted)
    assert len(paged.cache) == 0
    assert paged.cache.statistics().free == 8
