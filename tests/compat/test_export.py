"""`attnc export`: a folder that programs load, with and without the packages that it is for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnc.api.compile import compile_family
from attnc.api.fastest import HOPPER
from attnc.cli import main
from attnc.compat import call, compiled, export
from attnc.compat.exported import module_name
from attnc.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
from attnc.compat.form import Form
from tests.processes import run_program

CAUSAL = Form(dtype="float16", size=16, size_v=16, causal=True, splits=0)
WINDOW = replace(CAUSAL, left=True)
GEMMA = replace(CAUSAL, softcap=True)
GPT_OSS = replace(CAUSAL, sink=True)
TRAINED = Form(dtype="float16", size=16, size_v=16, causal=True, grads=("q", "k", "v"))
FORMS = (CAUSAL, TRAINED, WINDOW, GEMMA, replace(GEMMA, left=True), GPT_OSS, replace(GPT_OSS, left=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported with a few forms, as all of them take a minute."""
    path = tmp_path_factory.mktemp("export") / "kernels"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "forms", lambda dtypes, sizes: iter(FORMS))
        assert main(["export", "--hf-kernel", str(path), "--sizes", "16"]) == 0
    return path


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q = torch.randn(1, 5, 4, 16).half()
    k, v = torch.randn(2, 1, 9, 2, 16).half()
    return q, k, v


def test_what_is_exported_covers_models() -> None:
    """A form for each call that transformers makes, each once."""
    found = list(export.forms(["f16"], [64]))
    assert len(found) == len(set(found)) == 112
    large = [replace(form, size=64, size_v=64) for form in FORMS if form != TRAINED]
    assert replace(TRAINED, size=64, size_v=64) in found
    assert set(large) <= set(found)


@pytest.mark.parametrize("most", [1, 5])
def test_what_is_exported_covers_padded_batches(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences end to end, of several tokens in a prompt and of one in each later step."""
    asked: list[Form] = []

    def noting(form: Form) -> Any:
        asked.append(form)
        return load(form)

    load = compiled.load_form
    monkeypatch.setattr(call, "load_form", noting)
    monkeypatch.setattr(call, "_PREPARED", {})
    k, v = torch.randn(2, 9, 2, 16).half()
    q, starts = torch.randn(2 * most, 4, 16).half(), torch.tensor([0, most, 2 * most], dtype=torch.int32)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    flash_attn_varlen_func(q, k, v, starts, ends, most, 5, causal=True)
    assert asked[0].splits == (0 if most == 1 else None)
    assert set(asked) <= set(export.forms(["f16"], [16]))


def test_the_folder_stands_alone(folder: Path) -> None:
    """In a process that cannot import attnc; refused by name is what was not exported."""
    package = folder / "build" / "torch-universal" / "attnc"
    program = f"""
import importlib.util, sys
sys.modules["attnc"] = None
spec = importlib.util.spec_from_file_location("exported", {str(package / "__init__.py")!r})
module = importlib.util.module_from_spec(spec)
sys.modules["exported"] = module
spec.loader.exec_module(module)
import torch
torch.manual_seed(0)
q = torch.randn(1, 5, 4, 16).half()
k, v = torch.randn(2, 1, 9, 2, 16).half()
print(module.flash_attn_func(q, k, v, causal=True).double().sum().item())
try:
    module.flash_attn_func(q, k, v)
except ValueError as failure:
    print(str(failure).splitlines()[0])
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = run_program(program, environment=environment, check=True)
    total, refusal = done.stdout.splitlines()
    assert float(total) == pytest.approx(
        flash_attn_func(*inputs(), causal=True).double().sum().item(), abs=0.05
    )
    assert refusal.startswith("these kernels were exported without one for this call")


def test_a_hopper_takes_kernels_of_its_own(folder: Path) -> None:
    """As far as their import, which needs neither CuPy nor attnc; the fastest unless bits have to be the
    same.
    """
    package = folder / "build" / "torch-universal" / "attnc"
    program = f"""
import importlib.util, sys
sys.modules["attnc"] = None
spec = importlib.util.spec_from_file_location("exported", {str(package / "__init__.py")!r})
module = importlib.util.module_from_spec(spec)
sys.modules["exported"] = module
spec.loader.exec_module(module)
from dataclasses import replace
from exported.compiled import load_form
from exported.form import Form
form = Form(dtype="float16", size=16, size_v=16, causal=True, grads=("q", "k", "v"))
for fast in (False, True):
    for targets in ((), ("cuda.sm_80", "triton"), ("cuda.sm_90a", "triton")):
        found = load_form(replace(form, fast=fast, targets=targets))
        print("sm_90a" in found.__name__, "fast" in found.__name__, type(found.CALL).__name__)
"""
    done = run_program(program, check=True)
    triton = "False False TritonAttention"
    assert done.stdout.splitlines() == [
        *(triton, triton, "True False HopperAttention"),
        *(triton, triton, "True True HopperAttention"),
    ]


def test_fast_gradients_of_hopper_are_those_in_any_order() -> None:
    files = export.kernel_files(TRAINED)
    for fast in (False, True):
        folder = f"kernels/{module_name(TRAINED, HOPPER, fast=fast)}"
        family = compile_family(TRAINED.text, target=HOPPER, deterministic=not fast, warn=False)
        kernels = {path: text for path, text in family.files.items() if path.endswith(".cu")}
        assert kernels
        assert {path: files[f"{folder}/{path}"] for path in kernels} == kernels


def test_metadata_names_the_package(folder: Path) -> None:
    facts = json.loads((folder / "build" / "torch-universal" / "metadata.json").read_text())
    assert facts["name"] == "attnc"
    assert facts["id"].isidentifier()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--sizes", "64,x"], "--sizes"),
        (["--sizes", "2000"], "--sizes"),
        (["--sizes", "²"], "--sizes"),
        (["--dtypes", "f61"], "did you mean 'f16'?"),
        (["--name", "My Kernels"], "no name of a package"),
    ],
)
def test_mistakes(
    arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "--hf-kernel", str(tmp_path / "new"), *arguments]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_is_refused_before_anything_is_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(export, "kernel_files", lambda form: pytest.fail("compiled"))
    assert main(["export", "--hf-kernel", str(tmp_path / "file" / "x")]) == 2
    assert f"{tmp_path / 'file'}: not a folder" in capsys.readouterr().err


