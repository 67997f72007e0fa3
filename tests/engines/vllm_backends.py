"""vLLM's own tests of attention backends, run with attnc's in the place of its own.

    python -m tests.engines.vllm_backends --source FOLDER

FOLDER is vLLM's source of the version that is installed (its sdist on PyPI has it); vLLM itself is imported
from where Python finds it. The files run as they are but for their lists of backends. What does not fit a
machine has a stand-in: configurations of models that would be downloaded, the platform where there is no GPU,
and compiled operations on a cache where they are not loaded. `--write` keeps outcomes in
`outcomes/vllm.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Container, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.outcomes import WHOLE, Outcome, announce, is_mine, keep, passed_before, share
from tests.engines.standins import VLLM, register_models, stand_in

#: Sizes of the models whose configurations the tests ask for, as published.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "torch_dtype": "bfloat16",
    },
    # Its heads and window, as a model without experts.
    "microsoft/Phi-tiny-MoE-instruct": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sliding_window": 2047,
        "max_position_embeddings": 4096,
        "vocab_size": 32064,
        "torch_dtype": "bfloat16",
    },
    "deepseek-ai/DeepSeek-R1": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 163840,
        "vocab_size": 129280,
        "torch_dtype": "bfloat16",
    },
    "deepseek-ai/DeepSeek-V2-Lite-Chat": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "max_position_embeddings": 163840,
        "vocab_size": 102400,
        "torch_dtype": "bfloat16",
    },
}
_MODULES = (
    "qwen3.Qwen3ForCausalLM", "mistral.MistralForCausalLM", "deepseek_v2.DeepseekV3ForCausalLM",
    "deepseek_v2.DeepseekV2ForCausalLM",
)  # fmt: skip
_LIST = r"^( *)(\w*BACKENDS_TO_TEST|SPARSE_BACKEND\w*)(?:: [^=]+)? = (?:\[[^\]]*\]|\([^)]*\)|[^\n]+)$"
_TESTS = "tests/v1/attention"
DENSE, LATENT, SPARSE = "test_attention_backends.py", "test_mla_backends.py", "test_sparse_mla_backends.py"
#: Tests of each file that ask any backend, and why the rest of the file is not run.
ABOUT = {
    DENSE: ("test_causal_backend", "test_sliding_window_backend", "test_non_causal_backend"),
    LATENT: ("test_backend_correctness", "test_chunked_context_backend"),
    SPARSE: ("test_sparse_backend_decode_correctness",),
}
#: Cases that are run where kernels are interpreted.
_SMALL = {
    DENSE: r"(auto-4-.*-(small_|mixed_small)|fp8-4-.*-small_decode|2-.*-small_prefill|Qwen.*mixed_small)",
    SPARSE: r"deepseek-1.0-1.0-64-4-(auto|fp8_ds_mla)-(small_decode|mixed_small)-attnc",
    LATENT: r"deepseek-.*-(1.0-1.0-auto-16-.*-(small_|spec_decode_small)|2.0-3.0-fp8-16-.*-small_decode)",
}


class Listed(list[Any]):
    """A list of backends that stays as it is."""

    def remove(self, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...


def changed(text: str, name: str) -> str:
    """The text of a test file with attnc's backends in its lists, and in theirs of larger blocks none."""
    head = "from tests_engines_vllm_backends import Listed as _Listed\n"
    ours = "AttentionBackendEnum.CUSTOM" if name == DENSE else 'AttentionBackendEnum["ATTNC_MLA"]'
    if name == SPARSE:
        head += "from attnc.adapters.vllm.mla import AttncMLAPrefill as _Prefill\n"
        head += "from attnc.adapters.vllm.sparse import AttncSparseMLABackend as _Sparse\n"
        ours = "_Sparse"
        text = text.replace("= get_mla_prefill_backend(vllm_config)(", "= _Prefill(")  # made, and not asked
        text = text.replace("if not (current_platform.is_cuda() or", "if False and (")  # skips the file

    def listed(found: re.Match[str]) -> str:
        if found[2].startswith("SPARSE_BACKEND_") and not found[2].endswith("IDS"):
            return found[0]
        kept = "MLAPrefillBackendEnum.CUSTOM" if found[2].startswith("PREFILL") else ours
        kept = '"attnc"' if found[2].endswith("IDS") else kept
        return f"{found[1]}{found[2]} = _Listed([{kept}])"

    text = re.sub(_LIST, listed, text, flags=re.MULTILINE)
    text = re.sub(r"LARGE_BLOCK_BACKENDS = \(.*?\n    \)", "LARGE_BLOCK_BACKENDS = []", text, flags=re.DOTALL)
    at = text.index("\nimport ") if "\nimport " in text else text.index("\nfrom ")
    return f"{text[: at + 1]}{head}{text[at + 1 :]}"


