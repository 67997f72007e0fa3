"""These tests run Triton's interpreter, which has to be chosen before triton is first imported."""

import pytest
from torch.nn.attention import flex_attention

from attnc.verify.interpreter import ensure_interpreter

ensure_interpreter()


@pytest.fixture
def gradients_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses gradients of FlexAttention on a CPU, which its eager form computes all the same."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
