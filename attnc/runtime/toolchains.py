"""What compiles the kernels of each family of targets: versions, registers and spills for a device that need
not be there, machine code ahead of time. A new toolchain is added to `_TOOLCHAINS`.

Triton and the ptxas in its wheel need no device; cuobjdump, beside it, lists registers, local memory (spills)
and static shared memory of a cubin. CUDA C++ goes through `nvrtc`.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from attnc.model.dtypes import DType
from attnc.model.schedule import BackwardConfig, DkDvConfig, ForwardConfig
from attnc.plan import ir
from attnc.plan.device import Device
from attnc.plan.fitting import keys_of_split
from attnc.plan.ir import Module, split_of
from attnc.plan.layout import Which
from attnc.plan.signature import block, feature
from attnc.plan.targets import target_of
from attnc.plan.triton.resources import unreadable
from attnc.runtime.loader import load_file, load_files, load_module, program_of
from attnc.runtime.nvrtc import compile_cubin, compile_ptx
from attnc.support.cache import own_folder, seal_bytes
from attnc.target.triton.kernel import MATRICES


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one block of a compiled kernel takes: registers of a thread, bytes of stack (spills) and shared
    memory.
    """

    registers: int
    stack: int
    shared: int


class Toolchain(ABC):
    """package: the library that generated modules import besides torch."""

    package: ClassVar[str]

    @abstractmethod
    def version(self) -> str:
        """Returns the name and version of the compiler on this machine, as in tuned files."""

    @abstractmethod
    def usage(self, module: Module, kernel: Which, position: int, device: Device) -> Usage | None:
        """Compiles a kernel of a planned module at one of its configs for a device, which need not be there;
        None where nothing reads machine code. Raises what the compiler raises.
        """

    @abstractmethod
    def lower(self, module: Module, kernel: Which, position: int, device: Device) -> None:
        """Compiles as far as the compiler's front end goes, which is quick: it sees names that nothing
        declares and types that do not go together, and knows nothing of registers. Raises what it raises.
        """


# --- Triton -------------------------------------------------------------------------------------------------


_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def tool(name: str) -> Path | None:
    """Returns a program of the CUDA toolkit that ships in Triton's wheel, e.g. "cuobjdump"; None if it is not
    there.
    """
    found = importlib.util.find_spec("triton")
    if found is None or not found.origin:
        return None
    path = Path(found.origin).parent / "backends" / "nvidia" / "bin" / name
    return path if path.is_file() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonKernel:
    """A `triton.jit` function as it is compiled for a GPU that need not be there, of e.g. capability 90.

    signature: Triton's type of every argument ("*bf16", "i32", "constexpr"); constants: the values of those
    that are constexpr. aligned: tensors, and strides by their names, are taken for multiples of 16.
    """

    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    capability: int
    warps: int
    stages: int
    maxnreg: int | None = None
    aligned: bool = True

    @property
    def options(self) -> dict[str, object]:
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.maxnreg}

    def compile(self) -> Usage | None:
        """Compiles to machine code; None where cuobjdump is missing. Raises what Triton's compiler raises."""
        compiled = self._compile()
        usage = read_usage(compiled.asm["cubin"])
        if usage is None:
            return None
        return Usage(registers=usage.registers, stack=usage.stack, shared=int(compiled.metadata.shared))

    def cubin(self) -> bytes:
        """Returns the machine code. Raises what Triton's compiler raises."""
        image: bytes = self._compile().asm["cubin"]
        return image

    def _compile(self) -> Any:
        import triton
        from triton.backends.compiler import GPUTarget

        target = GPUTarget("cuda", self.capability, 32)
        return triton.compile(self._source(), target=target, options=self.options)

    def lower(self) -> dict[str, str]:
        """Returns the kernel in Triton's own forms, before LLVM's, by their names. Raises what Triton's
        compiler raises.
        """
        from triton._C.libtriton import ir
        from triton.backends.compiler import GPUTarget, Language
        from triton.compiler import make_backend

        target = GPUTarget("cuda", self.capability, 32)
        backend = make_backend(target)
        options = backend.parse_options(self.options)
        stages: dict[str, Any] = {}
        backend.add_stages(stages, options, Language.TRITON)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        lowered = self._source().make_ir(target, options, functions, modules, context)
        metadata: dict[str, Any] = {}
        texts = {}
        for form in ("ttir", "ttgir"):
            lowered = stages[form](lowered, metadata)
            texts[form] = str(lowered)
        return texts

    def _source(self) -> Any:
        from triton.compiler import ASTSource

        position = self.function.arg_names.index
        divisible = {
            (i,): [["tt.divisibility", 16]]
            for i, (name, kind) in enumerate(self.signature.items())
            if self.aligned and (kind.startswith("*") or name.startswith("stride_"))
        }
        return ASTSource(
            fn=self.function,
            signature=dict(self.signature),
            constexprs={(position(name),): value for name, value in self.constants.items()},
            attrs=divisible,
        )


