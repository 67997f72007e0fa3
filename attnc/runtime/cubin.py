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

from attnc.model.schedule import BackwardConfig
from attnc.model.tensors import DType
from attnc.plan import ir
from attnc.plan.columns import block, feature
from attnc.plan.decode import keys_of_split
from attnc.plan.device import Device
from attnc.plan.ir import kernels_of
from attnc.plan.layout import Which
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
    from triton.compiler import ASTSource

    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.startswith("stride_")
    }
    source = ASTSource(
        fn=kernel,
        signature=dict(signature),
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs=divisible,
    )
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": maxnreg}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = read_usage(compiled.asm["cubin"])
    if usage is None:
        return None
    return Usage(registers=usage.registers, stack=usage.stack, shared=int(compiled.metadata.shared))


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
        if kernel == "forward":
            forward = module.kernels[0]
            split = ir.split_of(forward)
            split_size = 0 if split is None else keys_of_split(forward.configs[position])
            constants = {"SPLIT": split is not None, "PDL": device.has_tma, "SPLIT_SIZE": split_size}
            return _usage(module, forward, position, device, constants)
        planned = kernels_of(module)[kernel]
        early = getattr(planned.configs[position], "dp", "early") == "early"
        return _usage(module, planned, position, device, {"dlse_ptr": None, "EARLY_DP": early})


def _usage(
    module: ir.Module, kernel: ir.Kernel, position: int, device: Device, more: Mapping[str, Any]
) -> Usage | None:
    """Of a kernel; more: constants besides its tiles, those that it takes."""
    config = kernel.configs[position]
    limit = config.maxnreg if isinstance(config, BackwardConfig) else None
    function = getattr(load_module(module), kernel.name)
    constants = {
        "BLOCK_M": config.tile_q,
        "BLOCK_N": config.tile_kv,
        "TMA": kernel.tma and device.has_tma,
        **more,
    }
    signature = {name: _type_of(name, module, constants) for name in function.arg_names}
    return compile_offline(
        function,
        signature,
        {name: value for name, value in constants.items() if name in signature},
        device.capability,
        config.warps,
        config.stages,
        limit if isinstance(limit, int) else None,
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
