"""A case that has been run, and what its module gives for other inputs: what properties compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from attnc.model.attention import Attention
from attnc.verify.case import Case
from attnc.verify.problem import Value, build
from attnc.verify.subject import Subject

Inputs: TypeAlias = Mapping[str, Value]
Outputs: TypeAlias = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Run:
    """A case that has been run: its dense inputs, and its outputs."""

    subject: Subject
    case: Case
    inputs: Inputs
    outputs: Outputs

    @staticmethod
    def of(subject: Subject, case: Case) -> Run:
        inputs = build(subject.variant.attention, case, device=subject.device).inputs
        return Run(subject, case, inputs, _outputs(subject, inputs, case.config))

    @property
    def attention(self) -> Attention:
        return self.subject.variant.attention

    def again(self, inputs: Inputs, config: int | None = None) -> Outputs:
        """The outputs for other inputs, or of another config."""
        return _outputs(self.subject, inputs, self.case.config if config is None else config)

    def tensor(self, name: str) -> torch.Tensor:
        value = self.inputs[name]
        assert isinstance(value, torch.Tensor)
        return value


def _outputs(subject: Subject, inputs: Inputs, config: int) -> Outputs:
    outputs = subject.blank(inputs)
    subject.run(inputs, outputs, config)
    return outputs