@contextmanager
def folder(source: Path) -> Iterator[Path]:
    """A folder to run in: vLLM's tests, with ours in their lists, and configurations of models."""
    with tempfile.TemporaryDirectory() as name:
        made = Path(name)
        for package in ("tests", "tests/v1", _TESTS):
            (made / package).mkdir()
            (made / package / "__init__.py").touch()
        for file in ("utils.py", *ABOUT):
            text = (source / _TESTS / file).read_text(encoding="utf-8")
            kept = text if file == "utils.py" else changed(text, file)
            (made / _TESTS / file).write_text(kept, encoding="utf-8")
        for model, sizes in MODELS.items():
            (made / model).mkdir(parents=True)
            (made / model / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
        yield made


def prepare(device: str) -> None:
    """Loads the plug-in, and stands in for what this machine does not have."""
    stand_in(VLLM)
    if device == "cpu":
        _have_triton()
        import vllm.platforms as platforms
        from vllm.platforms.cpu import CpuPlatform

        platforms._current_platform = CpuPlatform()
        cuda: Any = torch.cuda
        cuda.get_device_capability = lambda device=None: (9, 0)
        from vllm.model_executor.layers import linear, utils

        # Layers of these tests are not loaded, which is when vLLM chooses a product on a CPU.
        linear.dispatch_unquantized_gemm = lambda backend=None: utils.default_unquantized_gemm
    from attnc.adapters.vllm import register

    register()
    register_models(*_MODULES)
    from vllm import _custom_ops as ops

    if not hasattr(torch.ops._C_cache_ops, "concat_and_cache_mla"):
        ops.concat_and_cache_mla = concat_and_cache_mla
        ops.convert_fp8 = convert_fp8
        ops.gather_and_maybe_dequant_cache = gather_and_maybe_dequant_cache


def _have_triton() -> None:
    """Lets vLLM find Triton, which it takes where a driver is active, though kernels are interpreted."""
    from triton.backends import backends

    driver: Any = backends["nvidia"].driver
    is_active = driver.is_active
    driver.is_active = staticmethod(lambda: True)
    import_module("vllm.triton_utils")
    driver.is_active = is_active


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    skip_scale: bool = False,
) -> None:
    """Stands in for vLLM's compiled operation of this name."""
    rows, kept = torch.cat([kv_c, k_pe], -1), slot_mapping >= 0
    if kv_cache_dtype == "fp8_ds_mla":
        groups = kv_c.float().view(*kv_c.shape[:-1], -1, 128)
        scales = (groups.abs().amax(-1) / 448).clamp(min=1e-4).log2().ceil().exp2()
        codes = (groups / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)
        rows = torch.cat([x.view(torch.uint8) for x in (codes, scales, k_pe.contiguous())], -1)
    elif kv_cache_dtype.startswith("fp8"):
        rows = (rows.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    kv_cache.view(-1, kv_cache.shape[-1])[slot_mapping[kept]] = rows[: len(kept)][kept]


def convert_fp8(output: torch.Tensor, x: torch.Tensor, scale: float = 1.0, kv_dtype: str = "fp8") -> None:
    """Stands in for vLLM's compiled operation of this name, where x has the bytes of e4m3."""
    output.copy_(x.view(torch.float8_e4m3fn).float() * scale)


def gather_and_maybe_dequant_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """Stands in for vLLM's compiled operation of this name."""
    sequence = token_to_seq[:num_tokens].long()
    at = torch.arange(num_tokens, device=dst.device) - cu_seq_lens[sequence]
    at = at if seq_starts is None else at + seq_starts[sequence]
    page = src_cache.shape[1]
    rows = src_cache[block_table[sequence, at // page].long(), at % page]
    if kv_cache_dtype.startswith("fp8"):
        rows = rows.view(torch.float8_e4m3fn).float() * scale
    dst[:num_tokens] = rows.to(dst.dtype)


class Fixtures:
    """What the tests want of vLLM's conftest, which imports much more."""

    @pytest.fixture
    def default_vllm_config(self) -> Iterator[Any]:
        from vllm.config import VllmConfig, set_current_vllm_config

        config = VllmConfig()
        with set_current_vllm_config(config):
            yield config

    @pytest.fixture
    def dist_init(self, default_vllm_config: Any, tmp_path: Path) -> Iterator[None]:
        from vllm.distributed import parallel_state as state

        backend = "nccl" if torch.cuda.is_available() else "gloo"
        state.init_distributed_environment(1, 0, f"file://{tmp_path / 'store'}", 0, backend)
        state.initialize_model_parallel(1, 1)
        yield
        state.cleanup_dist_env_and_memory()

    @pytest.fixture
    def workspace_init(self) -> Iterator[None]:
        from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

        if torch.cuda.is_available():
            init_workspace_manager(torch.device(0))
        yield
        reset_workspace_manager()


class Chosen:
    """A plug-in of pytest that keeps tests of any backend, and notes how they end."""

    def __init__(self, device: str, only: str, part: str, before: Container[str]) -> None:
        self.device, self.only, self.part, self.before = device, only, part, before
        self.outcomes: list[Outcome] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kept = []
        for item in items:
            name = f"{item.path.name}::{item.name}"
            if self.only not in name or name in self.before:
                continue
            why = _why_not(item.path.name, item.name, self.device)
            if why and is_mine(0, self.part):
                self.outcomes.append(
                    Outcome(f"{item.path.name}::{item.name.partition('[')[0]}", "excluded", why)
                )
            elif not why:
                kept.append(item)
        items[:] = [item for number, item in enumerate(kept) if is_mine(number, self.part)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.removeprefix(f"{_TESTS}/")
        if report.failed:
            self.outcomes.append(Outcome(name, "failed", str(report.longrepr).strip().splitlines()[-1]))
        elif report.skipped:
            self.outcomes.append(
                Outcome(
                    name,
                    "skipped",
                    str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr),
                )
            )
        elif report.when == "call":
            self.outcomes.append(Outcome(name, "passed"))
        if self.part != WHOLE and self.outcomes:
            announce(self.outcomes)
            self.outcomes.clear()


def _why_not(file: str, test: str, device: str) -> str:
    """Returns why a test is not run, "" if it is."""
    name, _, case = test.partition("[")
    if not name.startswith(ABOUT[file]):
        return "asks another backend, or none"
    if device == "cpu" and not re.match(_SMALL[file], case):
        return "takes hours interpreted, and minutes on a GPU"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True, help="of vLLM, with its tests")
    parser.add_argument("--only", default="", help="tests whose names have this")
    parser.add_argument("--write", action="store_true", help="keep the outcomes")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the tests")
    parser.add_argument("--seconds", type=float, help="of the workers; what they do not reach is not kept")
    parser.add_argument("--rest", action="store_true", help="those that are not kept as passed here")
    parser.add_argument("--part", default=WHOLE, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    before = passed_before("vllm", version("vllm"), device) if options.rest else []
    if options.workers > 1:
        arguments = ["--source", str(options.source), "--only", options.only]
        arguments += ["--rest"] if options.rest else []
        shared = share("tests.engines.vllm_backends", arguments, options.workers, options.seconds)
        return keep("vllm", version("vllm"), device, before + shared, write=options.write)
    if device == "cpu":
        from attnc.verify.interpreter import ensure_interpreter

        ensure_interpreter()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    chosen = Chosen(device, options.only, options.part, {outcome.name for outcome in before})
    with folder(options.source.resolve()) as place:
        prepare(device)
        sys.modules["tests_engines_vllm_backends"] = sys.modules[__name__]
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]  # vLLM's package has the same name
        sys.path.insert(0, str(place))
        os.chdir(place)
        files = [f"{_TESTS}/{file}" for file in ABOUT]
        pytest.main(
            ["-v", "-p", "no:cacheprovider", "--rootdir", str(place), *files], plugins=[chosen, Fixtures()]
        )
    if options.part != WHOLE:
        announce(chosen.outcomes)
        return 0
    return keep("vllm", version("vllm"), device, before + chosen.outcomes, write=options.write)


if __name__ == "__main__":
    sys.exit(main())
