"""Several schedules of one attention: the package picks one, and all of them mean the same."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from attnc.build import compile_spec, support_outputs
from attnc.output import write
from attnc.verify.interpreter import ensure_interpreter

SPEC = Path(__file__).parents[2] / "specs" / "extend.attn"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The generated package, imported as a user does."""
    ensure_interpreter()
    folder = tmp_path_factory.mktemp("project")
    outputs = (*compile_spec(SPEC, folder).outputs, *support_outputs())
    write(outputs, folder / "kernels")
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("kernels.extend.triton")
    finally:
        sys.path.remove(str(folder))


def inputs(M: int, N: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, M, 4, 128), torch.randn(1, N, 2, 128), torch.randn(1, N, 2, 128)
    return (*(x.bfloat16() for x in (q, k, v)), torch.tensor([N - 1], dtype=torch.int32))


def test_the_choice_goes_by_the_sizes(package: ModuleType) -> None:
    device = torch.device("cpu")
    assert package._choose(device, (128,), (1, 4096, 32)) == "split"
    assert package._choose(device, (128,), (17, 4096, 32)) == "rows"


def test_all_schedules_agree(package: ModuleType) -> None:
    arguments = inputs(3, 70)
    o, lse = package.extend(*arguments)
    for schedule in ("split", "drafts", "rows"):
        other, other_lse = package.extend(*arguments, schedule=schedule)
        torch.testing.assert_close(other, o, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(other_lse, lse, atol=1e-3, rtol=1e-3)


def test_unknown_schedules_are_refused(package: ModuleType) -> None:
    with pytest.raises(ValueError, match="schedule: expected one of"):
        package.extend(*inputs(1, 16), schedule="fast")
