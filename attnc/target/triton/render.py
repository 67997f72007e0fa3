"""ir.Module -> text, through the target's templates, with the declaration of its call. Strict: an undefined
name in a template is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

import jinja2

from attnc.expr.nodes import show
from attnc.model.tensors import Role
from attnc.plan.decode import has_fixed_splits
from attnc.plan.ir import Decode, Forward, Kernel, Module, split_of
from attnc.plan.ir.backward import BackwardKernel
from attnc.plan.signature import key_bytes, longest
from attnc.target.call_signature import Signature
from attnc.target.declaration import (
    BackwardDeclaration,
    CallText,
    Items,
    Table,
    add_scratch,
    attention_fields,
    operator_name,
    print_value,
    quote_word,
    section,
    split_record,
    tiles,
    tuning,
    width_of_split,
)
from attnc.target.header import GLOSSARIES, delta_of, header, module_numbers
from attnc.target.quote import without_comments
from attnc.target.sticks import count_edges
from attnc.target.support import imports
from attnc.target.templates import python_environment, tidy
from attnc.target.triton.backward import BackwardText
from attnc.target.triton.columns import TileColumns
from attnc.target.triton.decode import CombineText, DecodeText
from attnc.target.triton.device import device_functions, print_functions
from attnc.target.triton.epilogue import EpilogueText
from attnc.target.triton.kernel import KernelText
from attnc.target.triton.launch import triton_kernel
from attnc.target.triton.lists import ListsText
from attnc.target.triton.parameters import PreprocessText
from attnc.target.triton.printer import load, scalar, score, statement, tiled
from attnc.target.triton.row_lists import RowListsText
from attnc.target.triton.selected import OrderText, SelectedText, SumText, TurnText
from attnc.target.triton.selected_blocks import BlockText
from attnc.target.triton.tokens import TokenSumText, TokenText
from attnc.tuned.choices import NOT_TUNED, Tuned

_OF_THE_BACKWARD = """\
In the backward (algorithm 2) dx is the gradient of x: dp = do v^T, ds = p * (dp - delta) with
delta = {delta}; lse2 = lse * log2(e) serves exp2."""


_OF_STICKS = """\
In the backward dx is the gradient of x: dp = do v^T, given = p * dp is what a key gives to the loss, and
ds = given - sigmoid(score) * (dlse + given of the keys up to it). For each query and tile of keys the first
kernel writes two numbers: behind, -log2 of what the keys behind the tile leave of the stick, and before, dlse
and what the keys before the tile give."""


_OF_WEIGHTS = """\
In the backward dx is the gradient of x: dp = do v^T, and ds = dp, times the weight's derivative."""

_BACKWARDS = {"stick_breaking": _OF_STICKS, "none": _OF_WEIGHTS}


def render_triton(
    module: Module,
    *,
    path: str,
    sha256: str,
    tuned: Tuned = NOT_TUNED,
) -> dict[str, str]:
    """Returns the one file of a variant. Arguments as for `files.render_files`."""
    declared, module, kernel = module, module.seen, module.kernel
    text = DecodeText(module, kernel) if isinstance(kernel, Decode) else KernelText(module, kernel)
    environment = triton_environment()
    common = {
        "module": module,
        "kernel": kernel,
        "text": text,
        "columns": TileColumns(text.padded),
        "precision": text.precision,
    }
    first = text.tile_functions if isinstance(text, DecodeText) else ()
    common["tile_functions"] = print_functions(first, environment, common)
    forward: dict[str, KernelText] = {kernel.structure: text}
    split = split_of(kernel)
    if isinstance(kernel, Decode) and split is not None:
        forward["combine"] = CombineText(module, kernel)
    lists = lists_text(module)
    made = "" if lists is None else environment.get_template("triton/_lists.py.jinja").render(text=lists)
    kernels = made + "\n\n".join(
        environment.get_template(f"{module.target}/{name}.py.jinja").render(common, text=own)
        for name, own in forward.items()
    )
    back = None
    if module.backward is not None:
        own = module.differentiated
        texts = [text_of(own, planned) for planned in own.backward_kernels.values()]
        back = TritonBackward(own, texts, lists)
        kernels = "\n\n".join(
            (kernels, *_backward_kernels(own, back, texts, {**common, "module": own}, first))
        )
    code = without_comments(kernels, "#")
    declaration = triton_declaration(module, kernel, text, back, operator_name(module, code), lists)
    call = Signature(declared)
    page = environment.get_template(f"{module.target}/module.py.jinja").render(
        common,
        kernels=kernels,
        call=call,
        declaration=print_value(declaration, "CALL = "),
        imports=imports(declaration.classes | call.called, "triton"),
        header=_header(declared, path, sha256),
        numbers=tuple(module_numbers(module)),
        tuning={
            **tuning(module, tuned),
            "splits": split is not None,
            "by_device": any(
                isinstance(x, tuple) for planned in module.kernels.values() for x in planned.shared
            ),
            "maxnreg": any(planned.limits_registers for planned in module.backward_kernels.values()),
            "early_dp": any(planned.dp_order == "both" for planned in module.backward_kernels.values()),
            "fixed_split": isinstance(kernel, Decode) and has_fixed_splits(kernel),
            "staged": split is not None and any(split.staged),
        },
        functions=print_functions(device_functions(module), environment, common),
    )
    return {f"{module.variant.name}.py": tidy(page)}