def test_an_export_is_brought_up_to_date_and_others_files_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kernels"
    package = folder / "build" / "torch-universal" / "attnc"
    kernels: list[set[str]] = []
    for forms in ((CAUSAL, WINDOW), (CAUSAL,)):
        monkeypatch.setattr(export, "forms", lambda dtypes, sizes, forms=forms: iter(forms))
        assert main(["export", "--hf-kernel", str(folder)]) == 0
        kernels.append({path.name for path in package.rglob("*.py")})
        (package / "mine.py").write_text("mine")
    assert f"{module_name(WINDOW)}.py" in kernels[0] - kernels[1]
    edited = package / "kernels" / f"{module_name(CAUSAL)}.py"
    edited.write_text("mine")
    assert main(["export", "--hf-kernel", str(folder)]) == 2
    assert f"{edited.name} (edited since attnc wrote it)" in capsys.readouterr().err
    assert {edited.read_text(), (package / "mine.py").read_text()} == {"mine"}


def test_a_folder_of_others_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "attnc.compat.export.forms", lambda *_: ()
    )  # what is written beside kernels is enough
    (tmp_path / "mine").write_text("mine")
    assert main(["export", "--hf-kernel", str(tmp_path), "--sizes", "16", "--dtypes", "f16"]) == 2
    assert "holds files, and none that attnc has written: mine" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# --- with the packages that it is for -----------------------------------------------------------------------


@pytest.fixture
def loaded(folder: Path) -> Any:
    kernels = pytest.importorskip("kernels", reason="loads the folder")
    if not hasattr(kernels, "get_local_kernel"):  # a folder of this name on the path, which is a namespace
        pytest.skip("kernels is not installed")
    return kernels.get_local_kernel(folder)


def test_kernels_loads_it(loaded: Any) -> None:
    expected = flash_attn_func(*inputs(), causal=True)
    assert torch.equal(loaded.flash_attn_func(*inputs(), causal=True), expected)


def llama(transformers: Any) -> Any:
    return transformers.LlamaForCausalLM, transformers.LlamaConfig


def gemma(transformers: Any) -> Any:
    return transformers.Gemma2ForCausalLM, transformers.Gemma2Config


def gpt_oss(transformers: Any) -> Any:
    return transformers.GptOssForCausalLM, transformers.GptOssConfig


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "more"),
    [
        (llama, {}),
        (gemma, {"sliding_window": 6, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 20}),
        (gpt_oss, {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1}),
    ],
    ids=["llama", "gemma2", "gpt_oss"],
)
def test_models_generate_what_they_do_with_eager(
    model: Callable[[Any], Any], more: dict[str, Any], loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights, greedy tokens. transformers fetches from the hub what is here handed to it."""
    transformers = pytest.importorskip("transformers", reason="has the models")
    hub = pytest.importorskip("transformers.integrations.hub_kernels", reason="loads the folder")
    monkeypatch.setattr(hub, "is_kernels_available", lambda *args, **options: True)
    monkeypatch.setattr(hub, "get_kernel", lambda *args, **options: loaded)
    kind, config = model(transformers)
    prompt = torch.tensor([[5, 9, 2, 40, 33, 7, 8, 1, 60], [3, 3, 50, 12, 30, 2, 44, 21, 6]])
    tokens = []
    for implementation in ("eager", "attnc/kernels"):
        torch.manual_seed(0)
        made = kind._from_config(
            config(**SIZES, **more), dtype=torch.float16, attn_implementation=implementation
        ).eval()
        assert made.config._attn_implementation == implementation
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        tokens.append(made.generate(prompt, attention_mask=torch.ones_like(prompt), **options))
    assert torch.equal(*tokens)
