"""Compiling a generated Triton kernel for a GPU that is not there, and reading what it takes from the binary.

Triton and the ptxas in its wheel need no device; cuobjdump, beside it, lists registers, local memory (spills)
and static shared memory of a cubin.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnc.model.schedule import BackwardConfig, DkDvConfig, ForwardConfig
from attnc.model.tensors import DType
from attnc.plan import ir
from attnc.plan.decode import keys_of_split
from attnc.plan.device import Device
from attnc.plan.ir import split_of
from attnc.plan.layout import Which
from attnc.plan.signature import block, feature
from attnc.runtime.loader import load_module
from attnc.runtime.toolchain import Toolchain, Usage
from attnc.target.triton.kernel import MATRICES

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def tool(name: str) -> Path | None:
    """A program of the CUDA toolkit that ships in Triton's wheel, e.g. "cuobjdump"; None if it is not
    there.
    """
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return path if path.is_file() else None


def compile_offline(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, object],
    capability: int,
    warps: int,
    stages: int,
    maxnreg: int | None = None,
) -> Usage | None:
    """Compiles a `triton.jit` function for e.g. capability 90; None where cuobjdump is missing.

    signature: Triton's type of every argument ("*bf16", "i32", "constexpr"). Raises what Triton's compiler
    raises.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": warps, "num_stages": stages, "maxnreg": maxnreg}
    source = _source(kernel, signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = read_usage(compiled.asm["cubin"])
    if usage is None:
        return None
    return Usage(registers=usage.registers, stack=usage.stack, shared=int(compiled.metadata.shared))


def lower_offline(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, object],
    capability: int,
    warps: int,
    stages: int,
    maxnreg: int | None = None,
) -> None:
    """Takes a `triton.jit` function as far as Triton's own forms go, before LLVM's; raises what it raises."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget, Language
    from triton.compiler import make_backend

    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    options = backend.parse_options({"num_warps": warps, "num_stages": stages, "maxnreg": maxnreg})
    stages_of: dict[str, Any] = {}
    backend.add_stages(stages_of, options, Language.TRITON)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    lowered = _source(kernel, signature, constants).make_ir(target, options, functions, modules, context)
    metadata: dict[str, Any] = {}
    for form in ("ttir", "ttgir"):
        lowered = stages_of[form](lowered, metadata)


def _source(kernel: Any, signature: Mapping[str, str], constants: Mapping[str, object]) -> Any:
    """A function at these types and constants, of tensors and strides of multiples of 16."""
    from triton.compiler import ASTSource

    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.startswith("stride_")
    }
    return ASTSource(
        fn=kernel,
        signature=dict(signature),
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs=divisible,
    )


def read_usage(cubin: bytes) -> Usage | None:
    """What cuobjdump says of the first kernel in a cubin; None where cuobjdump is missing."""
    program = tool("cuobjdump")
    if program is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(program), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = _USAGE.search(text)
    if found is None:
        return None
    registers, stack, shared, local = map(int, found.groups())
    return Usage(registers=registers, stack=max(stack, local), shared=shared)


class TritonCompiler(Toolchain):
    """Triton and the ptxas in its wheel."""

    package = "triton"

    def version(self) -> str:
        import triton

        return f"triton {triton.__version__}"

    def usage(self, module: ir.Module, kernel: Which, position: int, device: Device) -> Usage | None:
        """Backward kernels are launched without a gradient of lse."""
        return compile_offline(*_at(module, kernel, position, device))

    def lower(self, module: ir.Module, kernel: Which, position: int, device: Device) -> None:
        """As `usage`, up to the forms of Triton itself."""
        lower_offline(*_at(module, kernel, position, device))


def _at(
    module: ir.Module, kernel: Which, position: int, device: Device
) -> tuple[Any, dict[str, str], dict[str, object], int, int, int, int | None]:
    """What `compile_offline` takes of a kernel of a planned module, at one of its configs."""
    planned = module.kernels[kernel]
    config = planned.configs[position]
    constants: dict[str, object] = {
        "BLOCK_M": config.tile_q,
        "BLOCK_N": config.tile_kv,
        "TMA": planned.tma and device.has_tma,
    }
    limit: int | None = None
    match config:
        case ForwardConfig():
            split = split_of(planned)
            split_size = 0 if split is None else keys_of_split(config)
            constants |= {"SPLIT": split is not None, "PDL": device.has_tma, "SPLIT_SIZE": split_size}
        case BackwardConfig(maxnreg=limit):
            early = not isinstance(config, DkDvConfig) or config.dp == "early"
            constants |= {"dlse_ptr": None, "EARLY_DP": early}
    function = getattr(load_module(module), planned.name)
    signature = {name: _type_of(name, module, constants) for name in function.arg_names}
    return (
        function,
        signature,
        {name: value for name, value in constants.items() if name in signature},
        device.capability,
        config.warps,
        config.stages,
        limit,
    )


def _type_of(name: str, module: ir.Module, constants: Mapping[str, object]) -> str:
    """Triton's type of a kernel argument by its name: matrices and x_ptr are tensors, the rest 32-bit
    integers.
    """
    if name in constants:
        return "constexpr"
    matrices = {spelled: tensor for tensor, spelled in MATRICES.items()}
    matrices |= {f"D{spelled}": tensor for spelled, tensor in matrices.items()}
    if name in ("LSE2", "DELTA"):
        return f"tensordesc<fp32[1, {constants['BLOCK_M']}]>" if constants["TMA"] else "*fp32"
    if name not in matrices and not name.endswith("_ptr"):
        return "i32"
    tensors = {arg.tensor.name: arg.tensor for arg in (*module.args, *module.outputs)}
    tensor = tensors.get(matrices.get(name, name.removesuffix("_ptr")))
    if tensor is None:
        return "*fp32"
    element = _TYPES[DType(tensor.dtype)]
    if name not in matrices or not constants["TMA"]:
        return f"*{element}"
    rows = constants["BLOCK_M" if tensor.name in ("q", "o") else "BLOCK_N"]
    return f"tensordesc<{element}[1, 1, {rows}, {block(feature(tensor))}]>"


_TYPES = {
    DType.F16: "fp16",
    DType.BF16: "bf16",
    DType.F32: "fp32",
    DType.I32: "i32",
    DType.I64: "i64",
    DType.BOOL: "i1",
}
