"""The loops of a CUDA kernel as text: one `for` runs over the tiles of all regions."""

from __future__ import annotations

from attnc.model.tensors import DType
from attnc.plan.ir import Statement
from attnc.plan.regions import guard_of, partial_test
from attnc.plan.steps import fetches_for, kept_fetches
from attnc.target.kernel_view import KernelView
from attnc.target.sm80.printer import scalar, statement


class CudaLoopText(KernelView):
    """Attribute by attribute what `templates/cuda/*.jinja` print of loops and scores."""

    dtypes: dict[str, DType]

    @property
    def dropout_p(self) -> str:
        assert self.kernel.softmax.dropout is not None
        return scalar(self.kernel.softmax.dropout.p)

    @property
    def drawn_by(self) -> str:
        """What a draw depends on besides the probability and the position: seed, sequence and head."""
        dropout = self.kernel.softmax.dropout
        assert dropout is not None
        return f"{scalar(dropout.seed)}, b, {scalar(dropout.head)}"

    @property
    def lo(self) -> str:
        return scalar(self.kernel.regions.loops[0].start)

    @property
    def hi(self) -> str:
        return scalar(self.kernel.regions.loops[-1].stop)

    @property
    def masked(self) -> str:
        """Whether the tile at hand is partial."""
        return scalar(partial_test(self.kernel.regions))

    @property
    def guard(self) -> str:
        guard = guard_of(self.kernel.regions)
        return "" if guard is None else scalar(guard)

    @property
    def end(self) -> str:
        """The variable where the loop ends."""
        return "hi"

    @property
    def end_of_kept(self) -> str:
        """Where zeros begin in a copied tile that must not hold what no query keeps: at the end of the loop,
        where a condition for them ends it.
        """
        step, over_keys = self.kernel.step, self.kernel.regions.axis == "kv"
        return self.end if over_keys and step.kept != step.kept_inside else "N"

    @property
    def keeps(self) -> str:
        """What a copy of such a tile has to ask of each key, as an argument; empty if nothing."""
        return "" if self.kernel.step.kept_inside is None else ", keeps"

    @property
    def kept(self) -> str:
        """Whether some query keeps the key at hand."""
        assert self.kernel.step.kept_inside is not None
        return scalar(self.kernel.step.kept_inside)

    @property
    def kept_values(self) -> list[str]:
        """The loads that say so."""
        assert self.kernel.step.kept_inside is not None
        fetches = fetches_for(kept_fetches(self.kernel), self.kernel.step.kept_inside)
        return [statement(fetch, self.dtypes, (), scalar) for fetch in fetches]

    @property
    def asks_partial_tiles_alone(self) -> bool:
        """Whether keys of full tiles are not asked, since it takes a load."""
        return self.kernel.regions.axis == "kv" and self.masked != "true" and bool(self.kept_values)

    @property
    def tests(self) -> tuple[Statement, ...]:
        """What the guard reads of the tile at hand."""
        return self.kernel.regions.tests

    @property
    def times_scale(self) -> str:
        return "" if self.kernel.softmax.scale is None else " * SCALE"