def read_usage(cubin: bytes) -> Usage | None:
    """Returns the resources of the first kernel in a cubin, as cuobjdump says; None if cuobjdump is
    missing.
    """
    program = tool("cuobjdump")
    if program is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin", dir=own_folder()) as file:
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
    package = "triton"

    def version(self) -> str:
        import triton

        return f"triton {triton.__version__}"

    def usage(self, module: ir.Module, kernel: Which, position: int, device: Device) -> Usage | None:
        return triton_kernel(module, kernel, position, device).compile()

    def lower(self, module: ir.Module, kernel: Which, position: int, device: Device) -> None:
        triton_kernel(module, kernel, position, device).lower()


def triton_kernel(
    module: ir.Module, kernel: Which, position: int, device: Device, *, aligned: bool = True
) -> TritonKernel:
    """Returns a kernel of a planned module at one of its configs, for aligned tensors or others. ValueError
    for a device that cannot read its keys.
    """
    if because := unreadable(module.variant.attention, device):
        raise ValueError(because)
    planned = module.kernels[kernel]
    config = planned.configs[position]
    constants: dict[str, object] = {
        "BLOCK_M": config.tile_q,
        "BLOCK_N": config.tile_kv,
        "TMA": planned.tma and device.has_tma and aligned,
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
    loaded = load_module(module)
    function = getattr(loaded, planned.name)
    made = () if module.backward is None else loaded.CALL.backward.made
    elements = {f"{one.name}_ptr": one.type.partition("[")[0] for one in made if one.name.startswith("_")}
    seen = module if kernel == "forward" else module.differentiated
    signature = {
        name: f"*{DType(elements[name]).facts.triton}"
        if name in elements
        else _type_of(name, seen, constants)
        for name in function.arg_names
    }
    return TritonKernel(
        function=function,
        signature=signature,
        constants={name: value for name, value in constants.items() if name in signature},
        capability=device.capability,
        warps=config.warps,
        stages=config.stages,
        maxnreg=limit,
        aligned=aligned,
    )


def _type_of(name: str, module: ir.Module, constants: Mapping[str, object]) -> str:
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
    element = DType(tensor.dtype).facts.triton
    if name not in matrices or not constants["TMA"]:
        return f"*{element}"
    rows = constants["BLOCK_M" if tensor.name in ("q", "o") else "BLOCK_N"]
    return f"tensordesc<{element}[1, 1, {rows}, {block(feature(tensor))}]>"


# --- NVRTC --------------------------------------------------------------------------------------------------


class Nvrtc(Toolchain):
    package = "cupy"

    def version(self) -> str:
        from cupy.cuda import nvrtc

        major, minor = nvrtc.getVersion()
        return f"nvrtc {major}.{minor}"

    def usage(self, module: ir.Module, kernel: Which, position: int, device: Device) -> Usage:
        planned, program = module.kernels[kernel], program_of(load_module(module))
        options = program.options(program.kernels[planned.name].configs[position], True, device.arch)
        cubin = compile_cubin(program.source(planned.name), options)
        shared = planned.shared[position]
        assert isinstance(shared, int), "a layout of our own is the same on all devices"
        return Usage(registers=cubin.registers, stack=cubin.stack, shared=shared)

    def lower(self, module: ir.Module, kernel: Which, position: int, device: Device) -> None:
        """Compiles a kernel to PTX, without ptxas, at the first config for rows that are not of 16 bytes too;
        beside the forward kernel those that its plan does not name.
        """
        planned, program = module.kernels[kernel], program_of(load_module(module))
        known = {planned.name for planned in module.kernels.values()}
        chosen = [(planned.name, program.kernels[planned.name].configs[position])]
        if kernel == "forward" and position == 0:
            chosen += [
                (name, program.kernels[name].configs[0]) for name in program.kernels if name not in known
            ]
        for name, config in chosen:
            for aligned in (True, False)[: 1 + (position == 0)]:
                compile_ptx(program.source(name), program.options(config, aligned, device.arch))


def build_cubins(
    module: Path, archs: Iterable[str], files: Mapping[str, str] | None = None
) -> dict[str, bytes]:
    """Compiles every config of a generated CUDA module (its `.py` file) for e.g. "sm_90"; returns what goes
    into `cubin/` beside it, by name.

    files: the texts of the module and of its `.cu` files by name, so that no file is read that another
    process may have changed. Rows that are not 16-byte aligned get a kernel of their own. Raises
    CompilationError, and FileNotFoundError without NVRTC.
    """
    program: Any = program_of(load_file(module) if files is None else load_files(files))
    made = {}
    for arch in archs:
        for name, kernel in program.kernels.items():
            for config in dict.fromkeys(kernel.configs):
                for aligned in (True, False):
                    file = program.cubin_name(name, config, aligned, arch)
                    options = program.options(config, aligned, arch)
                    made[file] = seal_bytes(file, compile_cubin(program.source(name), options).image)
    return made


# --- by the family of a target ------------------------------------------------------------------------------


_TOOLCHAINS: Mapping[str, Toolchain] = {"triton": TritonCompiler(), "sm80": Nvrtc(), "sm90": Nvrtc()}


def toolchain_of(target: str) -> Toolchain:
    """Returns the toolchain that compiles the kernels of a target of this name."""
    return _TOOLCHAINS[target_of(target).family]


def usage_of(module: Module, position: int, device: Device, kernel: Which = "forward") -> Usage | None:
    """Compiles a kernel of a planned module at one of its configs for a device; None without cuobjdump."""
    return toolchain_of(module.target).usage(module, kernel, position, device)
