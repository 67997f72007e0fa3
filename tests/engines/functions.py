"""Tests that FlashInfer and vLLM have of functions of attention, run on attnc's of the same names.

    python -m tests.engines.functions flashinfer --source FOLDER      # on a GPU where there is one
    python -m tests.engines.functions vllm --source FOLDER

FOLDER is FlashInfer's repository, or vLLM's source, or their tests alone; neither package is imported. The
files run as they are: what they import is attnc's adapter, beside stand-ins and a few lines of PyTorch for
functions that write caches. What asks for something that an adapter refuses by name is excluded, for that
reason; `--write` keeps outcomes in `outcomes/NAME.json`. FlashInfer has 45,000 cases: `--sample N` draws so
many of each test, and `--seed` says which.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engines.outcomes import WHOLE, Outcome, announce, is_mine, keep, passed_before, share
from tests.engines.standins import stand_in


@dataclass(frozen=True, slots=True)
class Kit:
    """Tests of one project. kept: its name among the outcomes; version: that the files are of; folder: where
    they are; helpers: folders of what they import; files: without their endings, which come as `.py`;
    excluded: why cases are left out, with an expression that their names match; prepare: makes what they
    import importable, on a device.
    """

    kept: str
    version: str
    folder: str
    helpers: tuple[str, ...]
    files: tuple[str, ...]
    excluded: Mapping[str, str]
    prepare: Callable[[str], None]

    def why(self, name: str) -> str:
        """Returns why a test is not run, "" where it is."""
        return next((why for why, names in self.excluded.items() if re.search(names, name)), "")


def _offer(module: str, **names: Any) -> None:
    vars(import_module(module)).update(names)


# --- FlashInfer ---------------------------------------------------------------------------------------------


def get_seq_lens(indptr: torch.Tensor, last: torch.Tensor, page: int) -> torch.Tensor:
    """How many keys requests have."""
    return torch.clamp(indptr[1:] - indptr[:-1] - 1, min=0) * page + last


def get_batch_indices_positions(
    starts: torch.Tensor, lengths: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whose the new tokens are, and where in their requests they stand."""
    at = torch.arange(count, device=starts.device)
    request = torch.searchsorted(starts[1:].contiguous(), at, right=True)
    return request.int(), (lengths[request] - (starts[request + 1] - at)).int()


