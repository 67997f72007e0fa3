"""The declaration of a Triton module's call, as `attnc.support.triton_call.TritonAttention` takes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnc.expr.nodes import show
from attnc.model.tensors import DType, Role
from attnc.plan.ir import Decode, Forward, Module
from attnc.plan.storage import longest
from attnc.target.declaration import BackwardDeclaration, attention_fields, split_record, tiles
from attnc.target.declared import Items, Record, Table, printed, quoted, section
from attnc.target.triton.backward import BackwardText
from attnc.target.triton.decode import CombineText
from attnc.target.triton.kernel import KernelText
from attnc.target.triton.launches import triton_kernel
from attnc.target.triton.prologue import PreprocessText

#: Of the second axis of a grid, along which the splits of a sequence lie.
_MOST_PROGRAMS = 65535


def triton_declaration(
    module: Module, kernel: Forward | Decode, text: KernelText, back: TritonBackward | None, operator: str
) -> list[str]:
    """Lines of `CALL = TritonAttention(...)`."""
    fields = attention_fields(module, kernel, operator)
    dv = text.dv
    if isinstance(kernel, Decode) and kernel.split is not None:
        fields["split"] = split_record(module, kernel, kernel.split, _MOST_PROGRAMS)
        fields["scratch"] = Table({"splits": quoted(f"SPLIT_ROWS * {dv + 1}")})
    elif kernel.grid.over == "head":
        scratch = {"acc": f"(B, H, M, {dv})", "l": "(B, H, M)", "m": "(B, H, M)"}
        fields["scratch"] = Table({name: quoted(shape) for name, shape in scratch.items()})
    fields["launches"] = Items(list(_launches(module, kernel, text)))
    if back is not None:
        fields["backward"] = back.declared
    return printed(Record("TritonAttention", fields=fields), "CALL = ")


def _launches(module: Module, kernel: Forward | Decode, text: KernelText) -> Iterator[Record]:
    tensors = text.parameter_lines[0]
    others = [name.removesuffix("_ptr") for name in tensors[len(text.matrices) :]]
    yield triton_kernel(
        kernel.name,
        _grid(module, kernel, text),
        tiles=text.matrices,
        pointers=others,
        sizes={"SECTION": _section(module, text)} if "SECTION" in text.size_names else {},
    )
    if isinstance(kernel, Decode) and kernel.split is not None:
        combine = CombineText(module, kernel)
        names = [name.removesuffix("_ptr").replace("O", "o") for name in combine.parameter_lines[0]]
        # So many warps that a thread holds a row of two splits at most; more only wait for each other.
        warps = min(max(text.block_dv // 64, 2), 8)
        yield triton_kernel(combine.name, "rows", pointers=names, warps=warps, joins=True)


def _grid(module: Module, kernel: Forward | Decode, text: KernelText) -> str:
    if isinstance(kernel, Decode):
        return tiles(module, kernel) if kernel.split is None else "tiles, SPLITS"
    if kernel.grid.over == "head":
        return "B * H"
    sequences = kernel.grid.sequences
    count = "cdiv(M, BLOCK_M) * B * H"
    if sequences is not None:
        count = f"({show(sequences.rows)} // BLOCK_M + B + 1) * H"
    return f"min({count}, multiprocessors())" if kernel.grid.persistent else count


def _section(module: Module, text: KernelText) -> str:
    attention = module.variant.attention
    keys = show(longest(attention, Role.KEY))
    row_bytes = (text.d + text.dv) * DType(attention.q.dtype).bytes
    return section(
        text.kernel.grid.section, text.all_heads, "N" if keys == "N" else f"{keys} // B", row_bytes
    )


class TritonBackward(BackwardDeclaration):
    """The backward of a Triton module. texts: of its kernels, in the order of execution."""

    def __init__(self, module: Module, texts: Sequence[BackwardText]) -> None:
        super().__init__(module, [name for text in texts for name in text.makes])
        self._texts = texts
        preprocess = self._backward.preprocess
        self.preprocess = PreprocessText(module, preprocess, self.configs[0]) if preprocess else None

    @property
    def declared(self) -> Record:
        """`Backward(...)`."""
        first = [] if self.preprocess is None else [self.preprocess.launch]
        launches = Items([*first, *(text.parameters.launch for text in self._texts)])
        return self.fields({} if self.packs_queries else {"M_padded": self._padded}, launches)

    @property
    def _padded(self) -> str:
        """M rounded up to whole q tiles of every kernel, all powers of two."""
        return f"whole_tiles(M, {', '.join(f'{config}.BLOCK_M' for config in self.configs)})"
