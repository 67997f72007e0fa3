"""Planned modules made ready to launch at realistic sizes: what `attnc tune`, `demo` and `calibrate` run.

`Sized` and `Layer` hold an attention and a projection in as many copies as push each other out of the L2
cache; inputs are drawn, or read from a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import Const, Dim, Expr, show, walk
from attnc.model.dtypes import DType
from attnc.model.tensors import Paged, Ragged, Role, Tensor
from attnc.plan import ir
from attnc.plan.ir import Module
from attnc.plan.layout import KernelName
from attnc.plan.projection import ProjectionModule
from attnc.plan.signature import PAGES
from attnc.runtime.loader import load_module, load_text
from attnc.runtime.timing import Launch, capture_calls
from attnc.support.arguments import DTYPES
from attnc.tuned.choices import TunedChoice

#: Sizes that a spec leaves open, apart from the lengths.
_DIMS = {"H": 16, "Hkv": 4, "G": 4}
_TOKENS = 16384
_DOCUMENT = 1000
#: Integer inputs that are lengths of sequences, by the names that specs give them.
_LENGTHS = frozenset({"kv_len", "q_len"})
#: The byte of 1.0 in a scale of eight bits of exponent.
_ONE = 127
#: Those of the callable, in order.
Arguments: TypeAlias = tuple[torch.Tensor, ...]


def problem_for(
    module: ir.Module,
    length: int,
    *,
    device: str = "cuda",
    tokens: int = _TOKENS,
    sizes: Mapping[str, int] | None = None,
) -> Arguments:
    """Returns N(0, 1) inputs with M = N = `length` and as many sequences as make `tokens` tokens.

    Sorted integers number documents of 1000 tokens; other integers of the size of a length are one eighth of
    it, and bytes at most 127. Packed sequences are all as long, pages lie in random order; a decode kernel
    gets M = 1 and, on a GPU, sixteen times as many sequences. sizes: dims that are to be something else.
    """
    decodes = module.kernel.structure == "decode"
    tokens *= 16 if decodes and device != "cpu" else 1
    dims = {**_DIMS, "B": max(1, tokens // length), "M": 1 if decodes else length, "N": length}
    dims |= sizes or {}
    dims |= _memory_dims(module, dims)
    heads = module.variant.attention.q.size(Role.HEAD)
    if all(node.name in dims for node in walk(heads) if isinstance(node, Dim)):
        dims["H"] = _value(heads, dims)  # of a group of fixed size, say
    if isinstance(kv_heads := module.variant.attention.k.size(Role.HEAD), Const):
        dims["Hkv"] = _value(kv_heads, dims)
    for arg in module.args:
        for bind in arg.axes:
            if bind.name is not None and isinstance(bind.expected, Const):
                dims[bind.name] = _value(bind.expected, dims)  # whatever `sizes` says of heads
            elif bind.name is not None:
                dims.setdefault(bind.name, length)
    generator = torch.Generator(device).manual_seed(0)
    located = _locate_rows(module, dims, generator)
    tensors = (
        located[arg.tensor.name] if arg.tensor.name in located else _draw(arg, dims, generator)
        for arg in module.args
    )
    return tuple(tensors)


def _memory_dims(module: ir.Module, dims: Mapping[str, int]) -> dict[str, int]:
    attention, known = module.variant.attention, {}
    for tensor, role, name in ((attention.q, Role.QUERY, "M"), (attention.k, Role.KEY, "N")):
        match tensor.storage:
            case Ragged(cu_seqlens=cu):
                known[show(tensor.size(role))] = dims["B"] * dims[name]
                ends = next(arg for arg in module.args if arg.tensor.name == cu).axes[0]
                if ends.name is not None:  # sequences, which a kernel of listed rows does not call B
                    known[ends.name] = dims["B"]
            case Paged(block_table=table, page=page):
                columns = -(-dims["N"] // page)
                known[show(attention.tensor(table).shape[1])] = columns
                known[PAGES.name] = dims["B"] * columns
                known["N"] = columns * page
    return known


def _locate_rows(
    module: ir.Module, dims: Mapping[str, int], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    attention, batch, device = module.variant.attention, dims["B"], generator.device
    made = {}
    for tensor, name in ((attention.q, "M"), (attention.k, "N")):
        match tensor.storage:
            case Ragged(cu_seqlens=cu):
                made[cu] = torch.arange(batch + 1, device=device, dtype=torch.int32) * dims[name]
            case Paged(block_table=table):
                pages = torch.randperm(dims[PAGES.name], generator=generator, device=device)
                made[table] = pages.to(torch.int32).reshape(batch, -1)
    return made


def trial(module: ir.Module, tensors: Arguments, position: int | None = None) -> Launch:
    """Returns a launch of the config at this position (None: the module's own choice); each call makes new
    outputs.
    """
    loaded: Any = load_module(module)
    function = getattr(loaded, module.variant.attention.name)
    if position is None:
        return lambda: function(*tensors)
    config = loaded.CONFIGS[position]
    return lambda: function(*tensors, config=config)


def backward_trial(
    module: ir.Module, tensors: Arguments, kernel: KernelName | None = None, position: int = 0
) -> Launch:
    """Returns a launch of all backward kernels, one of them with its config at this position and the others
    with the module's own choice, as autograd does it for a forward that is kept.
    """
    loaded: Any = load_module(module)
    attention = module.variant.attention
    given = {} if kernel is None else {kernel: loaded.BACKWARD_CONFIGS[kernel][position]}
    inputs = {arg.tensor.name: x.detach() for arg, x in zip(module.args, tensors, strict=True)}
    leaves = [inputs[name].requires_grad_() for name in attention.grads]
    found: Any = getattr(loaded, attention.name)(*inputs.values(), backward_config=given)
    o: torch.Tensor = found[0] if isinstance(found, tuple) else found
    generator = torch.Generator(o.device).manual_seed(1)
    do = torch.randn(o.shape, generator=generator, device=o.device, dtype=torch.float32).to(o.dtype)
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True, allow_unused=True)


def device_name() -> str:
    """Returns the current CUDA device, as tuned files call it."""
    return torch.cuda.get_device_name()


def synchronize() -> None:
    """Waits for the GPU, so that a failed launch raises here."""
    torch.cuda.synchronize()


def _draw(arg: ir.Arg, dims: Mapping[str, int], generator: torch.Generator) -> torch.Tensor:
    axes = zip(arg.tensor.shape, arg.axes, strict=True)
    shape = [dims[PAGES.name] if size == PAGES else _size(bind, dims) for size, bind in axes]
    element = DType(arg.tensor.dtype)
    dtype = DTYPES[element]
    device = generator.device
    if element.is_float or element.is_narrow:
        drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        if element.is_narrow_integer:
            drawn = (16 * drawn).clamp(element.facts.least, element.largest)
        return drawn.to(dtype)
    if arg.tensor.is_sorted:
        row = torch.arange(shape[-1], device=device) // _DOCUMENT
        return row.expand(shape).to(dtype).contiguous()
    if dtype is torch.bool:
        return torch.ones(shape, device=device, dtype=dtype)
    length = dims["N"] if arg.tensor.name in _LENGTHS else dims["N"] // 8
    if dtype is torch.uint8:
        length = min(length, _ONE)
    return torch.full(shape, length, device=device, dtype=dtype)


def _size(bind: ir.Bind, dims: Mapping[str, int]) -> int:
    return dims[bind.name] + bind.plus if bind.name is not None else _value(bind.expected, dims)


def _value(expr: Expr | None, dims: Mapping[str, int]) -> int:
    if expr is None:
        raise ValueError("an axis that is neither bound nor checked")
    used = {node.name: dims[node.name] for node in walk(expr) if isinstance(node, Dim)}
    return int(evaluate(expr, Env(dims=used)))


# --- an attention at given sizes ----------------------------------------------------------------------------


#: Bytes of K and V that are read between two readings of one, and most copies.
_COLD, _MOST = 256 << 20, 16


class Sized:
    """Inputs of an attention with M query rows and N keys in each of B sequences; most: copies of them."""

    def __init__(self, module: ir.Module, M: int, N: int, B: int, most: int = _MOST) -> None:
        first = problem_for(module, N, sizes={"M": M, "B": B})
        named = {arg.tensor.name: at for at, arg in enumerate(module.args)}
        q, k = (first[named[name]] for name in "qk")
        self.copies = max(1, min(most, _COLD // (2 * k.numel() * k.element_size())))
        clones = [tuple(tensor.clone() for tensor in first) for _ in range(self.copies - 1)]
        self.problems = [first, *clones]
        attention = module.variant.attention
        self.heads, self.kv_heads = _heads(attention.q, q), _heads(attention.k, k)
        keys = k.shape[attention.k.axis(Role.KEY) or 0]
        if table := attention.k.storage.table:
            keys = first[named[table]].shape[1] * attention.k.storage.rows_of_page
        rows = q.shape[attention.q.axis(Role.QUERY) or 0]
        sequences = 1 if attention.q.axis(Role.BATCH) is None else q.shape[0]
        #: What a call is chosen by: M, N, and batch times heads; of packed sequences the rows of all.
        self.seen = rows, keys, sequences * self.heads

    def graph(self, module: ir.Module, choices: Iterable[TunedChoice]) -> Launch:
        """Returns a graph of one call for each copy, with the config that the module takes by itself."""
        loaded: Any = load_module(module, choices)
        function = getattr(loaded, module.variant.attention.name)
        with torch.no_grad():
            return capture_calls([partial(function, *tensors) for tensors in self.problems])

    def with_gradients(self, module: ir.Module, choices: Iterable[TunedChoice]) -> Launch:
        attention, loaded = module.variant.attention, load_module(module, choices)
        function: Any = getattr(loaded, attention.name)
        names = (arg.tensor.name for arg in module.args)
        inputs = [
            x.clone().requires_grad_() if name in attention.grads else x
            for name, x in zip(names, self.problems[0], strict=True)
        ]
        wanted = [x for x in inputs if x.requires_grad]
        do = torch.randn_like(_first(function(*inputs)))
        return lambda: torch.autograd.grad(_first(function(*inputs)), wanted, do)


def _first(found: Any) -> torch.Tensor:
    o: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return o


def _heads(tensor: Tensor, values: torch.Tensor) -> int:
    axis = tensor.axis(Role.HEAD)
    return 1 if axis is None else int(values.shape[axis])


# --- projections --------------------------------------------------------------------------------------------


#: Bytes of weights that are read between two readings of one of them: several times any cache.
_COLD_WEIGHTS = 512 << 20


class Layer:
    """A projection with fixed N and K on this GPU: copies of its weights, and graphs of its configs."""

    def __init__(self, planned: ProjectionModule, text: str, copies: int | None = None) -> None:
        projection = planned.variant.projection
        sizes = projection.size("N"), projection.size("K")
        if sizes[0] is None or sizes[1] is None:
            raise ValueError(f"{planned.name} has open sizes")
        self.N, self.K = sizes[0], sizes[1]
        self.planned = planned
        self.module: Any = load_text(text)
        dtype = DTYPES[projection.dtype]
        self.bytes = self.N * self.K * projection.dtype.bytes
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

        copies = copies or max(2, -(-_COLD_WEIGHTS // self.bytes))
        self.weights = [normal(self.N, self.K) for _ in range(copies)]
        self.bias = (normal(self.N),) if projection.has_bias else ()
        self._normal = normal

    def call(self, position: int, M: int) -> Launch:
        x, config = self._normal(M, self.K), self.module.CONFIGS[position]
        function = getattr(self.module, self.planned.name)
        return lambda: function(x, self.weights[0], *self.bias, config=config)

    def graphs(self, positions: Sequence[int], M: int) -> dict[str, Launch]:
        """Captures, for each config that runs here, a graph of one call for each copy of the weights."""
        x = self._normal(M, self.K)
        y = torch.empty((M, self.N), dtype=x.dtype, device="cuda")
        function = getattr(self.module, self.planned.name)
        made: dict[str, Launch] = {}
        for position in positions:
            config = self.module.CONFIGS[position]
            calls = [partial(function, x, w, *self.bias, out=y, config=config) for w in self.weights]
            try:
                made[str(position)] = capture_calls(calls)
            except Exception:  # too large for this device, or the compiler gave up: not a candidate
                torch.cuda.synchronize()
        return made


# --- inputs by name -----------------------------------------------------------------------------------------


#: Keys of a sequence, and tokens of all of them.
_DRAWN_LENGTH, _DRAWN_TOKENS = 1024, 4096


def load_samples(path: Path) -> dict[str, torch.Tensor]:
    """Returns a dict of tensors that `torch.save` wrote. v, which scores do not depend on, may be missing.
    Nothing in the file is executed. Raises OSError, and ValueError if it is another kind of file.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as failure:  # of many kinds, whose texts advise to execute what the file holds
        raise ValueError(f"{path} is not a file of tensors that torch.save wrote") from failure
    if not isinstance(found, dict) or not all(isinstance(x, torch.Tensor) for x in found.values()):
        raise ValueError(f"{path} does not hold a dict of tensors")
    samples = {str(name): tensor for name, tensor in found.items()}
    if "k" in samples:
        samples.setdefault("v", torch.zeros_like(samples["k"]))
    return samples


def draw_samples(module: Module) -> Mapping[str, torch.Tensor]:
    """Returns N(0, 1) inputs of 1024 keys, on the CPU."""
    tensors = problem_for(module, _DRAWN_LENGTH, device="cpu", tokens=_DRAWN_TOKENS)
    names = (arg.tensor.name for arg in module.args)
    return dict(zip(names, tensors, strict=True))
