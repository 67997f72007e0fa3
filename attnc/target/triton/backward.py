"""The pieces of a Triton backward kernel's text that its template places: expressions, steps, the frame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from attnc.expr.construct import conj
from attnc.expr.nodes import FALSE, TRUE, Const, Dot, Expr, Index, walk
from attnc.model.dtypes import DType
from attnc.model.tensors import Role
from attnc.plan.ir import Fetch, Loop, Module
from attnc.plan.ir.backward import Adjoint, BackwardKernel
from attnc.plan.ir.kernel import DotPart
from attnc.plan.loads import axes_of
from attnc.plan.signature import block, stride_name
from attnc.plan.steps import kept_fetches
from attnc.target.kernel_view import BY_QUERY, BackwardView, name_gradients
from attnc.target.printer import IN_KEYS, IN_ROWS, AdjointText
from attnc.target.triton.backward_forms import BACKWARD_FORMS, BackwardFormText, cite_lines
from attnc.target.triton.parameters import Parameters, PrologueText, TritonTensors
from attnc.target.triton.printer import (
    TL_DTYPES,
    address,
    list_types,
    load,
    scalar,
    score,
    tiled,
    transposed,
    unique,
    widening,
)
from attnc.target.triton.program import ProgramText
from attnc.target.triton.sticks import SticksText

# --- sums of gradients


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

    def _is_added(self, adjoint: Adjoint) -> bool:
        return adjoint.accumulate != "atomic" or adjoint.guard != FALSE

    @property
    def reads_inner(self) -> bool:
        return any(self._is_added(adjoint) and not self.is_vector(adjoint) for adjoint in self.adjoints)

    @property
    def reads_outer(self) -> bool:
        return any(self._is_added(adjoint) and self.is_vector(adjoint) for adjoint in self.adjoints)

    @property
    def stores_pairs(self) -> bool:
        pairs = (adjoint for adjoint in self.adjoints if not self.is_vector(adjoint))
        return any(adjoint.accumulate == "two_pass" for adjoint in pairs)

    @property
    def step_names(self) -> list[str]:
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
        for adjoint in self.adjoints:
            if self.is_vector(adjoint):
                yield f"{adjoint.name} = tl.zeros([{'BLOCK_M' if self.over_q else 'BLOCK_N'}], tl.float32)"
            elif adjoint.accumulate == "two_pass":
                yield f"{adjoint.name}_tile = {adjoint.name}_ptr + first_row * {self.all_n}"

    @property
    def steps(self) -> Iterator[str]:
        inside = f"({self.show(IN_ROWS)}) & ({self.show(IN_KEYS)})"
        for adjoint in self.adjoints:
            if self.is_vector(adjoint):
                sign, term = self.split_sign(adjoint)
                yield f"{adjoint.name} {sign}= tl.sum({term}, 1)"
                continue
            term = self._term(adjoint)
            if not self._is_added(adjoint):
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
        index, tile, start = ("q_idx", "q", "q_lo // BLOCK_M") if self.over_q else _KV_ENDS
        inside = scalar(IN_ROWS if self.over_q else IN_KEYS)
        for adjoint in self.adjoints:
            name, atomic = adjoint.name, adjoint.accumulate == "atomic"
            # p is 0 in rows past the end, but not for keys past the end.
            total = f"tl.sum({name}, 0)" if self.over_q else f"tl.sum(tl.where({inside}, {name}, 0.0), 0)"
            guard = "" if adjoint.guard == TRUE else scalar(adjoint.guard)
            if not self.is_vector(adjoint) or not self._is_added(adjoint):
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
        sign, term = self.split_sign(adjoint)
        return term if sign == "+" else f"-{term}"

    def _at(self, adjoint: Adjoint) -> str:
        printer = self.show if adjoint.along == ("q", "kv") else scalar
        return address(f"{adjoint.name}_ptr", adjoint.name, adjoint.load.indices, printer)

    def _wide(self, index: str) -> str:
        return self.show(Index(index)).replace(index, f"{index}.to(tl.int64)")


class SumsOfWeights(Sums):
    """The same where nothing is normalised, and a weight may be 0 whose derivative is not."""

    kept: ClassVar[str] = "tl.where(ds == 0.0, 0.0, {})"


# --- kernels


@dataclass(frozen=True, slots=True)
class BackwardPartText:
    """Names and loads of some columns of q and k, and names of the sums of their gradients."""

    q: str
    k: str
    dq: str
    dk: str
    load_q: str
    load_k: str


class BackwardText(ProgramText):
    """Text of one kernel; attribute by attribute what `templates/triton/backward_*.py.jinja` prints."""

    kernel: BackwardKernel

    def __init__(self, module: Module, planned: BackwardKernel) -> None:
        self.module, self.kernel = module, planned
        self.chain, self.makes = planned.chain, planned.makes
        self.v, self.dv_sum = ("k", "dk") if planned.v_in_k else ("v", "dv")
        self.adds_pdo = self.dv_sum in planned.makes and not planned.over_q
        self.tensors, attention = TritonTensors(module, planned), module.variant.attention
        self.over_q, self.groups = planned.over_q, planned.sums_heads
        self.block_d, self.block_dv = block(self.tensors.d), block(self.tensors.dv)
        self.packs_queries = attention.q.storage.is_packed
        self.is_packed = self.packs_queries or attention.k.storage.is_packed
        self.kv_name = "h" if self.kernel.kv_head == Index("h") else "h_kv"
        self.needs_dp = self.makes != ("dv",)
        self.normalises = planned.softmax.normalises
        self.step_function = f"_backward_{''.join(self.makes) or 'rows'}_step"
        self.by_row = "[:, None]" if self.over_q else "[None, :]"
        self.show = tiled if self.over_q else transposed
        self._shortened = frozenset(attention.lengths)
        sums = Sums if self.normalises else SumsOfWeights
        self.sums = sums(
            adjoints=self.chain.adjoints,
            over_q=self.over_q,
            show=self.show,
            all_n=self.length("N"),
        )
        self.uses_q_pos = planned.uses("q_pos")
        self.prologue = planned.prologue
        self.first = (
            None
            if self.prologue is None
            else PrologueText(module=module, prologue=self.prologue, tensors=self.tensors)
        )
        self.sticks = (
            SticksText(module, planned, self.needs_dp, self.packs_queries)
            if planned.softmax.breaks_sticks
            else None
        )
        self.parameters = Parameters(module, planned, self.tensors, self.first, self.sticks)
        self.dp_order = self.parameters.dp_order
        self.is_sequential = self.kernel.grid.over == "head"
        self.view = BackwardView(
            module,
            planned,
            starts_with_program=self.is_packed or planned.fills_keys or self.is_sequential,
            without_mask="no mask: whole tiles, then those that are cut short",
        )
        self.precision = ', input_precision="tf32x3"' if attention.q.dtype is DType.F32 else ""
        self._element = attention.element

    # -- expressions ---------------------------------------------------------------------------------------

    def loads(self, fetches: Iterable[Fetch]) -> list[str]:
        return [f"{fetch.name} = {load(fetch, self.show)}" for fetch in fetches]

    def show_score(self, expr: Expr) -> str:
        return score(expr, self.show, self.chain.inline(expr))

    @property
    def scores_products(self) -> bool:
        score = self.kernel.step.score
        return score is None or Dot() in walk(self.chain.inline(score))

    @property
    def score(self) -> str:
        later = (*(a.value for a in self.chain.adjoints), *([self.chain.slope] if self.chain.slope else []))
        return "score" if any(Dot() in walk(expr) for expr in later) else "s"

    @property
    def form(self) -> BackwardFormText:
        chain = self.chain
        return BACKWARD_FORMS[self.kernel.softmax.form](
            kernel=self.kernel,
            show=self.show,
            score=self.score,
            slope="" if chain.slope is None else self.sums.factor(chain.slope),
            masked=self.masked,
            keep_before=self.keep_before,
            clears_rows=self.view.clears_rows,
            clears_ds=not self.over_q and self.kernel.step.kept is not None and not self.kernel.fills_keys,
        )

    @property
    def shared(self) -> list[str]:
        """Lines of values that scores and gradients have in common."""
        return [f"{let.name} = {self.show(let.value)}" for let in self.chain.shared]

    def ordered(self, order: str, line: str, remark: str = "") -> list[str]:
        """Returns a line where it has its place if dp is computed early, before exp2, or late."""
        if self.dp_order == "both":
            return [f"if {'' if order == 'early' else 'not '}EARLY_DP:", f"    {line}{remark}"]
        return [line] if self.dp_order == order else []

    @property
    def weight_of_value(self) -> str:
        """What a row of do is multiplied by in dv."""
        if self.kernel.softmax.dropout is None:
            return "picked" if self.form.picked else "p"
        if self.scores_products:
            return "tl.where(kept, p * keep_scale, 0.0)"
        # a factor: Triton fails to lay flags out for a left operand that no product made
        return "(p * tl.where(kept, keep_scale, 0.0))"

    @property
    def keep_before(self) -> str:
        mask = self.kernel.step.keep
        if mask is None or self._masked_is_constant:
            return ""
        varies = axes_of(mask)  # Triton wants one shape in both branches
        sizes = {"q": "BLOCK_M" if "q" in varies else "1", "kv": "BLOCK_N" if "kv" in varies else "1"}
        shape = ", ".join(sizes[axis] for axis in (("q", "kv") if self.over_q else ("kv", "q")))
        return f"keep = tl.full([{shape if varies else ''}], True, tl.int1)"

    # -- parts of the columns of q and k -------------------------------------------------------------------

    @property
    def parts(self) -> list[BackwardPartText]:
        found = []
        for number, part in enumerate(self.tensors.parts):
            own = f"_{number + 1}" if number else ""
            loads = (self._tile(self._matrix(name), name, part) for name in ("q", "k"))
            found.append(BackwardPartText(f"q{own}", f"k{own}", f"dq{own}", f"dk{own}", *loads))
        return found

    @property
    def more_parts(self) -> list[BackwardPartText]:
        return self.parts[1:]

    def _matrix(self, name: str) -> str:
        return name.upper() if self.over_q or name == "k" else f"{name}_head"

    @property
    def sums_of_tile(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in self.makes:
            if name == "dv":
                found[name] = block(self.tensors.dv)
                continue
            widths = (part.width for part in self.tensors.parts)
            names = (getattr(part, name) for part in self.parts)
            found |= {own: block(width) for own, width in zip(names, widths, strict=True)}
        return found

    # -- the step ------------------------------------------------------------------------------------------

    @property
    def step_names(self) -> list[str]:
        step, vectors = self.kernel.step, self.sums.vectors
        if self.over_q:
            own = [*self.sums_of_tile, *vectors, *self._carried, *(part.q for part in self.parts)]
            keys = ["k"] if self.kernel.v_in_k else ["k", "v"]
            own += [*map(str.upper, keys), "do", *(["lse2", "delta"] if self.normalises else [])]
            own += ["b", self.kv_name] if self.kernel.tma else []
            own += ["kv_lo", "N", *(f"stride_{name}n" for name in keys)]
            if any(adjoint.along == ("q", "kv") for adjoint in self.chain.adjoints):
                own += ["q_idx", "M"]
            own += [] if self.sticks is None else self.sticks.step_names
            return unique((*own, *step.names, *self.sums.step_names))
        own = [
            *self.sums_of_tile,
            *vectors,
            *(part.k for part in self.parts),
            *(["v"] if self.needs_dp and not self.kernel.v_in_k else []),
            "q_head",
            "do_head",
            *(f"{name}_head" for name in self.parameters.vectors),
            *([] if self.sticks is None else self.sticks.step_names),
        ]
        own += [*(["b", "h", "row"] if self.kernel.tma else []), "q_lo", "M"]
        if self.uses_q_pos:
            own.append("N")
        own += ["stride_qm", "stride_dom"]
        if self._step_reads("kv_idx"):
            own.append("kv_idx")
        if self.kernel.softmax.dropout is not None:
            own.append("kv_lo")
        if self.chain.adds_dq is not None:
            own += ["dq_head", "stride_dqm"]
        names = (name for name in step.names if name not in ("q_idx", "q_pos"))
        pairs = any(adjoint.along == ("q", "kv") for adjoint in self.chain.adjoints)
        return unique((*own, *names, *self.sums.step_names, *(["kv_idx", "N"] if pairs else [])))

    @property
    def uses_q_idx(self) -> bool:
        return (
            self.uses_q_pos
            or self.packs_queries
            or self.sticks is not None
            or self.view.clears_rows
            or self.chain.adds_dq is not None
            or self.kernel.softmax.dropout is not None
            or self._step_reads("q_idx")
            or self.sums.reads_inner
        )

    @property
    def uses_kv_idx(self) -> bool:
        loaded = any("kv" in fetch.axes for fetch in self.kernel.outer) or self.kernel.fills_keys
        return loaded or "kv_idx" in self.step_names or self.sums.reads_outer

    def _step_reads(self, index: str) -> bool:
        step = self.kernel.step
        fetches = (expr for f in (*step.fetches, *step.masked_fetches) for expr in (*f.load.indices, f.guard))
        exprs = (*fetches, *(e for e in (step.score, step.keep) if e is not None), *self.chain.expressions)
        return any(Index(index) in walk(expr) for expr in exprs)

    @property
    def step_parameters(self) -> str:
        return ", ".join(list_types((*self.step_names, *self._constants)))

    def step_arguments(self, loop: Loop) -> str:
        return ", ".join((*self.step_names, *self._constant_values(loop)))

    def _constant_values(self, loop: Loop) -> list[str]:
        partial = str(loop.masked) if isinstance(loop.masked, bool) else scalar(loop.masked)
        known = {self.masked: partial, "ZERO_FILL": str(loop.zero_fill)}
        return [f"{name}={known.get(name, name)}" for name in self._constants]

    @property
    def kept_fetches(self) -> tuple[Fetch, ...]:
        return kept_fetches(self.kernel)

    @property
    def of_keys(self) -> tuple[Fetch, ...]:
        known = self.kept_fetches if self.kernel.fills_keys else ()
        return tuple(fetch for fetch in self.kernel.outer if fetch not in known)

    @property
    def _masked_is_constant(self) -> bool:
        return all(isinstance(loop.masked, bool) for loop in self.kernel.regions.loops)

    @property
    def masked(self) -> str:
        return "MASKED" if self._masked_is_constant else "partial"

    @property
    def _constants(self) -> list[str]:
        masked = [self.masked] if self.kernel.step.keep is not None else []
        masked += ["ZERO_FILL"] if self.fills_when == "ZERO_FILL" else []
        both = self.kernel.softmax.dropout is not None or (not self.normalises and bool(self.keep_before))
        tiles = ["BLOCK_N"] if self.over_q else ["BLOCK_M"]
        return [
            *masked,
            *(["BLOCK_M", "BLOCK_N"] if both else tiles),
            *(["EARLY_DP"] if self.dp_order == "both" else []),
            *(["TMA"] if self.kernel.tma else []),
        ]

    @property
    def step_result(self) -> str:
        return ", ".join((*self.sums_of_tile, *self.sums.vectors, *self._carried))

    @property
    def _carried(self) -> list[str]:
        return [] if self.sticks is None else self.sticks.carried

    @property
    def left_names(self) -> list[str]:
        assert self.sticks is not None
        fixed = ["b", self.kv_name] if self.kernel.tma else []
        return self.sticks.left_names([part.q for part in self.parts], fixed)

    @property
    def left_parameters(self) -> str:
        return ", ".join(list_types((*self.left_names, *self._constants)))

    def left_arguments(self, loop: Loop) -> str:
        return ", ".join((*self.left_names, *self._constant_values(loop)))

    @property
    def step_assignment(self) -> str:
        return f"{self.step_result} = " if self.step_result else ""

    # -- the frame -----------------------------------------------------------------------------------------

    def length(self, name: str) -> str:
        """Returns M or N of the tensors, which a `length` does not shorten."""
        return f"{name}_all" if name in self._shortened else name

    @property
    def full_lengths(self) -> Iterator[str]:
        if not self.is_packed:  # then no sum has a place for each key
            yield from (f"{name}_all = {name}" for name in ("M", "N") if name in self._shortened)

    @property
    def reads_h_kv(self) -> bool:
        return self.h_kv != "h"

    @property
    def reads_first_row(self) -> bool:
        packed = self.packs_queries and bool(self.parameters.vectors)
        return self.sums.stores_pairs or packed or self.sticks is not None

    @property
    def advance(self) -> Iterator[str]:
        for name in self.parameters.matrices:
            if self.over_q or name not in BY_QUERY:
                yield f"{name.upper()} += {self.offset(name)}"

    @property
    def what(self) -> str:
        return name_gradients(self.makes, self.chain) or "rows"

    @property
    def paper(self) -> str:
        if not self.kernel.softmax.normalises:
            return f"the scores once more, and {self.what}"
        if self.is_sequential:
            return "FlashAttention-1, algorithm 4, lines 10 to 22"
        return cite_lines(self.adds_pdo, self.needs_dp, self.chain.adds_dq is not None)

    @property
    def and_the_rest(self) -> str:
        return ", and what its scores add to dq" if self.chain.adds_dq is not None else ""

    # -- tiles -----------------------------------------------------------------------------------------------

    def offset(self, name: str) -> str:
        in_head = name in ("q", "do", "dq", "o", "dlse")
        return self.tensors.offset(name, "h" if in_head else self.kv_name)

    def _tile(self, text: str, name: str, part: DotPart | None = None) -> str:
        start, stop, rows, head = (
            ("q_lo", "M", "BLOCK_M", "h") if name in BY_QUERY else ("kv_lo", "N", "BLOCK_N", self.kv_name)
        )
        letter = "m" if name in BY_QUERY else "n"
        text, width = self._columns(text, name, part)
        where = f"b, {head}, " if self.kernel.tma else ""
        tma = ", TMA" if self.kernel.tma else ""
        load = f"_load_rows({text}, {where}{start}, {stop}, stride_{name}{letter}, {rows}, {width}{tma})"
        widened = widening(DType(self.tensors.by_name[name].dtype), self._element)
        return f"{widened}({load}, True)" if widened else load

    def _columns(self, text: str, name: str, part: DotPart | None) -> tuple[str, str]:
        if part is None or part.width == self.tensors.size(name):
            return text, self.tensors.width(name)
        width = f"{part.width}, {block(part.width)}" if self.tensors.padded else str(part.width)
        return (f"{text} + {part.first}" if part.first else text), width

    @property
    def load_v(self) -> str:
        return self._tile("V", "v")

    @property
    def load_do(self) -> str:
        return f"{self.load_whole_do}{self.narrow_do}"

    @property
    def load_whole_do(self) -> str:
        """The load of a tile of do as it is; what delta is summed of."""
        return self._tile("DO" if self.over_q else "do_head", "do")

    @property
    def narrow_do(self) -> str:
        tensors = self.tensors.by_name
        of_v = DType(tensors[self.v].dtype)
        of_v = self._element if of_v.is_narrow else of_v
        return "" if tensors["o"].dtype == of_v else f".to({TL_DTYPES[of_v]})"

    @property
    def load_o(self) -> str:
        return self._tile("O", "o")

    @property
    def dlse_row(self) -> str:
        tensor = self.tensors.by_name["dlse"]
        axis = tensor.axis(Role.QUERY)
        at = "" if axis is None else f" + q_idx.to(tl.int64) * {stride_name(tensor, axis)}"
        return f"dlse_head{at}"

    def load_vector(self, name: str) -> str:
        if self.packs_queries:
            beyond = 'float("inf")' if name == "lse2" else "0.0"
            return f"tl.load({name}_head + q_idx, mask=q_idx < M, other={beyond})"
        tma = self.kernel.tma
        return f"_load_vector({name}_head, {'row, ' if tma else ''}q_lo, BLOCK_M{', TMA' if tma else ''})"

    @property
    def heads(self) -> Iterator[str]:
        yield f"q_head = Q + {self.offset('q')}"
        yield f"do_head = DO + {self.offset('do')}"
        for name in self.parameters.vectors:
            at = "first_row" if self.packs_queries else "row.to(tl.int64) * M_padded"
            yield f"{name}_head = {name.upper()} + {at}"

    @property
    def described(self) -> str:
        names = ("q", "do", *self.parameters.vectors)
        return f"{', '.join(f'{name}_head' for name in names)} = {', '.join(map(str.upper, names))}"

    @property
    def first_row(self) -> str:
        if self.packs_queries:
            return f"h.to(tl.int64) * {self.tensors.packed_queries} + q_first"
        return f"{'(b * H + h)' if self.over_q else 'row'}.to(tl.int64) * M_padded"

    def stores(self, name: str) -> Iterator[str]:
        if name == "dv":
            yield self._store(name, name, None)
            return
        for text, part in zip(self.parts, self.tensors.parts, strict=True):
            yield self._store(name, getattr(text, name), part)

    def _store(self, name: str, value: str, part: DotPart | None) -> str:
        start, stop, rows, head, letter = (
            ("q_lo", "M", "BLOCK_M", "h", "m")
            if name in BY_QUERY
            else ("kv_lo", "N", "BLOCK_N", self.kv_name, "n")
        )
        scale = "" if name == "dv" or self.chain.scale == 1.0 else f" * {scalar(Const(self.chain.scale))}"
        if self.chain.factor is not None:
            scale += f" * ({scalar(self.chain.factor)})"
        tile = f"({value}{scale})" if scale else value
        text, width = self._columns(name.upper(), name, part)
        dtype = TL_DTYPES[DType(self.tensors.by_name[name].dtype)]
        where = f"b, {head}, " if self.kernel.tma else ""
        tma = ", TMA" if self.kernel.tma else ""
        return (
            f"_store_rows({text}, {where}{start}, {stop}, stride_{name}{letter}, "
            f"{tile}.to({dtype}), {rows}, {width}{tma})"
        )

    @property
    def dq_mask(self) -> str:
        inside = "" if self.tensors.d == self.block_d else f" & (d[None, :] < {self.tensors.d})"
        return f"(q_idx < M)[:, None]{inside}"
