"""Triton's interpreter, made trustworthy: exact bf16 and numbers of 8 bits, the GPU's NaN rules, tf32, and
checkers.

Triton runs a kernel on NumPy when TRITON_INTERPRET=1 was set before it was imported. As shipped (3.6), its
bf16 casts truncate, NaN and infinities of 8 bits become finite, `tl.dot` multiplies bf16 bit patterns,
`tl.maximum` differs from the GPU on NaN, libdevice and inline assembly (`assembly`) are missing, and a stray
address reads whatever lies there. `ensure_interpreter` replaces the parts concerned, so that the *unmodified*
kernel computes what it computes on a GPU. Besides, every access to memory is checked (`memory`), and
precision that is lost on the way is a fault (`PrecisionFault`).
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from attnc.model.dtypes import DType
from attnc.reference import bf16_to_f32, f32_to_bf16
from attnc.support.sizes import parse_beside_threads
from attnc.verify import assembly
from attnc.verify.interpreted_language import SHORT, Language
from attnc.verify.memory import WATCH, MemoryFault

Array: TypeAlias = npt.NDArray[Any]

#: Functions of libdevice, which the interpreter lacks.
_LIBDEVICE: Mapping[str, Callable[..., Array]] = {
    "tanh": np.tanh,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "sqrt": np.sqrt,
    "fast_tanh": np.tanh,
    "fast_exp": np.exp,
}
#: What belongs in float32.
_ARITHMETIC = (np.add, np.subtract, np.multiply, np.divide)


class PrecisionFault(Exception):
    """A kernel computed in 16 bits, or went on in 32 with what it had rounded to 16: error bounds count one
    rounding, where something is multiplied or leaves.
    """


def ensure_interpreter() -> None:
    """Makes Triton interpret the kernels that are imported from now on, in this process; can be called again.

    RuntimeError if Triton was imported as a compiler before, and there is a GPU that it may compile for.
    ModuleNotFoundError where there is no Triton.
    """
    if is_interpreting():
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton.language.standard as standard
        from triton.runtime import interpreter
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"kernels for Triton run in its interpreter where there is no GPU ({missing}): "
            "pip install triton, which is published for Linux",
            name=missing.name,
        ) from None
    if not isinstance(standard.max, interpreter.InterpretedFunction):
        if torch.cuda.is_available():
            raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set: start a new process")
        _interpret_library(interpreter.InterpretedFunction)
    _Patch(interpreter).install()


def _interpret_library(interpreted: Any) -> None:
    """Makes Triton's own functions, such as `tl.max`, interpreted ones, where it was imported as a compiler
    before: torch's create_block_mask does that.
    """
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    made: dict[int, Any] = {}
    for module in (tl, tl.standard, tl.random):
        for name, function in [*vars(module).items()]:
            if isinstance(function, JITFunction):
                if id(function) not in made:
                    made[id(function)] = interpreted(function.fn)
                setattr(module, name, made[id(function)])
    for name, function in [*vars(tl.core.tensor).items()]:
        if id(function) in made:
            setattr(tl.core.tensor, name, _as_method(made[id(function)]))


def _as_method(function: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs)


def is_interpreting() -> bool:
    """Returns True once `ensure_interpreter` has done its work."""
    return hasattr(sys.modules.get("triton.runtime.interpreter"), "ATTNC_PATCHED")


class _Namespace:
    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


class _Patch:
    """The replaced parts of one imported `triton.runtime.interpreter`.

    Methods named `wrap_*` take the original and return its replacement.
    """

    def __init__(self, interpreter: Any) -> None:
        import triton.language as tl

        self.interpreter = interpreter
        self.tl = tl
        self.patch_lang = interpreter._patch_lang
        self.scopes: list[Any] = []
        self.patched_globals: set[int] = set()
        #: Of a launch, which changes Triton's modules for as long as it takes, and of reading kernels, for
        #: which it may be held already.
        self.launching = threading.RLock()
        self.language = Language(tl, interpreter)
        #: By type of 8 bits PyTorch's, and the numbers of its 256 codes.
        self.narrow = {
            tl.dtype(dtype.facts.triton): getattr(torch, dtype.facts.torch)
            for dtype in DType
            if dtype.is_narrow and dtype.facts.has_nan
        }
        codes = torch.arange(256, dtype=torch.int16, device="cpu").to(torch.uint8)
        self.codes = {ours: codes.view(theirs).float().numpy() for ours, theirs in self.narrow.items()}

    def install(self) -> None:
        builder, executor = self.interpreter.InterpreterBuilder, self.interpreter.GridExecutor
        for owner, name, wrap in (
            (builder, "cast_impl", self.wrap_cast),
            (builder, "create_fp_to_fp", self.wrap_cast_of_floats),
            (builder, "binary_op", self.wrap_binary),
            (builder, "unary_op", self.wrap_unary),
            (builder, "create_dot", self.wrap_dot),
            (builder, "create_masked_load", self.wrap_load),
            (builder, "create_masked_store", self.wrap_store),
            (builder, "create_atomic_rmw", self.wrap_atomic),
            (builder, "set_grid_idx", self.wrap_set_grid_idx),
            (self.interpreter.TensorDescHandle, "materialize_pointers", self.wrap_materialize),
            (self.interpreter.ReduceOps, "min_max", self.wrap_min_max),
            (executor, "_init_args_hst", self.wrap_init_args),
            (executor, "_restore_args_dev", self.wrap_restore_args),
            (executor, "__call__", self.wrap_launch),
            (self.interpreter.FunctionRewriter, "rewrite_ast", self.wrap_rewrite),
            (self.interpreter, "_get_np_dtype", self.wrap_numpy_type),
            (self.interpreter, "_implicit_cvt", self.wrap_argument),
            (self.interpreter, "_patch_builtin", self.wrap_patch_builtin),
            (self.tl.core.dtype, "__eq__", self.wrap_equal),
            (self.tl.core.block_type, "__init__", self.wrap_block_type),
            (self.tl.core.tensor, "__init__", self.wrap_tensor),
        ):
            setattr(owner, name, wrap(getattr(owner, name)))
        builder.get_bf16 = lambda _, value: self.handle(np.array([value], np.float32), self.tl.bfloat16)
        # tl.maximum and tl.minimum drop a NaN operand on the GPU unless told otherwise.
        builder.create_maxnumf = lambda b, x, y: b.binary_op(x, y, np.fmax)
        builder.create_minnumf = lambda b, x, y: b.binary_op(x, y, np.fmin)
        builder.create_inline_asm = self.inline_asm
        options = self.interpreter.interpreter_builder.options
        # Each integer sum is otherwise computed twice, for an assertion that nothing reads.
        self.interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
        self.interpreter._patch_lang = self.patch_lang_once
        if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
            os.register_at_fork(after_in_child=self.begin_anew)
        self.interpreter.ATTNC_PATCHED = True

    def begin_anew(self) -> None:
        """In a forked process: the thread that was launching a kernel, or reading one, is not there."""
        self.launching = threading.RLock()
        self.undo_launch()

    def undo_launch(self) -> None:
        """Takes back what a launch has changed in Triton's modules."""
        while self.scopes:
            self.scopes.pop().restore()
        self.patched_globals.clear()
        WATCH.allocations.clear()

    def values(self, handle: Any) -> Array:
        dtype = handle.dtype.scalar
        if dtype in self.codes:
            numbers: Array = self.codes[dtype][handle.data]
            return numbers
        return bf16_to_f32(handle.data) if dtype == self.tl.bfloat16 else handle.data

    def handle(self, values: Array, dtype: Any) -> Any:
        if dtype.scalar in self.narrow:
            rounded = torch.from_numpy(values.astype(np.float32)).to(self.narrow[dtype.scalar])
            values = rounded.view(torch.uint8).numpy()
        elif dtype.scalar == self.tl.bfloat16:
            values = f32_to_bf16(values.astype(np.float32))
        else:
            values = values.astype(self.interpreter._get_np_dtype(dtype), copy=False)
        return self.interpreter.TensorHandle(values, dtype.scalar)

    def wrap_cast(self, original: Any) -> Any:
        def cast_impl(builder: Any, src: Any, dst_type: Any) -> Any:
            made = (
                self.handle(self.values(src), dst_type)
                if self.tl.bfloat16 in (src.dtype.scalar, dst_type.scalar)
                else original(builder, src, dst_type)
            )
            is_wide = src.dtype.is_floating() and src.dtype.scalar.primitive_bitwidth > 16
            if self.is_half(dst_type) and is_wide:
                made.is_rounded = True
            elif getattr(src, "is_rounded", False) and dst_type.scalar == self.tl.float32:
                raise PrecisionFault("a float32 was rounded to 16 bits and used as float32 again")
            return made

        return cast_impl

    def wrap_cast_of_floats(self, original: Any) -> Any:
        """Replaces what makes finite numbers of NaN and infinities in conversions from and to 8 bits. A GPU
        makes 65536 and more of them where Triton converts e5m2 to bf16.
        """

        def create_fp_to_fp(builder: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
            kinds = src.dtype.scalar, dst_type.scalar
            if not any(kind in self.narrow for kind in kinds):
                return original(builder, src, dst_type, rounding)
            values = self.values(src)
            if kinds == (self.tl.float8e5, self.tl.bfloat16):
                finite = self.codes[self.tl.float8e5][src.data & 0xBF] * np.float32(2.0**16)
                values = np.where(np.isfinite(values), values, finite)
            return self.handle(values, dst_type)

        return create_fp_to_fp

    def is_half(self, dtype: Any) -> bool:
        return dtype.scalar in (self.tl.float16, self.tl.bfloat16)

    def wrap_binary(self, original: Any) -> Any:
        def binary_op(builder: Any, lhs: Any, rhs: Any, op: Any) -> Any:
            bits = lhs.dtype.scalar.primitive_bitwidth
            if op in _ARITHMETIC and lhs.dtype.is_floating() and bits < 32:
                raise PrecisionFault(f"arithmetic in {bits} bits: {op.__name__} of {lhs.dtype.scalar}")
            if lhs.dtype.scalar != self.tl.bfloat16:
                made = original(builder, lhs, rhs, op)
                # A comparison is left with the type of its operands; a splat of it would hold 0 and 1.
                return self.handle(made.data, self.tl.int1) if made.data.dtype == np.bool_ else made
            result = op(self.values(lhs), self.values(rhs))
            return self.handle(result, self.tl.int1 if result.dtype == np.bool_ else lhs.dtype)

        return binary_op

    def wrap_unary(self, original: Any) -> Any:
        def unary_op(builder: Any, arg: Any, op: Any) -> Any:
            if arg.dtype.scalar != self.tl.bfloat16:
                return original(builder, arg, op)
            return self.handle(op(self.values(arg)), arg.dtype)

        return unary_op

    def wrap_dot(self, original: Any) -> Any:
        tf32 = self.interpreter._ir.INPUT_PRECISION.TF32

        def create_dot(builder: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
            if not a.dtype.is_floating() or a.dtype.primitive_bitwidth not in (16, 32):
                return original(builder, a, b, d, precision, imprecise)
            left, right, at_once = self.values(a), self.values(b), 16
            if a.dtype.primitive_bitwidth == 32:
                at_once = 4
                if precision == tf32:
                    left, right = f32_to_tf32(left), f32_to_tf32(right)
            # So many columns are multiplied at once, and the sum rounded. In float32 its last bit would be
            # that of the processor's matrix library, and depend on where a row lies in a tile.
            left, right, total = left.astype(np.float64), right.astype(np.float64), d.data
            with np.errstate(over="ignore", invalid="ignore"):
                for k in range(0, left.shape[-1], at_once):
                    step = np.matmul(left[..., k : k + at_once], right[..., k : k + at_once, :])
                    total = (total + step).astype(d.data.dtype)
            return self.handle(total, d.dtype)

        return create_dot

    def wrap_min_max(self, original: Any) -> Any:
        """Replaces nanmax, which warns about rows of NaN; fmax is the same function without the warning."""
        quiet = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}

        def min_max(ops: Any, values: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
            return original(ops, values, quiet.get(val_reduce_op, val_reduce_op), idx_reduce_op)

        return min_max

    def wrap_load(self, original: Any) -> Any:
        def create_masked_load(
            builder: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **named: Any
        ) -> Any:
            WATCH.load(ptrs.data, lanes(mask), other is not None)
            return original(builder, ptrs, mask, other, *rest, **named)

        return create_masked_load

    def wrap_store(self, original: Any) -> Any:
        def create_masked_store(builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            WATCH.store(ptrs.data, lanes(mask))
            return original(builder, ptrs, value, mask, *rest)

        return create_masked_store

    def wrap_atomic(self, original: Any) -> Any:
        def create_atomic_rmw(builder: Any, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
            WATCH.atomic(ptr.data, mask.data)
            return original(builder, op, ptr, val, mask, *rest)

        return create_atomic_rmw

    def wrap_set_grid_idx(self, original: Any) -> Any:
        def set_grid_idx(builder: Any, x: int, y: int, z: int) -> None:
            nx, ny, nz = builder.grid_dim
            WATCH.program = WATCH.place((x * ny + y) * nz + z, nx * ny * nz)
            rest, z = divmod(WATCH.program, nz)
            original(builder, *divmod(rest, ny), z)

        return set_grid_idx

    def wrap_materialize(self, original: Any) -> Any:
        """Addresses and mask of a box, whose axes meet in one sum: the original has the box for each axis."""

        def materialize_pointers(box: Any, offsets: Any) -> Any:
            size = box.base.dtype.element_ty.primitive_bitwidth // 8
            if (offsets[-1].data * size) % 16 != 0 or len(offsets) != box.ndim:
                return original(box, offsets)
            addresses, mask = box.base.data.astype(np.uint64), np.array([True])
            for axis, length in enumerate(box.block_shape):
                shape = [1] * box.ndim
                shape[axis] = length
                at = (offsets[axis].data + np.arange(length)).reshape(shape)
                addresses = addresses + (size * at * box.strides[axis].data).astype(np.uint64)
                mask = mask & (at >= 0) & (at < box.shape[axis].data)
            return self.interpreter.TensorHandle(addresses, box.base.dtype.scalar), mask

        return materialize_pointers

    def inline_asm(self, asm: str, _: str, args: Any, types: Any, is_pure: bool, pack: int) -> Any:
        kinds = [np.dtype(self.interpreter._get_np_dtype(kind)) for kind in types]
        made = assembly.run(asm, [arg.data for arg in args], kinds, pack)
        scalars = (kind.scalar for kind in types)
        results = [self.interpreter.TensorHandle(*pair) for pair in zip(made, scalars, strict=True)]
        return SimpleNamespace(get_result=results.__getitem__)

    def wrap_init_args(self, original: Any) -> Any:
        def init_args(executor: Any, args: Any, named: Any) -> Any:
            result = original(executor, args, named)
            names = [name for name in executor.arg_names if name not in named]
            for name, value in [*zip(names, args, strict=False), *named.items()]:
                tensor = getattr(value, "base", value)
                if isinstance(tensor, torch.Tensor):
                    WATCH.register(name, tensor)
            return result

        return init_args

    def wrap_restore_args(self, original: Any) -> Any:
        def restore_args(executor: Any, args_dev: Any, args_hst: Any, named: Any, named_hst: Any) -> None:
            """Does nothing: CPU tensors were never copied, and copying a storage onto itself touches all of
            its pages.
            """
            tensors = [getattr(value, "base", value) for value in (*args_dev, *named.values())]
            if any(isinstance(tensor, torch.Tensor) and tensor.is_cuda for tensor in tensors):
                original(executor, args_dev, args_hst, named, named_hst)

        return restore_args

    def wrap_launch(self, original: Any) -> Any:
        """Threads take turns. float32 subnormals are flushed, as GPUs may do: a CPU takes a hundred times
        longer over them.
        """

        def launch(executor: Any, *args: Any, **named: Any) -> None:
            with self.launching:
                launch_alone(executor, *args, **named)

        def launch_alone(executor: Any, *args: Any, **named: Any) -> None:
            WATCH.allocations.clear()
            try:
                torch.set_flush_denormal(True)
                with np.errstate(all="ignore"):
                    original(executor, *args, **named)
            except self.interpreter.InterpreterError as error:
                cause: BaseException | None = error
                while cause is not None and not isinstance(cause, MemoryFault | PrecisionFault):
                    cause = cause.__cause__
                raise (cause or error) from None if cause else error.__cause__
            finally:
                torch.set_flush_denormal(False)
                self.undo_launch()

        return launch

    def wrap_rewrite(self, original: Any) -> Any:
        """Finds functions of a module in one parse of its file, not in one search of its tokens each."""
        transform = self.interpreter.ASTTransformer()

        def rewrite_ast(rewriter: Any) -> Any:
            with self.launching:
                return rewrite_alone(rewriter)

        def rewrite_alone(rewriter: Any) -> Any:
            function = rewriter.fn
            code = function.__code__
            linecache.checkcache(code.co_filename)
            text = "".join(linecache.getlines(code.co_filename, function.__globals__))
            name, defined = code.co_name, self.definitions(code.co_filename, text)
            place = (name, code.co_firstlineno)
            if place not in defined:  # inside another function, or without a file
                return parse_beside_threads(original, rewriter)
            if isinstance(defined[place], ast.FunctionDef):
                definition = transform.visit(defined[place])
                definition.decorator_list = []
                tree = ast.fix_missing_locations(ast.Module([definition], []))
                defined[place] = compile(tree, code.co_filename, "exec")
            names = {**rewriter.kwargs}
            for key, value in vars(self.interpreter).items():
                function.__globals__.setdefault(key, value)
            exec(defined[place], function.__globals__, names)
            return names[name]

        return rewrite_ast

    @staticmethod
    @lru_cache(maxsize=64)
    def definitions(path: str, text: str) -> dict[tuple[str, int], Any]:
        """Returns the functions at the top level of a file, by name and first line, which may be a
        decorator's.
        """
        tree = parse_beside_threads(ast.parse, text, path)
        return {
            (node.name, min([node.lineno, *(part.lineno for part in node.decorator_list)])): node
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
        }

    def wrap_numpy_type(self, original: Any) -> Any:
        """Remembers the answers of the original, which makes a dictionary of all types for each question."""
        known: dict[str, Any] = {}

        def get_np_dtype(dtype: Any) -> Any:
            name = dtype.scalar.name
            if name not in known:
                known[name] = original(dtype)
            return known[name]

        return get_np_dtype

    def wrap_argument(self, original: Any) -> Any:
        """Remembers the types of arguments, which the original finds by way of their names."""
        types: dict[Any, Any] = {}

        def implicit_cvt(argument: Any) -> Any:
            key: Any
            data: Array
            if argument.__class__ is int and argument in SHORT:
                key, data = int, np.array([argument], np.int32)
            elif argument.__class__ is torch.Tensor:
                key, data = argument.dtype, np.array([argument.data_ptr()], np.uint64)
            else:
                return original(argument)
            if key not in types:
                types[key] = original(argument).dtype
            return self.language.make_tensor(data, types[key], ())

        return implicit_cvt

    def wrap_equal(self, original: Any) -> Any:
        plain = self.tl.core.dtype

        def equal(dtype: Any, other: Any) -> bool:
            if dtype is other:
                return True
            return bool(dtype.name == other.name if other.__class__ is plain else original(dtype, other))

        return equal

    def wrap_patch_builtin(self, original: Any) -> Any:
        """Remembers which members of a package are built in, instead of looking at all before each launch."""
        names: dict[int, list[str]] = {}

        def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
            is_builtin = self.tl.core.is_builtin
            if id(package) not in names:
                names[id(package)] = [name for name, _ in inspect.getmembers(package, is_builtin)]
            for name in names[id(package)]:
                member = getattr(package, name)
                if is_builtin(member):  # not replaced already, for another module
                    self.interpreter._patch_attr(package, name, member, builder, scope)

        return patch_builtin

    def wrap_block_type(self, original: Any) -> Any:
        """Makes the fields of equal type objects once, into which most of the interpreter's time goes."""
        made: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

        def init(block: Any, element_ty: Any, shape: Any) -> None:
            key = (element_ty.name, tuple(getattr(size, "value", size) for size in shape))
            if key not in made:
                original(block, element_ty, shape)
                made[key] = {**vars(block)}
            vars(block).update(made[key], element_ty=element_ty)

        return init

    def wrap_tensor(self, original: Any) -> Any:
        made: dict[tuple[int, ...], tuple[Any, Any]] = {}

        def init(tensor: Any, handle: Any, type: Any) -> None:
            key = tuple(type.shape) if type.is_block() else ()
            if key not in made:
                original(tensor, handle, type)
                made[key] = tensor.shape, tensor.numel
            tensor.shape, tensor.numel = made[key]
            tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar

        return init

    def patch_lang_once(self, function: Any) -> Any:
        """Swaps in the interpreted language functions once per module and launch, not once per call."""
        empty = self.interpreter._LangPatchScope()
        if id(function.__globals__) in self.patched_globals:
            return empty
        is_first = not self.patched_globals
        self.patched_globals.add(id(function.__globals__))
        scope = self.patch_lang(function)
        if is_first:
            for name, method in [*self.language.methods()]:
                scope.set_attr(self.tl.core.tensor, name, method)
            for name, short in [*self.language.functions()]:
                scope.set_attr(self.tl, name, short)
        scope.set_attr(self.tl.core.tensor, "__index__", lambda tensor: int(tensor.handle.data.item()))
        for place in (_Namespace(function.__globals__), self.tl):
            scope.set_attr(place, "range", self.counters)
        for module in function.__globals__.values():
            if getattr(module, "__name__", "").endswith(".libdevice"):
                for name, compute in _LIBDEVICE.items():
                    if hasattr(module, name):
                        scope.set_attr(module, name, self.elementwise(compute))
        self.scopes.append(scope)
        return empty

    def counters(self, *ends: Any, **_: Any) -> Iterator[Any]:
        """Yields `range` and `tl.range` with counters as those of a compiled kernel, of 32 bits and not
        Python's.
        """
        for counter in range(*ends):
            yield self.tl.tensor(self.handle(np.array([counter]), self.tl.int32), self.tl.int32)

    def elementwise(self, compute: Callable[..., Array]) -> Callable[..., Any]:
        def apply(*args: Any, **_: Any) -> Any:
            result = compute(*(arg.handle.data for arg in args))
            return self.tl.tensor(self.handle(result, args[0].dtype), args[0].type)

        return apply


def lanes(mask: Any) -> Array:
    """Returns which lanes a load or a store has, given a handle or, where all of them take part, an array."""
    return mask if isinstance(mask, np.ndarray) else mask.data  # an array has `data`, too: its bytes


def f32_to_tf32(values: Array) -> Array:
    """Returns float32 values with the 13 low bits of the significand cleared, which is what the tensor core
    reads.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    cleared = (bits & np.uint32(0xFFFFE000)).view(np.float32).reshape(values.shape)
    return np.where(np.isnan(values), values, cleared)
