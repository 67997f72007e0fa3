"""A family in a library that AOTInductor made, at lengths that it was not made for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attnc
from tests.compat.test_operators import SPEC, package

_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)


# Inductor copies torch's own LeafSpec.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.skipif(
    _OLD, reason="aoti_load_package of torch 2.11 ends the process where operators are Python"
)
def test_a_compiled_package_runs_at_other_lengths(device: torch.device, tmp_path: Path) -> None:
    package(attnc.compile(SPEC), tmp_path, device, ((20, 30), (7, 50), (1000, 1000)))
