"""Decodes with a random Llama over pages, compares every token with a dense run, and measures the memory.

    python -m examples.llama_serving             # small, on the CPU in Triton's interpreter or on a GPU
    python -m examples.llama_serving --size 1b   # a GPU: 1.0 billion parameters and lengths as in the paper

The measures are those of PagedAttention (Kwon et al. 2023, arXiv 2309.06180): waste is the share of the held
memory without a token in it; saved is the share of pages that sharing saves (section 6.3), the mean over
all steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from attnc.paging import PagedCache, Statistics
from examples.llama_graph import greedy_graph
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


@dataclass(slots=True)
class Memory:
    """The statistics of a cache after every step."""

    cache: PagedCache
    seen: list[Statistics] = field(default_factory=list)

    def __call__(self) -> None:
        self.seen.append(self.cache.statistics())

    @property
    def waste(self) -> float:
        """Mean share of the held rows without a token."""
        return 1 - sum(s.stored for s in self.seen) / sum(s.held * s.page for s in self.seen)

    @property
    def saved(self) -> float:
        """Mean share of pages that sharing saves."""
        return sum(s.saved for s in self.seen) / len(self.seen)

    def reserved(self, length: int, sequences: int) -> float:
        """Mean waste if each sequence had a contiguous piece of `length` tokens."""
        return 1 - sum(s.tokens for s in self.seen) / (length * sequences * len(self.seen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the report; `equal` of `tokens` are those of the dense run."""

    task: str
    equal: int
    tokens: int
    waste: float
    saved: float
    note: str = ""

    def __str__(self) -> str:
        share = f"{self.equal} of {self.tokens} tokens"
        return f"{self.task:34}{share:24}{self.waste:8.1%}{self.saved:9.1%}  {self.note}".rstrip()


def prompts_of(work: Workload, vocab: int) -> list[list[int]]:
    """Random prompts, of lengths from half to three halves of the mean."""
    random = torch.Generator().manual_seed(7)
    spread = torch.rand(work.prompts, generator=random) + 0.5
    lengths = [max(1, round(work.prompt * float(share))) for share in spread]
    return [torch.randint(vocab, (length,), generator=random).tolist() for length in lengths]


def serve(model: Llama, work: Workload) -> list[Row]:
    """Greedy decoding of all prompts, then samples and beams of one, each compared with a dense run."""
    prompts, steps = prompts_of(work, model.sizes.vocab), work.answer
    paged, plain = paged_decoder(model, work, prompts), DenseDecoder(model)
    made = []

    def compare(task: str, run: Callable[[Decoder, Callable[[], None]], list[list[int]]]) -> Memory:
        memory = Memory(paged.cache)
        found, expected = run(paged, memory), run(plain, ignore)
        pairs = [pair for rows in zip(found, expected, strict=True) for pair in zip(*rows, strict=True)]
        equal = sum(ours == theirs for ours, theirs in pairs)
        made.append(Row(task=task, equal=equal, tokens=len(pairs), waste=memory.waste, saved=memory.saved))
        return memory

    memory = compare(
        f"greedy, {len(prompts)} prompts", lambda decoder, watch: greedy(decoder, prompts, steps, watch)
    )
    note = f"contiguous pieces of 2048 would waste {memory.reserved(2048, len(prompts)):.0%}"
    made[0] = replace(made[0], note=note)
    prompt = (prompts[0] * work.prompt)[: work.prompt]
    for n in work.counts:
        compare(f"parallel sampling, {n} samples", partial(_sampled, prompt, steps, n))
    for n in work.counts:
        compare(f"beam search, {n} beams", partial(_beams, prompt, steps, n))
    assert greedy_graph(paged, prompts, steps) == greedy(paged, prompts, steps), "a graph changed tokens"
    assert paged.cache.statistics().held == 0, "pages were leaked"
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
    print(f"{'':34}{'equal to dense':24}{'waste':>8}{'saved':>9}")
    with torch.no_grad():
        for work in (SMALL,) if size == "tiny" else (SHAREGPT, ALPACA):
            print(f"{work.name}: prompts of {work.prompt} tokens, answers of {work.answer}")
            for row in serve(model, work):
                print(f"  {row}")
        if size == "1b":
            del model
            half = Llama(ONE_BILLION, dtype=torch.bfloat16, device=device)
            print(f"bf16, {SHAREGPT.prompts} sequences at once: {speed(half, SHAREGPT)}")


if __name__ == "__main__":
    main()
