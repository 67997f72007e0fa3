"""Every spec of examples/ compiles without a warning, and its interpreted results are within their bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attnc
from attnc.build import diagnose, front, plan_program
from attnc.verify.search import run
from attnc.verify.trials import trial_of

EXAMPLES = Path(__file__).parents[2] / "examples"
SPECS = sorted(EXAMPLES.glob("*.attn"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_it_compiles_for_each_of_its_targets(path: Path) -> None:
    assert diagnose(path) == ()


@pytest.mark.one_in(8)
@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_it_is_within_its_bound(path: Path) -> None:
    module = next(module for module in plan_program(front(path)).modules if module.target == "triton")
    report = run(trial_of(module), count=2)
    assert report.ok, report.failures
    assert report.examples >= 2


def test_sigmoid_attention_is_what_its_paper_says() -> None:
    torch.manual_seed(0)
    sigmoid = attnc.compile(EXAMPLES / "sigmoid.attn", target="triton")
    q, k, v = torch.randn(3, 1, 40, 2, 64, dtype=torch.bfloat16)
    o = sigmoid(q, k, v)
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) / 8 - torch.log(torch.tensor(40.0))
    weights = torch.sigmoid(scores).tril()
    expected = torch.einsum("bhij,bjhd->bihd", weights, v.float())
    torch.testing.assert_close(o.float(), expected, rtol=0, atol=2.0**-6 * float(expected.abs().max()))


def test_a_tree_of_drafts_sees_its_ancestors() -> None:
    """Two branches of one root give what each gives as a sequence of its own."""
    torch.manual_seed(0)
    verify = attnc.compile(EXAMPLES / "draft_tree.attn", target="triton")
    past, parents = 30, (-1, 0, 1, 0, 3)
    nodes = len(parents)
    tree = torch.zeros(1, nodes, nodes, dtype=torch.bool)
    for node, parent in enumerate(parents):
        tree[0, node] = tree[0, parent] if parent >= 0 else False
        tree[0, node, node] = True
    q = torch.randn(1, nodes, 4, 128, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, past + nodes, 2, 128, dtype=torch.bfloat16)
    o = verify(q, k, v, tree, torch.tensor([past + nodes], dtype=torch.int32))
    branch = [0, 3, 4]
    keys = [*range(past), *(past + node for node in branch)]
    alone = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    length = torch.tensor([len(keys)], dtype=torch.int32)
    expected = verify(q[:, branch], k[:, keys], v[:, keys], alone, length)
    torch.testing.assert_close(o[:, branch], expected, rtol=0, atol=2.0**-7)
