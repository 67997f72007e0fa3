"""SGLang's own unit tests of attention backends, run with attnc's in the place of Triton's.

    python -m tests.engines.sglang_kit            # where SGLang can be imported; on a GPU where there is one

The tests are the kit of SGLang's wheel (`sglang.test.kits.attention_unittest`): its pools, layers, batches,
modes of speculation and CUDA graph runners, with references of its own. Cases have the names and sizes of its
repository's `test/registered/attention/unittest/{dense,mla}/test_triton.py`. `--write` keeps outcomes in
`outcomes/sglang.json`.
"""

from __future__ import annotations

import argparse
import sys
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any, TypeAlias

import torch

from tests.engines.outcomes import WHOLE, Outcome, announce, is_mine, keep, passed_before, run, share
from tests.engines.standins import stand_in

_KIT = "sglang.test.kits.attention_unittest"
#: A name of SGLang's, what runs it, and why it is not run: on a CPU, or at all.
Test: TypeAlias = tuple[str, Any, str]

_NO_PAGES = "slots of a page in no order, which SGLang's allocator does not hand out: attnc reads pages"
_CAPTURE = "runs SGLang's graph runner, which asks the CUDA driver"
#: What SGLang imports and these tests do not ask.
_NOT_ASKED = ("datasets", "IPython", "openai", "sgl_kernel")


def prepare() -> None:
    """Offers attnc's backend to SGLang as its plug-in does, and to the kit, which knows backends by name."""
    stand_in(_NOT_ASKED)
    from sglang.srt.plugins.hook_registry import HookRegistry

    from attnc.adapters.sglang import register

    register()
    HookRegistry.apply_hooks()
    dense: Any = import_module(f"{_KIT}.attention_methods.dense_attention")
    # A window has the query's own key and so many before it, in decoding as in extending.
    dense._SWA_DECODE_EXTEND_WINDOW |= {"attnc"}


@dataclass(frozen=True, slots=True)
class Kit:
    """The part of the kit that is about dense or latent attention; name: as in the names of its functions."""

    kind: str
    name: str
    device: str

    @property
    def attention(self) -> Any:
        method = "dense" if self.kind == "dense" else "mla"
        return import_module(f"{_KIT}.attention_methods.{method}_attention")

    def runner(self, module: str, function: str) -> Any:
        return getattr(import_module(f"{_KIT}.runner_modes.{module}"), function.format(name=self.name))

    def case(
        self, name: str, mode: str, prefixes: tuple[int, ...], tokens: tuple[int, ...], **sizes: int
    ) -> Any:
        modes: Any = import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
        heads = {"num_heads": 4, "num_kv_heads": 4} if self.kind == "dense" else {"num_heads": 4}
        made = self.attention.DenseAttentionCase if self.kind == "dense" else self.attention.MLAAttentionCase
        return made(
            name=name,
            backend="attnc",
            forward_mode=getattr(modes, mode),
            prefix_lens=prefixes,
            extend_lens=tokens,
            **heads | {"page_size": 16} | sizes,
        )

    def test(self, case: Any, runner: Any, variant: str = "", why: str = "", **options: Any) -> Test:
        name = f"{self.kind}: {case.name}{', ' if variant else ''}{variant}"
        return name, partial(runner, case=case, device=self.device, **options), why


def tests(device: str) -> Iterator[Test]:
    """Each test of the kit that is about dense or latent attention."""
    for kit in (Kit("dense", "dense", device), Kit("latent", "mla", device)):
        yield from _eager(kit)
        yield from _graphs(kit)
        yield from _verified(kit)
        yield from _drafted(kit)


def _eager(kit: Kit) -> Iterator[Test]:
    """Prompts, chunks and single tokens; pages that alternate between requests, and slots in no order."""
    if kit.kind == "latent":
        for case in kit.attention.make_mla_cases("attnc"):
            yield kit.test(case, kit.attention.run_mla_attention_case)
        return
    runner = kit.attention.run_dense_attention_case
    for made in ("dense", "swa_no_prefix_input_config", "swa_prefix_input_config"):
        for case in getattr(kit.attention, f"make_{made}_cases")("attnc"):
            yield kit.test(case, runner)
    heads = {"num_heads": 12, "num_kv_heads": 12}
    extend = kit.case("layout_extend_two_request_ragged", "EXTEND", (8, 16), (8, 16), **heads)
    decode = kit.case("layout_decode_page_boundary", "DECODE", (15, 16, 17), (), **heads)
    for case in (extend, decode):
        yield kit.test(case, runner, "interleaved_pages", loc_layout="interleaved_pages")
    layout = "non_monotonic_extend"
    yield kit.test(extend, runner, layout, _NO_PAGES, loc_layout=layout)


