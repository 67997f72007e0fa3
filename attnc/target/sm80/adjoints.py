"""Text that sums, in a CUDA kernel, the gradients of what the score loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from attnc.expr.construct import conj
from attnc.expr.nodes import TRUE, Expr, Index
from attnc.model.tensors import DType
from attnc.plan.ir import Fetch
from attnc.plan.ir.backward import Adjoint
from attnc.plan.steps import fetches_for
from attnc.target.adjoints import IN_KEYS, IN_ROWS, AdjointText
from attnc.target.printer import Printer
from attnc.target.sm80.printer import address, scalar, statement


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaSums(AdjointText):
    """The adjoints of one kernel as text.

    An adjoint that varies along the rows at most is a sum for each row of a thread; one that varies along the
    columns alone is summed column by column and added atomically; any other is written element by element.
    """

    kept: ClassVar[str] = "(p == 0.0f ? 0.0f : {})"

    #: Values along the keys, and the types of what is loaded.
    of_keys: tuple[Fetch, ...]
    dtypes: dict[str, DType]

    def _is_column(self, adjoint: Adjoint) -> bool:
        return not self.is_vector(adjoint) and adjoint.along != ("q", "kv")

    @property
    def column_sums(self) -> list[str]:
        return [f"{adjoint.name}_column" for adjoint in self.adjoints if self._is_column(adjoint)]

    @property
    def starts(self) -> Iterator[str]:
        for adjoint in self.adjoints:
            if self.is_vector(adjoint):
                yield f"float {adjoint.name}[ROWS] = {{}};"
            elif adjoint.accumulate == "two_pass":
                yield f"auto* const {adjoint.name}_tile = args.{adjoint.name}_ptr + first_row * args.N;"

    @property
    def steps(self) -> Iterator[str]:
        """For one element, whose ds is the gradient of its score."""
        inside = scalar_in_tile(self.show, IN_ROWS, IN_KEYS)
        for adjoint in self.adjoints:
            sign, term = self.signed(adjoint)
            value = term if sign == "+" else f"-({term})" if " " in term else f"-{term}"
            if self.is_vector(adjoint):
                yield f"{adjoint.name}[r] {sign}= {term};"
            elif self._is_column(adjoint):
                yield f"{adjoint.name}_column {sign}= {term};"
            elif adjoint.accumulate == "two_pass":
                row = self.show(Index("q_idx"))
                at = f"{adjoint.name}_tile[(long long){row} * args.N + {self.show(Index('kv_idx'))}]"
                yield f"if ({inside})"
                yield f"    round_to({at}, {value});"
            else:
                guard = "" if adjoint.guard == TRUE else f" && {_and(self.show(adjoint.guard))}"
                yield f"if ({inside}{guard})"
                yield f"    atomic_add(&{self._at(adjoint, self.show)}, {value});"

    @property
    def column_ends(self) -> Iterator[str]:
        for adjoint in self.adjoints:
            if self._is_column(adjoint):
                name = f"{adjoint.name}_column"
                yield f"{name} = column_sum({name});"
                yield f"if (g == 0 && {_and(self.show(conj(IN_ROWS, adjoint.guard)))})"
                yield f"    atomic_add(&{self._at(adjoint, self.show)}, {name});"

    @property
    def ends(self) -> Iterator[str]:
        """After the loops of a head."""
        for adjoint in self.adjoints:
            if not self.is_vector(adjoint):
                continue
            if not adjoint.along:
                yield from self._total(adjoint)
            elif self.over_q:
                yield from self._rows(adjoint)
            else:
                yield from self._keys(adjoint)

    def _total(self, adjoint: Adjoint) -> Iterator[str]:
        """One number for the whole tile."""
        name, guard = adjoint.name, scalar(adjoint.guard)
        count, index = ("q_tiles", "q_lo / BLOCK_M") if self.over_q else ("kv_tiles", "kv_lo / BLOCK_N")
        inside = "" if self.over_q else "if (kv_idx[r] < N)"
        yield f"float {name}_total = 0.0f;"
        yield "for (int r = 0; r < ROWS; ++r)"
        if inside:  # p is 0 in rows past the end, but not for keys past the end
            yield f"    {inside}"
        yield f"    {'    ' if inside else ''}{name}_total += {name}[r];"
        yield f"{name}_total = block_sum({name}_total, sums);"
        if adjoint.accumulate == "two_pass":
            yield "if (threadIdx.x == 0)"
            yield f"    args.{name}_ptr[(long long)(b * H + h) * {count} + {index}] = {name}_total;"
        else:
            yield f"if (threadIdx.x == 0{'' if adjoint.guard == TRUE else f' && {_and(guard)}'})"
            yield f"    atomic_add(&{self._at(adjoint, scalar)}, {name}_total);"

    def _rows(self, adjoint: Adjoint) -> Iterator[str]:
        """One number for each query: the four lanes that share a row have all of its keys."""
        name = adjoint.name
        guard = "" if adjoint.guard == TRUE else f" && {_and(self.show(adjoint.guard))}"
        yield "for (int r = 0; r < ROWS; ++r) {"
        yield f"    {name}[r] = row_sum({name}[r]);"
        if adjoint.accumulate == "two_pass":
            yield "    if (t == 0 && q_idx[r] < M)"
            yield f"        args.{name}_ptr[first_row + q_idx[r]] = {name}[r];"
        else:
            yield f"    if (t == 0 && q_idx[r] < M{guard})"
            yield f"        atomic_add(&{self._at(adjoint, self.show)}, {name}[r]);"
        yield "}"

    def _keys(self, adjoint: Adjoint) -> Iterator[str]:
        """One number for each key: warps that share keys have some of its queries each."""
        name = adjoint.name
        key = "kv_lo + i"
        yield "__syncthreads();  // nobody reads the sums before any more"
        yield "for (int r = 0; r < ROWS; ++r) {"
        yield f"    {name}[r] = row_sum({name}[r]);"
        yield "    if (t == 0)"
        yield f"        sums[WARPS + warp % PARTS * BLOCK_N + first_key + 8 * r + g] = {name}[r];"
        yield "}"
        yield "__syncthreads();"
        yield "for (int i = threadIdx.x; i < BLOCK_N; i += THREADS) {"
        yield f"    const int kv_idx = {key};"
        if adjoint.accumulate == "atomic":
            for fetch in fetches_for(self.of_keys, *adjoint.load.indices, adjoint.guard):
                yield f"    {statement(fetch, self.dtypes, (), scalar)}"
        yield "    float total = 0.0f;"
        yield "    for (int part = 0; part < PARTS; ++part)"
        yield "        total += sums[WARPS + part * BLOCK_N + i];"
        if adjoint.accumulate == "two_pass":
            yield "    if (kv_idx < N)"
            yield f"        args.{name}_ptr[(long long)(b * H + h) * args.N + kv_idx] = total;"
        else:
            yield f"    if ({_and(scalar(conj(IN_KEYS, adjoint.guard)))})"
            yield f"        atomic_add(&{self._at(adjoint, scalar)}, total);"
        yield "}"

    def _at(self, adjoint: Adjoint, show: Printer) -> str:
        """Where in the gradient itself a load points."""
        return address(f"args.{adjoint.name}_ptr", adjoint.name, adjoint.load.indices, show)


def scalar_in_tile(show: Printer, *conditions: Expr) -> str:
    return " && ".join(show(condition) for condition in conditions)


def _and(text: str) -> str:
    """The text as an operand of &&."""
    return f"({text})" if " || " in text else text
