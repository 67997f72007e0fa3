"""Text that sums the gradients of what the score loads: where sums start, what a step adds, where they
end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from attnc.expr.logic import conj
from attnc.expr.nodes import FALSE, TRUE, Index
from attnc.plan.ir.backward import Adjoint
from attnc.target.adjoints import IN_KEYS, IN_ROWS, AdjointText
from attnc.target.triton.printer import address, scalar

_KV_IDX = Index("kv_idx")
_KV_ENDS = ("kv_idx", "kv", "kv_lo // BLOCK_N")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums(AdjointText):
    """The adjoints of one kernel as text; all_n: the length of the keys' tensors.

    An adjoint that varies along the outer axis at most is a vector in registers, one number for each outer
    position; any other is written by the step. Of a load that is never inside its tensor, nothing is added.
    """

    kept: ClassVar[str] = "tl.where(p == 0.0, 0.0, {})"

    all_n: str

    @property
    def count_tiles(self) -> bool:
        """Whether a sum has an entry for each tile of the outer axis."""
        return any(adjoint.along == () and adjoint.accumulate == "two_pass" for adjoint in self.adjoints)

    @property
    def step_names(self) -> list[str]:
        """What the step needs to write those that are no vectors."""
        found: list[str] = []
        for adjoint in self.adjoints:
            if self.is_vector(adjoint):
                continue
            if adjoint.accumulate == "two_pass":
                found += [f"{adjoint.name}_tile", self.all_n]
            else:
                rank = len(adjoint.load.indices)
                found += [f"{adjoint.name}_ptr", *(f"stride_{adjoint.name}_{axis}" for axis in range(rank))]
        return found

    @property
    def starts(self) -> Iterator[str]:
        """Before the loops."""
        for adjoint in self.adjoints:
            if self.is_vector(adjoint):
                yield f"{adjoint.name} = tl.zeros([{'BLOCK_M' if self.over_q else 'BLOCK_N'}], tl.float32)"
            elif adjoint.accumulate == "two_pass":
                yield f"{adjoint.name}_tile = {adjoint.name}_ptr + first_row * {self.all_n}"

    @property
    def steps(self) -> Iterator[str]:
        """In the step, where ds is the gradient of the tile's scores."""
        inside = f"({self.show(IN_ROWS)}) & ({self.show(IN_KEYS)})"
        for adjoint in self.adjoints:
            if self.is_vector(adjoint):
                sign, term = self.signed(adjoint)
                yield f"{adjoint.name} {sign}= tl.sum({term}, 1)"
                continue
            term = self._term(adjoint)
            if adjoint.accumulate == "atomic" and adjoint.guard == FALSE:
                continue
            if adjoint.along != ("q", "kv"):  # a gradient of queries, where the rows of a tile are keys
                where = scalar(conj(IN_ROWS, adjoint.guard))
                yield f'tl.atomic_add({self._at(adjoint)}, tl.sum({term}, 0), mask={where}, sem="relaxed")'
            elif adjoint.accumulate == "two_pass":
                at = f"{adjoint.name}_tile + {self._wide('q_idx')} * {self.all_n} + {self.show(_KV_IDX)}"
                cast = term if term.isidentifier() or term.startswith("tl.") else f"({term})"
                yield f"tl.store({at}, {cast}.to({adjoint.name}_tile.dtype.element_ty), mask={inside})"
            else:
                where = inside if adjoint.guard == TRUE else f"{inside} & ({self.show(adjoint.guard)})"
                yield f'tl.atomic_add({self._at(adjoint)}, {term}, mask={where}, sem="relaxed")'

    @property
    def ends(self) -> Iterator[str]:
        """After the loops."""
        index, tile, start = ("q_idx", "q", "q_lo // BLOCK_M") if self.over_q else _KV_ENDS
        inside = scalar(IN_ROWS if self.over_q else IN_KEYS)
        for adjoint in self.adjoints:
            name, atomic = adjoint.name, adjoint.accumulate == "atomic"
            # p is 0 in rows past the end, but not for keys past the end.
            total = f"tl.sum({name}, 0)" if self.over_q else f"tl.sum(tl.where({inside}, {name}, 0.0), 0)"
            guard = "" if adjoint.guard == TRUE else scalar(adjoint.guard)
            if not self.is_vector(adjoint) or (atomic and adjoint.guard == FALSE):
                continue
            if not adjoint.along and not atomic:
                yield f"tl.store({name}_ptr + (b * H + h).to(tl.int64) * {tile}_tiles + {start}, {total})"
            elif not adjoint.along:
                mask = f", mask={guard}" if guard else ""
                yield f'tl.atomic_add({self._at(adjoint)}, {total}{mask}, sem="relaxed")'
            elif not atomic:
                first = "first_row" if self.over_q else f"(b * H + h).to(tl.int64) * {self.all_n}"
                yield f"tl.store({name}_ptr + {first} + {index}, {name}, mask={inside})"
            else:
                mask = f"({inside}) & ({guard})" if guard else inside
                yield f'tl.atomic_add({self._at(adjoint)}, {name}, mask={mask}, sem="relaxed")'

    def _term(self, adjoint: Adjoint) -> str:
        """What one score adds."""
        sign, term = self.signed(adjoint)
        return term if sign == "+" else f"-{term}"

    def _at(self, adjoint: Adjoint) -> str:
        """Where in the gradient itself a load points."""
        printer = self.show if adjoint.along == ("q", "kv") else scalar
        return address(f"{adjoint.name}_ptr", adjoint.name, adjoint.load.indices, printer)

    def _wide(self, index: str) -> str:
        return self.show(Index(index)).replace(index, f"{index}.to(tl.int64)")
