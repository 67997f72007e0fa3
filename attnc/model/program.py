"""A resolved spec file: attentions and projections, each with its schedules."""

from __future__ import annotations

from dataclasses import dataclass, field

from attnc.diagnostics import Diagnostic
from attnc.model.attention import Attention
from attnc.model.projection import Projection
from attnc.model.schedule import Schedule
from attnc.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A resolved spec file. schedules: of its attentions; projection_schedules: of its projections; warnings:
    what `resolve` found that is not an error, in source order.
    """

    source: Source
    attentions: tuple[Attention, ...]
    schedules: tuple[Schedule, ...]
    projections: tuple[Projection, ...] = ()
    projection_schedules: tuple[Schedule, ...] = ()
    warnings: tuple[Diagnostic, ...] = field(default=(), compare=False, repr=False)

    def attention(self, name: str) -> Attention:
        """The attention block of this name; KeyError if there is none."""
        for attention in self.attentions:
            if attention.name == name:
                return attention
        raise KeyError(name)

    def projection(self, name: str) -> Projection:
        """The projection block of this name; KeyError if there is none."""
        for projection in self.projections:
            if projection.name == name:
                return projection
        raise KeyError(name)
