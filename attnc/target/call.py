"""The pieces of a generated callable that are the same for every target, beside its signature: its checks."""

from __future__ import annotations

from collections.abc import Iterator

from attnc.expr.nodes import Const, Dim, Expr, Load, walk
from attnc.expr.show import show
from attnc.model.products import group_size, is_static
from attnc.model.tensors import Paged, Role
from attnc.plan.ir import Arg, Kernel, Module
from attnc.plan.storage import longest
from attnc.target.call_signature import Signature
from attnc.target.triton.kernel import KernelText
from attnc.target.triton.printer import FLOATS, torch_dtype


class CallText(Signature):
    """Text of the callable; attribute by attribute what `templates/_callable.py.jinja` and others print."""

    def __init__(self, module: Module, kernel: Kernel, text: KernelText) -> None:
        super().__init__(module)
        attention = module.variant.attention
        self._kernel, self._text = kernel, text
        self.first = "q"
        self.q_rows = show(longest(attention, Role.QUERY))
        self.longest = show(longest(attention, Role.KEY))
        self.nothing_to_do = f"B * H * {self.q_rows} == 0"
        self.differentiable = ", ".join(t.name for t in self.inputs if torch_dtype(t) in FLOATS and t.shape)

    @property
    def scalars(self) -> Iterator[str]:
        """Numbers become tensors before anything else."""
        if self.has_scalars:
            yield from self.query_check
            for arg in self.module.args:
                if not arg.tensor.shape:
                    yield from self._checked(arg)

    @property
    def query_check(self) -> Iterator[str]:
        """Whether q is what the others are made like."""
        q = next(arg for arg in self.module.args if arg.tensor.name == "q")
        yield f'_sizes("q", q, {torch_dtype(q.tensor)}, {_tuple(self._wanted(q))}, q)'

    @property
    def checks(self) -> Iterator[str]:
        matrices = [arg for arg in self.module.args if arg.tensor.roles]
        others = [arg for arg in self.module.args if not arg.tensor.roles]
        known: set[str | None] = set()
        for arg in matrices:
            yield from self._checked(arg)
            before, known = known, known | {bind.name for bind in arg.axes}
            if {"H", "Hkv"} <= known and not {"H", "Hkv"} <= before:
                yield from self._group(others)
        ready, later = self._in_turn(others)
        for arg in ready:
            yield from self._checked(arg)
        yield from (f"{size.name} = {show(size.value)}" for size in self.module.sizes)
        for arg in later:
            yield from self._checked(arg)

    def _in_turn(self, others: list[Arg]) -> tuple[list[Arg], list[Arg]]:
        """Those that can be checked before the sizes that are computed, and those that need them, or need
        what such an argument brings.
        """
        missing = {size.name for size in self.module.sizes}
        ready, later = [], []
        for arg in others:
            if missing & _named(arg):
                missing |= {bind.name for bind in arg.axes if bind.name}
                later.append(arg)
            else:
                ready.append(arg)
        return ready, later

    def _checked(self, arg: Arg) -> Iterator[str]:
        name = arg.tensor.name
        if not arg.tensor.shape:
            match self.module.variant.attention.softmax.dropout:
                case Load(tensor=p) if p == name:
                    yield f"if isinstance({name}, (int, float)) and not 0 <= {name} <= 1:"
                    yield f'    raise ValueError(f"{name}: expected a probability, 0 to 1, got {{{name}}}")'
            yield f'{name} = _scalar("{name}", {name}, {torch_dtype(arg.tensor)}, q)'
            return
        wanted = _tuple(self._wanted(arg))
        sizes = f'_sizes("{name}", {name}, {torch_dtype(arg.tensor)}, {wanted}, q)'
        binds = [bind.name or "_" for bind in arg.axes]
        if any(bind.name for bind in arg.axes):
            sizes = f"{', '.join(binds)}{',' if len(binds) == 1 else ''} = {sizes}"
        yield sizes
        for bind in arg.axes:
            if bind.name and bind.plus:
                shape = ", ".join(map(show, arg.tensor.shape))
                yield f"if {bind.name} < {bind.plus}:"
                yield f'    raise ValueError(f"{name}: expected shape [{shape}], got {{list({name}.shape)}}")'
        yield from corrections(arg)

    def _wanted(self, arg: Arg) -> Iterator[str]:
        """The size that each axis must have. One table leads to the pages of k and v: both have as many."""
        first = next((t for t in self.inputs if isinstance(t.storage, Paged)), arg.tensor)
        follows = isinstance(arg.tensor.storage, Paged) and arg.tensor.name != first.name
        for axis, bind in enumerate(arg.axes):
            if follows and arg.tensor.axis(Role.BATCH) == axis:
                yield f"{first.name}.shape[{first.axis(Role.BATCH)}]"
            else:
                yield _size(bind.expected)

    def _group(self, others: list[Arg]) -> Iterator[str]:
        """How many query heads share a KV head, where that is neither all nor one."""
        attention = self.module.variant.attention
        heads, kv_heads = attention.q.size(Role.HEAD), attention.k.size(Role.HEAD)
        match group_size(heads, kv_heads):
            case Const(value=group):
                if not (is_static(heads) and is_static(kv_heads)):
                    yield f"if H != {group} * Hkv:"
                    expected = f"expected {group} for each of the {{Hkv}} heads of k"
                    yield f'    raise ValueError(f"q has {{H}} heads: {expected}")'
            case _:
                yield "if Hkv == 0 or H % Hkv:"
                yield '    raise ValueError(f"q has {H} heads: expected a multiple of the {Hkv} heads of k")'
        wanted = (bind.expected for arg in others for bind in arg.axes if bind.expected is not None)
        if "G" in self._kernel.dims or any(Dim("G") in walk(size) for size in wanted):
            yield "G = H // Hkv"

    @property
    def outputs(self) -> Iterator[str]:
        """The results: the caller's, or what there will be memory for at every call."""
        yield from self._allocated
        yield "    _contiguous_rows(o=o)"
        yield from self.kept_checks

    @property
    def kept_checks(self) -> Iterator[str]:
        """Of what the kernels write besides, if the caller wants it."""
        for arg in self.module.kept:
            shape = _tuple(_size(b.expected) for b in arg.axes)
            name = arg.tensor.name
            yield f"if {name} is not None:"
            yield f'    _sizes("{name}", {name}, {torch_dtype(arg.tensor)}, {shape}, q)'
            yield f"    _apart({name}={name})"

    @property
    def _allocated(self) -> Iterator[str]:
        """Ends in the branch of the caller's."""
        yield "if out is None:"
        for arg in self.module.outputs:
            shape = _tuple(_size(b.expected) for b in arg.axes)
            dtype = torch_dtype(arg.tensor)
            yield f'    {arg.tensor.name} = torch.empty({shape}, dtype={dtype}, device="meta")'
        yield "else:"
        quoted = ", ".join(f'"{arg.tensor.name}"' for arg in self.module.outputs)
        yield f"    {self.result} = " + (f"_given(out, {quoted})" if len(self.results) > 1 else "out")
        for arg in self.module.outputs:
            name = arg.tensor.name
            shape = _tuple(_size(b.expected) for b in arg.axes)
            yield f'    _sizes("out {name}", {name}, {torch_dtype(arg.tensor)}, {shape}, q)'
        named = ", ".join(f"{arg.tensor.name}={arg.tensor.name}" for arg in self.module.outputs)
        yield f"    _apart({named})"

    @property
    def clear(self) -> list[str]:
        """Rows without a sequence, where there is none at all."""
        if self._kernel.grid.sequences is None:
            return []
        empty = "lse.fill_(-float('inf'))"
        if self._text.may_lack_lse:
            return ["o.zero_()", "if lse is not None:", f"    {empty}"]
        return ["o.zero_()", *([empty] if self._text.has_lse else [])]

    @property
    def is_split(self) -> bool:
        """Whether programs share the keys of a sequence, and a second kernel joins what they found."""
        return False


def kept_shape(module: Module) -> str:
    """The shape of an lse that is kept for the backward, from that of q."""
    q = next(arg.tensor for arg in module.args if arg.tensor.name == "q")
    axes = (q.axis(role) for role in (Role.BATCH, Role.HEAD, Role.QUERY))
    return ", ".join(f"q.shape[{axis}]" for axis in axes if axis is not None)


def _named(arg: Arg) -> set[str]:
    """The sizes that the argument's axes must have."""
    expected = (bind.expected for bind in arg.axes if bind.expected is not None)
    return {node.name for size in expected for node in walk(size) if isinstance(node, Dim)}


def corrections(arg: Arg) -> Iterator[str]:
    """Sizes from axes that are longer than they."""
    yield from (f"{bind.name} -= {bind.plus}" for bind in arg.axes if bind.name and bind.plus)


def _tuple(items: Iterator[str]) -> str:
    texts = tuple(items)
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def _size(expected: Expr | None) -> str:
    return "None" if expected is None else show(expected)