def append_paged_kv_cache(
    keys: torch.Tensor,
    values: torch.Tensor,
    requests: torch.Tensor,
    positions: torch.Tensor,
    cache: Any,
    indices: torch.Tensor,
    indptr: torch.Tensor,
    last: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes new keys and values to their places in pages."""
    pools = cache.unbind(1) if isinstance(cache, torch.Tensor) else cache
    for pool, new in zip(pools, (keys, values), strict=True):
        rows = pool if kv_layout == "NHD" else pool.transpose(1, 2)
        page = indices[indptr[requests] + positions // rows.shape[1]]
        rows[page, positions % rows.shape[1]] = new.to(rows.dtype)


def fast_decode_plan(wrapper: Any, *given: Any, **named: Any) -> None:
    """Plans as the wrapper does: what FlashInfer's own leaves out are copies for its kernels."""
    named.pop("global_override_indptr_cpu", None)
    type(wrapper).plan(wrapper, *given, **named)


def prepare_flashinfer(device: str) -> None:
    stand_in(("flashinfer",))
    ours = import_module("attnc.adapters.flashinfer")
    known = {name: getattr(ours, name) for name in ours.__all__}
    beside = (get_seq_lens, get_batch_indices_positions, append_paged_kv_cache, fast_decode_plan)
    known |= {made.__name__: made for made in beside}
    modules = ("attention", "cascade", "decode", "mla", "page", "pod", "prefill", "quantization", "sparse")
    for name in ("flashinfer", *(f"flashinfer.{module}" for module in modules)):
        _offer(name, **known)
    _offer("flashinfer.jit", build_jit_specs=lambda *given, **named: None)
    capability = torch.cuda.get_device_capability() if device == "cuda" else (9, 0)
    _offer(
        "flashinfer.utils",
        has_flashinfer_jit_cache=lambda: True,
        get_compute_capability=lambda device: capability,
        is_sm90a_supported=lambda device: capability[0] == 9,
        is_sm100a_supported=lambda device: False,
        is_sm110a_supported=lambda device: False,
        is_sm12x_supported=lambda device: False,
        GPUArchitectureError=type("GPUArchitectureError", (Exception,), {}),
    )


FLASHINFER = Kit(
    kept="flashinfer",
    version="0.6.18",
    folder="tests/attention",
    helpers=("tests/test_helpers",),
    files=(
        "test_alibi", "test_batch_attention", "test_batch_decode_kernels", "test_batch_prefill",
        "test_batch_prefill_kernels", "test_block_sparse", "test_decode_prefill_lse", "test_deepseek_mla",
        "test_logits_cap", "test_non_contiguous_decode", "test_non_contiguous_prefill",
        "test_shared_prefix_kernels", "test_single_prefill", "test_sliding_window",
        "test_tensor_cores_decode",
    ),
    excluded={
        "caches of 4 bits, which the adapter refuses": r"nvfp4",
        "rotation inside of attention, which the adapter refuses": r"ROPE_LLAMA|_rope_",
        "ALiBi within a softcap, which the adapter refuses": r"30\.0-ALIBI",
        "scales of groups of columns, which the adapter refuses": r"fp8_nope_group_scales",
        "scores of several items at once, which the adapter refuses": r"multi_item_scoring",
        "takes tens of GB": r"-16384-128\]",
        "hands its tables to `run`, as another backend of FlashInfer's takes them": r"test_cutlass_mla",
        "deprecated names of `run`, which the adapter has not": r"test_kv_scale_forwarding",
        "imports FlashInfer in a process of its own": r"torch_compile_cuda_graph",
        "asks what FlashInfer's wrapper keeps for itself": r"cta_tile_q_smem_probe",
        "expects a refusal of what attnc computes": r"fp8_kv_plan_rejects_fp16_q",
        "expects FlashInfer's words for what attnc refuses in its own": (
            r"rejects_(dtype_)?mismatch|requires_scales"
        ),
    },
    prepare=prepare_flashinfer,
)  # fmt: skip


# --- vLLM ---------------------------------------------------------------------------------------------------


class KVQuantMode(IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1


def seed_all(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


def prepare_vllm(device: str) -> None:
    stand_in(("vllm",))
    import triton

    from attnc.adapters import flash_mla
    from attnc.adapters.vllm import unified_attention, unified_attention_diffkv
    from attnc.compat.flash_attn import flash_attn_varlen_func

    capability = torch.cuda.get_device_capability() if device == "cuda" else (9, 0)
    platform = SimpleNamespace(
        device_type=device,
        fp8_dtype=lambda: torch.float8_e4m3fn,
        is_rocm=lambda: False,
        is_cuda=lambda: device == "cuda",
        is_xpu=lambda: False,
        is_device_capability_family=lambda family: 10 * capability[0] == family,
        get_device_capability=lambda: SimpleNamespace(major=capability[0], minor=capability[1]),
        has_device_capability=lambda least: 10 * capability[0] + capability[1] >= least,
    )
    _offer("vllm.platforms", current_platform=platform)
    _offer("vllm.triton_utils", triton=triton, tl=triton.language)
    _offer("vllm.utils.math_utils", next_power_of_2=triton.next_power_of_2, cdiv=triton.cdiv)
    _offer("vllm.utils.torch_utils", set_random_seed=seed_all, canonicalize_singleton_dim_strides=lambda x: x)
    _offer("vllm.v1.kv_cache_interface", KVQuantMode=KVQuantMode)
    ops = "vllm.v1.attention.ops"
    _offer(f"{ops}.triton_unified_attention", unified_attention=unified_attention, MAX_3D_QUERY_LEN=8)
    _offer(f"{ops}.triton_unified_attention_diffkv", unified_attention_diffkv=unified_attention_diffkv)
    names = ("flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata")
    of_mla = {name: getattr(flash_mla, name) for name in names}
    supported = dict.fromkeys(
        ("is_flashmla_dense_supported", "is_flashmla_sparse_supported"), lambda: (True, None)
    )
    _offer(f"{ops}.flashmla", **of_mla, **supported)
    _offer(
        "vllm.v1.attention.backends.fa_utils",
        flash_attn_varlen_func=flash_attn_varlen_func,
        get_flash_attn_version=lambda **given: 3,
        is_flash_attn_varlen_func_available=lambda: True,
    )
    _offer(
        "vllm.vllm_flash_attn",
        flash_attn_varlen_func=flash_attn_varlen_func,
        is_fa_version_supported=lambda version: True,
        fa_version_unsupported_reason=lambda version: "",
    )


VLLM = Kit(
    kept="vllm_functions",
    version="0.33.0",
    folder="tests/kernels/attention",
    helpers=(),
    files=(
        "test_flash_attn", "test_flashmla", "test_flashmla_sparse", "test_triton_unified_attention",
        "test_triton_unified_attention_diffkv",
    ),
    excluded={
        "queries of 8 bits, which attnc refuses": (
            r"q_dtype1|unified_attn\[.*-float8_e4m3fn-|varlen_with_paged_kv\[float8"
            r"|fp8q|fp8_query|test_flash_mla\[torch_dtype2|fp16_input_fp8_output|fp8_softmax"
        ),
        "ranges of images in a prompt, which the adapter refuses": r"clamped_mm",
        "asks a part of vLLM's own kernels, or of another backend": (
            r"splitk|reduce_segments|softcap_does_not_overflow|spec_verify|block_m_grouping|launch"
            r"|flashinfer|deepseek_v4|metadata_smoke|cache_writer_scales|fa4_hd256"
        ),
    },
    prepare=prepare_vllm,
)  # fmt: skip

KITS = {"flashinfer": FLASHINFER, "vllm": VLLM}


# --- how they are run ---------------------------------------------------------------------------------------


class Chosen:
    """A plugin of pytest: which tests run, and what became of them."""

    def __init__(self, kit: Kit, options: argparse.Namespace, done: Collection[str]) -> None:
        self.kit, self.options, self.done = kit, options, done
        self.outcomes: list[Outcome] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves the cases of a part, in an order that soon sees something of everything."""
        by_test: dict[str, list[pytest.Item]] = {}
        excluded: dict[Outcome, None] = {}
        for item in items:
            name = _name(item.nodeid)
            if why := self.kit.why(name):
                excluded[Outcome(name.partition("[")[0], "excluded", why)] = None
            elif re.search(self.options.only, name):
                by_test.setdefault(name.partition("[")[0], []).append(item)
        if self.options.part.startswith("0/"):  # one process says it
            self.outcomes += excluded
            if self.options.part != WHOLE:
                announce([*excluded])
        draw, most = random.Random(self.options.seed), self.options.sample
        left = [
            item
            for cases in by_test.values()
            for item in (cases if most is None else draw.sample(cases, min(len(cases), most)))
        ]
        draw.shuffle(left)
        items[:] = [
            item
            for number, item in enumerate(left)
            if is_mine(number, self.options.part) and _name(item.nodeid) not in self.done
        ]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            why = "" if report.outcome == "passed" else _reason(report)
            found = Outcome(_name(report.nodeid), report.outcome, why)
            self.outcomes.append(found)
            if self.options.part != WHOLE:
                announce([found])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        try:
            return (yield)
        except torch.cuda.OutOfMemoryError:
            pytest.skip("the share of the GPU's memory is too small")

    def pytest_runtest_teardown(self) -> None:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.cuda.empty_cache()


def _name(nodeid: str) -> str:
    return nodeid.rpartition("/")[2].replace(".py", "", 1)


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    said = getattr(report, "wasxfail", "") or (crash.message if crash else report.longreprtext)
    return " ".join(str(said).split())[:300]


@contextmanager
def folder(kit: Kit, source: Path, device: str) -> Iterator[Path]:
    """A folder to run in: the files, which say a device other than theirs where there is no GPU."""
    with tempfile.TemporaryDirectory() as name:
        made = Path(name)
        for helpers in kit.helpers:
            shutil.copytree(source / helpers, made / helpers)
        (made / kit.folder).mkdir(parents=True)
        for package in (made / kit.folder).relative_to(made).parents:
            if package.name:
                (made / package / "__init__.py").touch()
        (made / kit.folder / "__init__.py").touch()
        for file in kit.files:
            text = (source / kit.folder / f"{file}.py").read_text(encoding="utf-8")
            if device == "cpu":
                text = re.sub(r'"cuda(:0)?"|(?<=device=)0\b', '"cpu"', text).replace(".to(0)", '.to("cpu")')
            (made / kit.folder / f"{file}.py").write_text(text, encoding="utf-8")
        yield made


def run(kit: Kit, options: argparse.Namespace, device: str, done: Collection[str]) -> list[Outcome]:
    """Runs a part of the tests in this process, with its part of the GPU's memory, and returns what became
    of them.
    """
    if device == "cpu":
        from attnc.verify.interpreter import ensure_interpreter

        ensure_interpreter()
        cuda: Any = torch.cuda
        cuda.synchronize = cuda.empty_cache = lambda *given: None
        cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=1 << 40)
    else:
        torch.cuda.set_per_process_memory_fraction(0.8 / int(options.part.partition("/")[2]))
    chosen = Chosen(kit, options, done)
    with folder(kit, options.source.resolve(), device) as place:
        kit.prepare(device)
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]  # theirs has the same name
        sys.path.insert(0, str(place))
        os.chdir(place)
        command = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(place)]
        command += ["-W", "ignore", *(f"{kit.folder}/{file}.py" for file in kit.files)]
        pytest.main(command, plugins=[chosen])
    return chosen.outcomes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kit", choices=KITS)
    parser.add_argument("--source", type=Path, required=True, help="the repository, or its tests")
    parser.add_argument("--only", default="", help="cases whose names match")
    parser.add_argument("--sample", type=int, help="cases of each test, drawn; without it all")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--write", action="store_true", help="keep outcomes")
    parser.add_argument("--rest", action="store_true", help="only those that have not passed before")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the tests")
    parser.add_argument("--seconds", type=float, help="after which the processes are ended")
    parser.add_argument("--part", default=WHOLE, help=argparse.SUPPRESS)
    options = parser.parse_args()
    kit, device = KITS[options.kit], "cuda" if torch.cuda.is_available() else "cpu"
    before = passed_before(kit.kept, kit.version, device) if options.rest else []
    if options.part == WHOLE and (options.workers > 1 or options.seconds):
        given = [options.kit, "--source", str(options.source.resolve()), "--only", options.only]
        given += ["--seed", str(options.seed), *(["--rest"] if options.rest else [])]
        given += [] if options.sample is None else ["--sample", str(options.sample)]
        shared = share("tests.engines.functions", given, options.workers, options.seconds)
        return keep(kit.kept, kit.version, device, before + shared, write=options.write)
    found = run(kit, options, device, {outcome.name for outcome in before})
    if options.part != WHOLE:
        return 0
    return keep(kit.kept, kit.version, device, before + found, write=options.write)


if __name__ == "__main__":
    sys.exit(main())
