"""What a diagnostic code stands for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CodeInfo:
    """`title` is a line; `explanation` says what the rule is, why it is there and what to write instead."""

    title: str
    explanation: str
