"""Tests of functions that other projects have: which run, and on what."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.functions import FLASHINFER, VLLM, Kit

#: A file of the kind of FlashInfer's.
FILE = """
import pytest
import torch
from tests.test_helpers.jit import build

import flashinfer
from flashinfer.utils import has_flashinfer_jit_cache


@pytest.mark.parametrize("pos_encoding_mode", ["NONE", "ROPE_LLAMA"])
@pytest.mark.parametrize("kv_len", [5, 9])
def test_single_decode(kv_len, pos_encoding_mode):
    build()
    assert has_flashinfer_jit_cache()
    q = torch.zeros(2, 64, device="cuda:0")
    k = torch.randn(2, kv_len, 2, 64).to(q.device)
    o = flashinfer.single_decode_with_kv_cache(q, *k, pos_encoding_mode=pos_encoding_mode)
    torch.testing.assert_close(o, k[1].mean(0))


def test_that_fails():
    raise AssertionError("as it says")
"""


@pytest.mark.parametrize(
    ("kit", "name", "said"),
    [
        (FLASHINFER, "test_single_prefill::test_a[ROPE_LLAMA-1]", "rotation inside of attention"),
        (FLASHINFER, "test_batch_decode_kernels::test_a[NONE-54-128]", ""),
        (FLASHINFER, "test_batch_decode_kernels::test_a[NONE-16384-128]", "takes tens of GB"),
        (VLLM, "test_flash_attn::test_varlen_with_paged_kv[None-2-2048]", ""),
        (
            VLLM,
            "test_triton_unified_attention::test_triton_unified_attn[8-q_dtype1-2048]",
            "queries of 8 bits",
        ),
    ],
)
def test_a_case_is_excluded_for_a_reason(kit: Kit, name: str, said: str) -> None:
    assert kit.why(name).startswith(said)
    assert bool(kit.why(name)) == bool(said)


@pytest.mark.slow
@pytest.mark.nightly
def test_files_run_on_attncs_functions(tmp_path: Path) -> None:
    (tmp_path / "tests/attention").mkdir(parents=True)
    (tmp_path / "tests/test_helpers").mkdir()
    (tmp_path / "tests/test_helpers/jit.py").write_text("def build(): ...\n", encoding="utf-8")
    for name in FLASHINFER.files:
        text = FILE if name == "test_single_prefill" else ""
        (tmp_path / f"tests/attention/{name}.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "tests.engines.functions", "flashinfer", "--source", str(tmp_path)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stdout.splitlines()[-1].endswith("2 passed, 1 failed, 1 excluded")
    command += ["--only", "single_decode", "--sample", "1"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 0
    assert ran.stdout.splitlines()[-1].endswith("1 passed, 1 excluded")
