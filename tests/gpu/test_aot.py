"""A family in a library that AOTInductor made, at lengths that it was not made for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import attnc
from tests.compat.test_operators import SPEC, Layer, inputs


# Inductor copies torch's own LeafSpec.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.skip(reason="aoti_load_package of torch 2.11 ends the process where operators are Python")
def test_a_compiled_package_runs_at_other_lengths(device: torch.device, tmp_path: Path) -> None:
    layer = Layer(attnc.compile(SPEC)).to(device)
    rows, keys = (torch.export.Dim(name, min=2, max=4096) for name in ("rows", "keys"))
    shapes = {"q": {1: rows}, "k": {1: keys}, "v": {1: keys}}

    def moved(lengths: tuple[int, int]) -> Any:
        return tuple(x.to(device) for x in inputs(*lengths))

    program = torch.export.export(layer, moved((20, 30)), dynamic_shapes=shapes)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    loaded: Any = torch._inductor.aoti_load_package(package)
    for lengths in ((20, 30), (7, 50), (1000, 1000)):
        assert torch.equal(loaded(*moved(lengths)), layer(*moved(lengths)))
