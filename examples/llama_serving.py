"""Decodes with a random Llama over pages, compares every token with a dense run, and measures the memory.

    python -m examples.llama_serving             # small, on the CPU in Triton's interpreter or on a GPU
    python -m examples.llama_serving --size 1b   # a GPU: 1.0 billion parameters and lengths as in the paper

The decoder has pages of 16 tokens. What they waste and what sharing saves is said for smaller pages too: see
examples/llama_memory.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from examples.llama_graph import greedy_graph
from examples.llama_memory import PAGE_SIZES, Memory, Metered
from examples.llama_model import ONE_BILLION, TINY, DenseDecoder, Llama
from examples.llama_paged import PAGE, PagedDecoder
from examples.llama_search import Decoder, beam_search, greedy, ignore, sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Mean lengths of prompts and answers; prompts decoded at once; samples or beams of one prompt."""

    name: str
    prompt: int
    answer: int
    prompts: int
    counts: tuple[int, ...]


# Mean lengths of the two datasets of section 6.1.
SHAREGPT = Workload(name="ShareGPT lengths", prompt=161, answer=338, prompts=16, counts=(2, 4, 6))
ALPACA = Workload(name="Alpaca lengths", prompt=19, answer=58, prompts=16, counts=(2, 4, 6))
SMALL = Workload(name="small", prompt=21, answer=8, prompts=3, counts=(4,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the report; `equal` of `tokens` are those of the dense run, `memory` is by page size."""

    task: str
    equal: int
    tokens: int
    memory: Sequence[Memory]

    def __str__(self) -> str:
        share = f"{self.equal} of {self.tokens} tokens"
        waste, saved = (
            "".join(f"{value:8.1%}" for value in values)
            for values in ([m.waste for m in self.memory], [m.saved for m in self.memory])
        )
        return f"{self.task:32}{share:22}{waste}  {saved}"


def prompts_of(work: Workload, vocab: int) -> list[list[int]]:
    """Random prompts, of lengths from half to three halves of the mean."""
    random = torch.Generator().manual_seed(7)
    spread = torch.rand(work.prompts, generator=random) + 0.5
    lengths = [max(1, round(work.prompt * float(share))) for share in spread]
    return [torch.randint(vocab, (length,), generator=random).tolist() for length in lengths]


def serve(model: Llama, work: Workload) -> list[Row]:
    """Greedy decoding of all prompts, then samples and beams of one, each compared with a dense run."""
    prompts, steps = prompts_of(work, model.sizes.vocab), work.answer
    decoder = paged_decoder(model, work, prompts)
    paged, plain = Metered(decoder), DenseDecoder(model)
    made = []

    def compare(task: str, run: Callable[[Decoder, Callable[[], None]], list[list[int]]]) -> None:
        memory = paged.start()
        found, expected = run(paged, paged.watch), run(plain, ignore)
        pairs = [pair for rows in zip(found, expected, strict=True) for pair in zip(*rows, strict=True)]
        equal = sum(ours == theirs for ours, theirs in pairs)
        made.append(Row(task=task, equal=equal, tokens=len(pairs), memory=memory))

    compare(f"greedy, {len(prompts)} prompts", lambda decoder, watch: greedy(decoder, prompts, steps, watch))
    prompt = (prompts[0] * work.prompt)[: work.prompt]
    for n in work.counts:
        compare(f"parallel sampling, {n} samples", partial(_sampled, prompt, steps, n))
    for n in work.counts:
        compare(f"beam search, {n} beams", partial(_beams, prompt, steps, n))
    assert greedy_graph(decoder, prompts, steps) == greedy(decoder, prompts, steps), "a graph changed tokens"
    assert all(cache.statistics().held == 0 for cache in (decoder.cache, *paged.caches)), "pages were leaked"
    return made


def _sampled(
    prompt: list[int], steps: int, n: int, decoder: Decoder, watch: Callable[[], None]
) -> list[list[int]]:
    return sample(decoder, prompt, steps, n, watch=watch)


def _beams(
    prompt: list[int], steps: int, n: int, decoder: Decoder, watch: Callable[[], None]
) -> list[list[int]]:
    return beam_search(decoder, prompt, steps, n, watch)


def paged_decoder(model: Llama, work: Workload, prompts: list[list[int]]) -> PagedDecoder:
    """With room for all prompts and their answers."""
    longest = max(map(len, prompts)) + work.answer
    rows = max(len(prompts), *work.counts)
    return PagedDecoder(model, pages=rows * -(-longest // PAGE), sequences=rows, max_length=longest)


def speed(model: Llama, work: Workload) -> str:
    """Tokens per second of greedy decoding, launched kernel by kernel and from a graph."""
    prompts = prompts_of(work, model.sizes.vocab)
    decoder = paged_decoder(model, work, prompts)
    parts = []
    for name, run in (("kernel by kernel", greedy), ("from a graph", greedy_graph)):
        run(decoder, prompts, 4)
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(decoder, prompts, work.answer)
        torch.cuda.synchronize()
        parts.append(f"{len(prompts) * work.answer / (time.perf_counter() - start):,.0f} tokens/s {name}")
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=["tiny", "1b"], default="tiny")
    size = parser.parse_args().size
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        from attnc.verify.interpreter import ensure_interpreter

        ensure_interpreter()
    place = torch.cuda.get_device_name() if device == "cuda" else "the CPU (Triton's interpreter)"
    model = Llama(TINY if size == "tiny" else ONE_BILLION, dtype=torch.float32, device=device)
    print(f"Llama {size}, f32, pages of {PAGE} tokens, on {place}")
    width = 8 * len(PAGE_SIZES)
    pages = "".join(f"{size:8}" for size in PAGE_SIZES)
    print(f"{'':56}{'waste in pages of':>{width}}  {'saved in pages of':>{width}}")
    print(f"{'':34}{'equal to dense':22}{pages}  {pages}")
    with torch.no_grad():
        for work in (SMALL,) if size == "tiny" else (SHAREGPT, ALPACA):
            print(f"{work.name}: prompts of {work.prompt} tokens, answers of {work.answer}")
            rows = serve(model, work)
            for row in rows:
                print(f"  {row}")
            reserved = rows[0].memory[0].reserved(2048, work.prompts)
            print(f"  contiguous pieces of 2048 tokens would waste {reserved:.0%}")
        if size == "1b":
            del model
            half = Llama(ONE_BILLION, dtype=torch.bfloat16, device=device)
            print(f"bf16, {SHAREGPT.prompts} sequences at once: {speed(half, SHAREGPT)}")


if __name__ == "__main__":
    main()
