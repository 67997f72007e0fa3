"""How much slower gradients are whose schedule leaves wgmma."""

import json
from pathlib import Path

from attnc.plan.sm90.backward import WITHOUT_WGMMA

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


def wide(name: str) -> dict[str, float]:
    cells = json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))["cells"]
    return {
        cell["name"]: cell["results"]["attnc"]["tflops"] for cell in cells if cell["name"].startswith("d256")
    }


def test_the_warning_states_the_least_factor_of_the_figures() -> None:
    with_mma, with_wgmma = wide("backward_cuda_h200"), wide("backward_hopper_h200")
    assert len(with_mma) == 6
    factors = [with_wgmma[cell] / with_mma[cell] for cell in with_mma]
    assert WITHOUT_WGMMA <= min(factors) < WITHOUT_WGMMA + 0.1