def _graphs(kit: Kit) -> Iterator[Test]:
    """Decoding from a captured graph, and prompts in graphs that stop at attention."""
    decode = kit.runner("cuda_graph_decode_runner", "run_{name}_cuda_graph_decode_case")
    yield kit.test(kit.case("runner_cuda_graph_decode_page_boundary", "DECODE", (14, 15, 16), ()), decode)
    if kit.kind == "dense":
        name = "runner_cuda_graph_gqa_decode_page_boundary"
        yield kit.test(kit.case(name, "DECODE", (14, 15, 16), (), num_kv_heads=2), decode)
    split = kit.runner("split_op_runner", "run_{name}_split_op_extend_case")
    case = kit.case("runner_split_op_extend_cross_page_boundary", "EXTEND", (15,), (2,))
    for breakable in (False, True):
        graph = "breakable graph" if breakable else "piecewise graph"
        yield kit.test(case, split, graph, breakable=breakable, static_num_tokens=4)


def _verified(kit: Kit) -> Iterator[Test]:
    """Drafts of each algorithm, in chains and trees, verified eagerly and from graphs."""
    module = "speculative_target_verify_runner"
    verify = "run_dense_spec_verify" if kit.kind == "dense" else "run_mla_eagle_verify"
    for algorithm, topk in (
        ("eagle", 1), ("eagle", 2), ("frozen_kv_mtp", 1), ("dflash", 1), ("ngram", 1), ("ngram", 2),
    ):  # fmt: skip
        shape = "chain" if topk == 1 else "tree"
        for graph, function in (("", f"{verify}_case"), ("cuda_graph_", f"{verify}_cuda_graph_case")):
            case = kit.case(f"runner_{graph}{algorithm}_verify_{shape}", "TARGET_VERIFY", (4, 7), (3, 3))
            yield kit.test(case, kit.runner(module, function), topk=topk, spec_kind=algorithm)


def _drafted(kit: Kit) -> Iterator[Test]:
    """The steps of a model that drafts, and what it extends of those that were accepted."""
    module = "speculative_draft_extend_runner"
    extend = kit.runner(module, "run_{name}_draft_extend_v2_cuda_graph_case")
    name = "runner_cuda_graph_eagle_draft_extend_v2_fixed_tokens"
    case = kit.case(name, "DRAFT_EXTEND_V2", (4, 7), (3, 3))
    for pad in ("small_real", "prod_fill"):
        for captured in (2, 4, 8):
            variant = f"{pad}, {captured} captured"
            yield kit.test(case, extend, variant, pad_style=pad, cuda_graph_capture_batch_size=captured)
    name = "runner_eagle_draft_extend_v2_cuda_graph_runner_fixed_tokens"
    runner = kit.runner(module, "run_{name}_eagle_draft_extend_v2_cuda_graph_runner_case")
    yield kit.test(kit.case(name, "DRAFT_EXTEND_V2", (4, 7), (3, 3)), runner, why=_CAPTURE)
    module = "speculative_draft_runner"
    runner = kit.runner(module, "run_{name}_eagle_draft_cuda_graph_runner_case")
    for shape, topk, drafts, page in (("chain", 1, 3, 16), ("tree", 2, 4, 1)):
        case = kit.case(f"runner_eagle_draft_decode_cuda_graph_{shape}", "DECODE", (4, 7), (), page_size=page)
        yield kit.test(case, runner, why=_CAPTURE, topk=topk, speculative_num_draft_tokens=drafts)
    if kit.kind == "dense":
        runner = kit.runner(module, "run_{name}_frozen_kv_mtp_cuda_graph_runner_case")
        yield kit.test(
            kit.case("runner_frozen_kv_mtp_decode_cuda_graph", "DECODE", (4, 7), ()), runner, why=_CAPTURE
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="tests whose names have this")
    parser.add_argument("--write", action="store_true", help="keep the outcomes")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the tests")
    parser.add_argument("--seconds", type=float, help="of the workers; what they do not reach is not kept")
    parser.add_argument("--rest", action="store_true", help="those that are not kept as passed here")
    parser.add_argument("--part", default=WHOLE, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    before = passed_before("sglang", version("sglang"), device) if options.rest else []
    if options.workers > 1:
        arguments = ["--only", options.only, *(["--rest"] if options.rest else [])]
        shared = share("tests.engines.sglang_kit", arguments, options.workers, options.seconds)
        return keep("sglang", version("sglang"), device, before + shared, write=options.write)
    if device == "cpu":
        from attnc.verify.interpreter import ensure_interpreter

        ensure_interpreter()
        torch.set_grad_enabled(False)  # what SGLang's kernels do on a GPU, its pools do in place on a CPU
    prepare()
    testcase = unittest.TestCase()
    outcomes: list[Outcome] = []
    known = {outcome.name for outcome in before}
    for number, (name, test, why) in enumerate(tests(device)):
        if options.only in name and name not in known and is_mine(number, options.part):
            excluded = why if device == "cpu" or why == _NO_PAGES else ""
            outcomes.append(run(name, partial(test, testcase), excluded))
            if options.part != WHOLE:
                announce(outcomes)
                outcomes.clear()
    if options.part != WHOLE:
        return 0
    return keep("sglang", version("sglang"), device, before + outcomes, write=options.write)


if __name__ == "__main__":
    sys.exit(main())