def lists_text(module: Module) -> ListsText | None:
    """Returns the text of the kernels that make lists ready, None where there are none."""
    if module.lists is None:
        return None
    if module.listed_rows is not None:
        return RowListsText(module, module.lists, module.listed_rows)
    return ListsText(module, module.lists)


#: Texts of kernels whose rows are heads of single queries.
_TEXTS: Mapping[str, type[BackwardText]] = {
    "selected_dq": SelectedText,
    "selected_dkdv": BlockText,
    "selected_turns": TurnText,
    "selected_tokens": TokenText,
}


def text_of(module: Module, planned: BackwardKernel) -> BackwardText:
    return _TEXTS.get(planned.structure, BackwardText)(module, planned)


def _backward_kernels(
    module: Module,
    back: TritonBackward,
    texts: Iterable[BackwardText],
    common: Mapping[str, object],
    printed: Sequence[str],
) -> Iterator[str]:
    """Yields the text of each kernel. printed: device functions that stand before the forward kernel."""
    if back.moves:
        names = [name for name in back.moves if name not in printed]
        yield f"{print_functions(names, triton_environment(), common)}\n"
    if back.epilogue is not None:
        template = triton_environment().get_template(f"{module.target}/backward_epilogue.py.jinja")
        yield template.render({**common, "epilogue": back.epilogue.planned, "text": back.epilogue})
    if back.preprocess is not None:
        template = triton_environment().get_template(f"{module.target}/backward_preprocess.py.jinja")
        rows = {
            "preprocess": back.preprocess.planned,
            "text": back.preprocess,
            "prologue": back.preprocess.prologue,
        }
        yield template.render({**common, **rows})
    for text in texts:
        template = triton_environment().get_template(f"{module.target}/{text.kernel.structure}.py.jinja")
        own = {"kernel": text.kernel, "chain": text.chain, "text": text, "prologue": text.first}
        yield template.render({**common, **own})
    if back.order is not None:
        template = triton_environment().get_template(f"{module.target}/selected_order.py.jinja")
        yield template.render({**common, "text": back.order})
    if back.sums is not None:
        template = triton_environment().get_template(f"{module.target}/selected_sum.py.jinja")
        yield template.render({**common, "text": back.sums})


def _header(module: Module, path: str, sha256: str) -> dict[str, object]:
    form = module.variant.attention.softmax.form
    glossary = GLOSSARIES[form]
    if module.backward is not None:
        of_softmax = _OF_THE_BACKWARD.format(delta=delta_of(module, "do * o"))
        glossary += f"\n{_BACKWARDS.get(form, of_softmax)}"
    return {**header(module, "Triton", _and_back(module), path, sha256), "glossary": glossary}


def _and_back(module: Module) -> str:
    return "" if module.backward is None else "; and its gradients"


@cache
def triton_environment() -> jinja2.Environment:
    """Returns the environment of templates of Triton kernels, which are Python."""
    environment = python_environment().overlay()
    filters = {"load": load, "scalar": scalar, "tiled": tiled, "score": score, "statement": statement}
    own = {"times_scale": _times_scale}
    environment.filters = {**environment.filters, **filters, **own}
    return environment


def _times_scale(kernel: Kernel) -> str:
    return "" if kernel.softmax.scale is None else " * SCALE"


#: Of the second axis of a grid, along which the splits of a sequence lie.
_MOST_PROGRAMS = 65535


def triton_declaration(
    module: Module,
    kernel: Forward | Decode,
    text: KernelText,
    back: TritonBackward | None,
    operator: str,
    lists: ListsText | None,
) -> CallText:
    """Returns the value of `CALL`: `TritonAttention(...)`."""
    fields = attention_fields(module, kernel, operator)
    dv = text.dv
    if isinstance(kernel, Decode) and kernel.split is not None:
        fields["split"] = split_record(module, kernel, kernel.split, _MOST_PROGRAMS)
        width = width_of_split(kernel, dv)
        if kernel.split.segment and kernel.softmax.v_scale is not None:
            width += 1  # a scale of v, which is multiplied where segments have been joined
        fields["scratch"] = Table({"splits": quote_word(f"SPLIT_ROWS * {width}")})
    elif kernel.grid.over == "head":
        scratch = {"acc": f"(B, H, M, {dv})", "l": "(B, H, M)", "m": "(B, H, M)"}
        fields["scratch"] = Table({name: quote_word(shape) for name, shape in scratch.items()})
    if lists is not None:
        for name, size in lists.list_memory.items():
            add_scratch(fields, name, size)
    first = [] if lists is None else [*lists.launches()]
    fields["launches"] = Items([*first, *_launches(module, kernel, text)])
    if back is not None:
        fields["backward"] = back.declared
    return CallText("TritonAttention", fields=fields)


