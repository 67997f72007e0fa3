"""Attention over ranks on GPUs, in processes of their own: NCCL, streams, and kernels that are compiled."""

import json
from pathlib import Path

import pytest
import torch

from attnc.cli import main
from tests.distributed.specs import SPECS, text

RANKS = 2
WIDE = {
    "causal": text(dtype="bf16").replace("16]", "64]").replace("tile.q = 16, tile.kv = 16", "tile.q = 64"),
    "documents": SPECS["documents"].replace("16]", "64]").replace("tile.q = 16, tile.kv = 16", "tile.q = 64"),
}


def verify(spec: str, target: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(spec, encoding="utf-8")
    arguments = ["--ranks", str(RANKS), "--target", target, "--count", "5", "--json"]
    assert main(["verify", str(path), *arguments]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert "NVIDIA" in found["place"]
    assert len(found["cases"]) == 5


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
@pytest.mark.parametrize("name", WIDE)
def test_ranks_agree_with_the_reference(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verify(WIDE[name], "triton", tmp_path / "small.attn", capsys)


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
def test_so_do_kernels_of_hopper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    spec = text("window(200, 0)", dtype="bf16").replace("16]", "64]").replace("for triton", "for cuda.sm_90a")
    spec = spec.replace("tile.q = 16, tile.kv = 16", "backward { accumulate.dq = atomic }")
    verify(spec, "cuda.sm_90a", tmp_path / "small.attn", capsys)


def test_one_rank_has_the_bits_of_the_kernel(device: torch.device) -> None:
    """What ranks run, on one GPU: the derived kernels."""
    from attnc.api.compile import compile_family
    from attnc.distributed import ContextParallel
    from attnc.distributed.group import Alone

    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(2, 500, heads, 64, generator=generator, device=device).bfloat16() for heads in (4, 2, 2)
    )
    cp = ContextParallel(WIDE["causal"], Alone())
    own = [x.requires_grad_() for x in cp.shard(q, k, v)]
    o, lse = cp(*own)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = compile_family(WIDE["causal"], warn=False)(*leaves)
    assert torch.equal(o, expected[0])
    assert torch.equal(lse, expected[1])
    do = torch.randn_like(o)
    for found, want in zip(
        torch.autograd.grad(o, own, do), torch.autograd.grad(expected[0], leaves, do), strict=True
    ):
        assert torch.equal(found, want)