def _launches(module: Module, kernel: Forward | Decode, text: KernelText) -> Iterator[CallText]:
    tensors = text.parameter_lines[0]
    others = [name.removesuffix("_ptr") for name in tensors[len(text.matrices) :]]
    yield triton_kernel(
        kernel.name,
        _grid(module, kernel),
        tiles=text.matrices,
        pointers=others,
        sizes={"SECTION": _section(module, text)} if "SECTION" in text.size_names else {},
        contracts=not text.is_ordered,
    )
    if isinstance(kernel, Decode) and kernel.split is not None:
        combine = CombineText(module, kernel)
        names = ["o" if name == "O" else name.removesuffix("_ptr") for name in combine.parameter_lines[0]]
        # So many warps that a thread holds a row of two splits at most; more only wait for each other.
        warps = min(max(text.block_dv // 64, 2), 8)
        yield triton_kernel(
            combine.name, "rows", pointers=names, warps=warps, joins=True, contracts=not text.is_ordered
        )


def _grid(module: Module, kernel: Forward | Decode) -> str:
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
    longest_keys = "N" if keys == "N" else f"{keys} // B"
    return section(text.kernel.grid.section, text.all_heads, longest_keys, key_bytes(attention))


def _find_sums(module: Module, texts: Iterable[BackwardText]) -> Iterator[SumText]:
    for text in texts:
        match text:
            case TurnText():
                yield SumText(module, text, text.makes, text.selected.block)
            case TokenText():
                yield TokenSumText(module, text)


class TritonBackward(BackwardDeclaration):
    """The backward of a Triton module. texts: of its kernels, in the order of execution."""

    def __init__(self, module: Module, texts: Sequence[BackwardText], lists: ListsText | None) -> None:
        added = [name for text in texts for name in text.kernel.adds]
        super().__init__(module, [*(name for text in texts for name in text.makes), *added])
        self._lists = lists
        self._texts = texts
        turns = [text for text in texts if isinstance(text, TurnText)]
        self.selects = any(isinstance(text, SelectedText) for text in texts)
        #: What makes gradients of sums in memory.
        self.sums = next(_find_sums(module, texts), None)
        #: What finds which programs wait for each other.
        self.order = OrderText(module, turns[0]) if turns else None
        preprocess = self._backward.preprocess
        self.preprocess = PreprocessText(module, preprocess, self.configs[0]) if preprocess else None
        epilogue = self._backward.epilogue
        self.epilogue = EpilogueText(module, epilogue, self.configs[0]) if epilogue else None

    @property
    def moves(self) -> tuple[str, ...]:
        """Device functions for tiles of keys that a list names, which lie anywhere."""
        adds = () if self.sums is None else ("_add_tile",)
        return ("_find_keys", "_gather_tile", "_scatter_tile", *adds) if self.selects else ()

    @property
    def declared(self) -> CallText:
        first = [] if self._lists is None else [*self._lists.launches(self.configs[0])]
        first += [text.launch for text in (self.epilogue, self.preprocess) if text is not None]
        first += [] if self.order is None else [self.order.launch]
        last = [] if self.sums is None else [self.sums.launch]
        launches = Items([*first, *(text.parameters.launch for text in self._texts), *last])
        return self.fields(self._sizes, launches)

    @property
    def _sizes(self) -> Mapping[str, str]:
        rows = {} if self.packs_queries else {"M_padded": self._padded}
        if self._lists is None or self.sums is None:
            return rows
        return {**rows, **self._lists.sorting_sizes, **self.sums.memory_sizes(self._lists.made.extents[-1])}

    def list_allocations(self) -> Iterator[CallText]:
        yield from super().list_allocations()
        for text in self._texts[:1]:
            rows = self.row_sizes
            for name in () if text.sticks is None else text.sticks.edges:
                shape = f"f32[{rows}, {count_edges(self.module, text.parameters.config)}]"
                yield CallText("Made", [quote_word(name)], {"type": quote_word(shape)})
        for name, size in ({} if self._lists is None else self._lists.memory).items():
            yield CallText("Made", [quote_word(name)], {"type": quote_word(f"f32[{size}]")})
        if self._lists is not None:
            yield from self._lists.sorting_memory()
        if self.sums is not None:
            yield from self.sums.list_allocations()

    @property
    def _padded(self) -> str:
        """M rounded up to whole q tiles of every kernel, all powers of two; to whole blocks of queries, which
        these divide, where lists name such.
        """
        if self._lists is not None and not self.selects and (rows := self._lists.made.rows):
            return f"cdiv(M, {rows}) * {rows}"
        return f"whole_tiles(M, {', '.join(f'{config}.BLOCK_M' for config in self.configs)})"
