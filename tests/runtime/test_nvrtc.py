"""Every committed CUDA kernel compiles, without a GPU, and takes what its plan says.

By day those whose text no GPU has run yet, and one in 24 of the others, which compiled before they ran.
"""

from __future__ import annotations

from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from attnc.build import plan_program
from attnc.model.resolve import resolve
from attnc.output import write_folder
from attnc.plan import ir
from attnc.plan.device import DEVICES
from attnc.plan.sm90.backward import CONSUMER_REGISTERS, Sm90Backward
from attnc.plan.sm90.decode_layout import Sm90DecodeLayout
from attnc.plan.sm90.layout import Sm90Layout, entry_registers
from attnc.plan.sm90.warps import Sm90WarpsLayout
from attnc.runtime.cubin import disassemble
from attnc.runtime.loader import load_file, program_of
from attnc.runtime.nvrtc import CompilationError, Cubin, compile_cubin, compile_ptx, nvrtc_version
from attnc.runtime.toolchains import build_cubins, usage_of
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from attnc.target.files import render_files
from attnc.verify.record import list_lapsed, read
from tests.by_day import each_by_day
from tests.compiled import compile_configs
from tests.plans import plans_of
from tests.profiles import is_night
from tests.sass import loops
from tests.verify.judging import modules_of, spec

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "generated"
#: One in so many modules compiles by day, whatever its record.
BY_DAY = 24
MODULES = sorted(path for path in GENERATED.glob("*/cuda_*/*.py") if path.name != "__init__.py")
#: Bytes that a thread may spill: 128 x 64 tiles of 4 warps fill all registers, and are fastest at D = 128.
NEGLIGIBLE = 128
#: The same of gradients whose mask has groups of candidates, where what is spilt is of tiles that the mask
#: divides; and of packed gradients, whose scheduler has 24 registers to find the longest walk with.
OF_MODULES = {
    "hstu-d64_group4": 136,
    "hstu-d128_group4": 136,
    "packed_training-default": 240,
    "mla_packed-d576_dv512": 240,
}
#: ptxas puts a wait of its own in front of products of kernels in which pieces of dS follow each other: no
#: registers are left to keep them apart (C7519); and once before the loop where sums of latents of 8 bits are
#: two products each, and begin as zeros.
INJECTED = {
    *("wide_backward_dq", "wide_backward_dk", "kv8_latent_forward", "latent_blocks_forward"),
    *("latent_types_forward", "selected_rows_forward", "selected_types_forward"),
}


def is_known(said: str) -> bool:
    """Whether ptxas says so of a kernel of which it is known: it names the function, of all in a file."""
    return "(C7519)" in said and any(f"'{name}'" in said for name in INJECTED)


def name_of(path: Path) -> str:
    return f"{path.parts[-3]}-{path.stem}"


@cache
def unseen() -> list[Path]:
    """Of those left to the night: modules without a record of their text."""
    names = {path.relative_to(GENERATED).as_posix(): path for i, path in enumerate(MODULES) if i % BY_DAY}
    return [names[name] for name in list_lapsed(GENERATED, names, read(GENERATED).verified)]


@cache
def planned() -> dict[tuple[str, str, str], ir.Module]:
    """By attention, target's folder and variant."""
    found = {}
    for path in sorted((ROOT / "specs").glob("*.attn")):
        for module in plans_of(path).modules:
            folder = module.target.replace(".", "_")
            found[module.variant.attention.name, folder, module.variant.name] = module
    return found


def test_there_are_modules() -> None:
    assert len(MODULES) >= 20


def check_forward(path: Path) -> None:
    module = planned()[path.parts[-3], path.parts[-2], path.stem]
    kernel = module.kernel
    assert kernel.layout is not None
    name = f"{module.variant.attention.name}_forward"
    config, cubin = next(compile_configs(path, module.target.removeprefix("cuda."), name))
    assert cubin.image.startswith(b"\x7fELF")
    assert [said for said in cubin.warnings if not is_known(said)] == []
    assert cubin.spills <= OF_MODULES.get(name_of(path), NEGLIGIBLE), cubin.log
    needed = sum(kernel.layout.registers(kernel.configs[0]).values())
    # On Hopper warpgroups share out what the launch gives to each thread.
    if isinstance(kernel.layout, Sm90Layout):
        shape = kernel.layout.shape(kernel.configs[0])
        assert needed <= shape.consumer_registers
        assert cubin.registers == shape.entry_registers
    elif isinstance(kernel.layout, Sm90WarpsLayout):
        assert needed <= cubin.registers <= kernel.layout.entry_registers
    elif isinstance(kernel.layout, Sm90DecodeLayout):
        assert needed <= kernel.layout.consumer_registers
        assert cubin.registers == kernel.layout.entry_registers
    else:
        assert needed <= cubin.registers <= 255
    assert config.shared == kernel.shared[0]


def check_backward(path: Path) -> None:
    module = planned()[path.parts[-3], path.parts[-2], path.stem]
    kernels = program_of(load_file(path)).kernels
    names = {p.name: p for p in module.backward_kernels.values()}
    assert set(names) <= set(kernels)
    for name in list(kernels)[1:]:
        config, cubin = next(compile_configs(path, "sm_80", name))
        assert [said for said in cubin.warnings if not is_known(said)] == []
        assert cubin.spills <= OF_MODULES.get(name_of(path), NEGLIGIBLE), cubin.log
        if name in names:
            assert module.backward is not None
            kernel, layout = names[name], module.backward.layout
            assert layout is not None
            needed = sum(layout.registers(kernel.configs[0], kernel.kind).values())
            if isinstance(layout, Sm90Backward) and kernel.kind in layout.by_wgmma:
                consumers = layout.consumers(kernel.kind)
                assert needed <= CONSUMER_REGISTERS[consumers]
                assert cubin.registers == entry_registers(consumers, 1, layout.blocks(kernel.kind))
            else:
                assert needed <= cubin.registers <= 255
            assert config.shared == kernel.shared[0]


@pytest.mark.one_in(10)
@pytest.mark.slow
@pytest.mark.parametrize("path", each_by_day(MODULES, of=BY_DAY), ids=name_of)
def test_the_default_config_compiles_for_its_architecture(path: Path) -> None:
    check_forward(path)


@pytest.mark.one_in(10)
@pytest.mark.slow
@pytest.mark.parametrize("path", each_by_day(MODULES, of=BY_DAY), ids=name_of)
def test_the_backward_compiles_too(path: Path) -> None:
    check_backward(path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_what_no_gpu_has_run_compiles(part: int) -> None:
    for path in unseen()[part::4]:
        check_forward(path)
        check_backward(path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", each_by_day(["sm_120", "sm_86", "sm_90"], of=3))
def test_newer_architectures_take_the_same_text(arch: str) -> None:
    """By day the first config."""
    every = compile_configs(ROOT / "generated/causal_gqa/cuda_sm_80/bf16_d64.py", arch)
    for _, cubin in islice(every, None if is_night() else 1):
        assert cubin.spills <= 64
        assert cubin.warnings == ()


def test_the_log_is_read() -> None:
    source = 'extern "C" __global__ void f(float* x) { x[threadIdx.x] *= 2.0f; }'
    cubin = compile_cubin(source, ["-arch=sm_80"])
    assert 0 < cubin.registers < 64
    assert (cubin.spills, cubin.stack, cubin.warnings) == (0, 0, ())
    assert compile_cubin(source, ["-arch=sm_80"]) == cubin
    assert nvrtc_version().startswith(("12.", "13."))


@pytest.mark.parametrize(
    "line",
    [
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized",
        'kernel.cu(3): warning #177-D: variable "x" was declared but never referenced',
        "ptxas warning : Local memory used for function 'f', size of stack frame: 8 bytes",
    ],
)
def test_what_the_compiler_disapproves_of_is_noticed(line: str) -> None:
    log = f"ptxas info    : Compiling entry function 'f'\n{line}\nptxas info    : Used 8 registers\n"
    assert Cubin(image=b"", log=log).warnings == (line,)


def test_registers_are_limited_where_a_schedule_says_so(tmp_path: Path) -> None:
    text = """attention a {
  input q: f16[B, M, H, 64]
  input k, v: f16[B, N, H, 64]
  score = dot(q, k)
  normalize = softmax
  output o: f16[B, M, H, 64]
  grad q, k, v
}
schedule a for cuda.sm_80 {
  backward {
    dkdv {
      tile.q = 64, tile.kv = 64, maxnreg in {128, none}
    }
  }
}
"""
    (module,) = plan_program(resolve(parse(Source("a.attn", text)), prelude())).modules
    for name, content in render_files(module, path="a.attn", sha256="").items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    found = list(compile_configs(tmp_path / "default.py", "sm_80", "a_backward_dkdv"))
    assert [config.maxnreg for config, _ in found] == [128, 0]
    assert found[0][1].registers <= 128 < found[1][1].registers


def test_what_does_not_compile_is_an_error_with_the_log() -> None:
    with pytest.raises(CompilationError, match="undefined_name"):
        compile_cubin('extern "C" __global__ void f() { undefined_name(); }', ["-arch=sm_80"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "module", each_by_day(["fa1/cuda_sm_80/bf16_d64.py", "dropout/cuda_sm_90a/d64.py"], of=2)
)
def test_ahead_of_time_cubins_are_what_the_module_looks_for(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of modules with gradients and few configs."""
    path = ROOT / "generated" / module
    for original in path.parent.glob("*d64*"):
        (tmp_path / original.name).write_text(original.read_text(encoding="utf-8"), encoding="utf-8")
    made = build_cubins(tmp_path / path.name, ["sm_90"])
    write_folder(made, "cubin", tmp_path, beside=True)
    program = program_of(load_file(tmp_path / path.name))
    monkeypatch.setattr(program, "compile", None)  # nothing is compiled any more
    wanted = [(name, config) for name, kernel in program.kernels.items() for config in set(kernel.configs)]
    found = {program.cubin(*each, aligned, "sm_90") for each in wanted for aligned in (True, False)}
    assert found == {tmp_path / "cubin" / name for name in made}
    assert all(path.read_bytes().startswith(b"\x7fELF") for path in found)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dv", "schedule", "drops"),
    each_by_day(
        [
            (256, "tile.kv = 64", True),
            (16, "consumers = 2, tile.kv = 160, overlap = false", True),
            (160, "consumers = 3, tile.kv = 32", True),
            (112, "consumers = 4, tile.kv = 32, overlap = false", True),
            (16, "consumers = 3, tile.kv = 192, overlap = false", False),
            (16, "consumers = 4, tile.kv = 128, overlap = false", False),
        ],
        of=6,
    ),
)
def test_the_widest_products_fit_the_registers_of_a_launch(dv: int, schedule: str, drops: bool) -> None:
    lines = [
        "input q: bf16[B, M, H, 16]",
        "input k: bf16[B, N, H, 16]",
        f"input v: bf16[B, N, H, {dv}]",
        "input p: f32[]",
        "input seed: i64[]",
        "score = dot(q, k)",
        f"normalize = softmax{'(dropout = p, seed = seed)' if drops else ''}",
        f"output o: bf16[B, M, H, {dv}]",
    ]
    (module,) = modules_of(spec(lines, schedule, target="cuda.sm_90a"))
    assert usage_of(module, 0, DEVICES["sm_90"]) is not None


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "dv", "keys", "in_k"),
    [(256, 256, 64, False), (16, 208, 32, False), (64, 64, 192, False), (320, 256, 64, True)],
)
def test_the_same_of_decoding(d: int, dv: int, keys: int, in_k: bool) -> None:
    lines = [
        f"input q: bf16[B, M, G, {d}]",
        f"input k: bf16[B, N, 1, {d}]",
        f"input v: bf16[B, N, 1, {dv}]{' via prefix(k)' if in_k else ''}",
        "score = dot(q, k)",
        "normalize = softmax",
        f"output o: bf16[B, M, G, {dv}]",
    ]
    schedule = f"loops = [kv], pack = gqa, tile.kv = {keys}"
    (module,) = modules_of(spec(lines, schedule, target="cuda.sm_90a"))
    assert usage_of(module, 0, DEVICES["sm_90"]) is not None


PAGED = """attention pages {{
  input q: bf16[B, M, Hkv * G, {d}]
  input k, v: bf16[B, N, Hkv, {d}] via paged(table, page = {page})
  input table: i32[B, P]
  input lens: i32[B]
  length N = lens[b]
  {more}
  normalize = softmax
  output o: bf16[B, M, Hkv * G, {d}]
}}
schedule pages for cuda.sm_90a {{
  {schedule}
}}
"""
LATENT = """attention pages {{
  input q: bf16[B, M, G, {d} + 64]
  input k: bf16[B, N, 1, {d} + 64] via paged(table, page = {page})
  input v: bf16[B, N, 1, {d}] via prefix(k)
  input table: i32[B, P]
  input lens: i32[B]
  length N = lens[b]
  {more}
  normalize = softmax
  output o: bf16[B, M, G, {d}]
}}
schedule pages for cuda.sm_90a {{
  {schedule}
}}
"""
CAUSAL, KEYS = (
    "score = dot(q, k) / 16\n  mask = causal",
    "input x: f32[B, N]\n  score = dot(q, k) + x[b, kv_idx]",
)
LAZY, DECODE = "softmax = online(maximum = lazy(20))", "loops = [kv], pack = gqa, split.kv = auto"


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "d", "page", "more", "schedule"),
    each_by_day(
        [
            (PAGED, 64, 1, KEYS, LAZY),
            (PAGED, 128, 4, CAUSAL, LAZY),
            (PAGED, 256, 20, CAUSAL, LAZY),
            (PAGED, 128, 1, KEYS, f"consumers = 3, tile.kv = 64, {LAZY}"),
            (PAGED, 128, 1, CAUSAL, DECODE),
            (PAGED, 256, 20, KEYS, DECODE),
            (LATENT, 512, 1, CAUSAL, DECODE),
            (LATENT, 512, 4, CAUSAL, DECODE),
            (PAGED, 72, 4, CAUSAL, LAZY),
            (PAGED, 40, 1, CAUSAL, DECODE),
            (LATENT.replace("{d} + 64", "264"), 256, 1, CAUSAL, f"{DECODE}, consumers = 2"),
        ],
        of=10,
    ),
)
def test_who_copies_rows_has_the_registers_for_it(
    text: str, d: int, page: int, more: str, schedule: str, tmp_path: Path
) -> None:
    """Nothing is spilled, and no product waits for another."""
    text = text.format(d=d, page=page, more=more, schedule=schedule).replace("512 + 64", "576")
    (module,) = modules_of(text)
    for name, content in render_files(module, path="a.attn", sha256="").items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    for _, cubin in compile_configs(tmp_path / "default.py", "sm_90a"):
        assert (cubin.spills, cubin.warnings) == (0, ()), cubin.log


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "dv", "way"),
    each_by_day(
        [(40, 40, "atomic"), (136, 200, "two_pass"), (72, 40, "two_pass"), (72, 72, "ordered")], of=4
    ),
)
def test_rows_narrower_than_products_leave_no_remark(d: int, dv: int, way: str, tmp_path: Path) -> None:
    """Nobody that multiplies spills, no product waits for another, and no constant is left unused."""
    lines = [
        f"input q: bf16[B, M, H, {d}]",
        f"input k: bf16[B, N, H, {d}]",
        f"input v: bf16[B, N, H, {dv}]",
        f"score = dot(q, k) / sqrt({d})",
        "mask = causal",
        "normalize = softmax",
        f"output o: bf16[B, M, H, {dv}]",
        "grad q, k, v",
    ]
    (module,) = modules_of(
        spec(lines, f"{LAZY}\n  backward {{ accumulate.dq = {way} }}", target="cuda.sm_90a")
    )
    for name, content in render_files(module, path="a.attn", sha256="").items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    path = tmp_path / "default.py"
    for number, name in enumerate(program_of(load_file(path)).kernels):
        copied = NEGLIGIBLE if number or max(d, dv) > 128 else 0  # by who copies, of 24 registers
        for _, cubin in compile_configs(path, "sm_90a", name):
            assert cubin.warnings == (), cubin.log
            assert cubin.spills <= copied, cubin.log


def test_a_front_end_alone_sees_names_that_nothing_declares() -> None:
    source = 'extern "C" __global__ void f(float* x) { x[threadIdx.x] *= 2.0f; }'
    assert ".entry f" in compile_ptx(source, ["-arch=sm_80"])
    with pytest.raises(CompilationError, match="undefined_name"):
        compile_ptx(source.replace("2.0f", "undefined_name"), ["-arch=sm_90a"])


def test_the_kernels_of_a_cuda_backward_tell_what_they_take() -> None:
    """By day the first of them."""
    module = planned()["alibi", "cuda_sm_80", "d64"]
    for name, kernel in islice(module.backward_kernels.items(), None if is_night() else 1):
        usage = usage_of(module, 0, DEVICES["sm_90"], name)
        assert usage is not None
        assert 32 < usage.registers <= 255
        assert usage.shared == kernel.shared[0]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "tiles"),
    each_by_day(
        [
            (64, "consumers = 3, tile.kv = 128, stages = 3"),
            (128, "consumers = 2, tile.kv = 128, stages = 2"),
            (128, "consumers = 3, tile.kv = 64, stages = 4, overlap = false"),
            (256, "consumers = 2, tile.kv = 80, stages = 2"),
        ],
        of=4,
    ),
)
def test_blocks_that_share_tiles_spill_nothing_and_wait_for_no_memory(
    d: int, tiles: str, tmp_path: Path
) -> None:
    lines = [
        f"input q: bf16[B, M, Hkv * 4, {d}]",
        f"input k, v: bf16[B, N, Hkv, {d}]",
        f"score = dot(q, k) / sqrt({d})",
        "mask = causal",
        "normalize = softmax",
        f"output o: bf16[B, M, Hkv * 4, {d}]",
    ]
    more = "softmax = online(maximum = lazy(20)), order = longest_first, cluster in {2, 1}"
    (module,) = modules_of(spec(lines, f"{tiles}, {more}", target="cuda.sm_90a"))
    for name, text in render_files(module, path="a.attn", sha256="").items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for config, cubin in compile_configs(tmp_path / "default.py", "sm_90"):
        # of 24 registers, who finds tiles spills some, as without clusters
        assert (cubin.spills <= (NEGLIGIBLE if d > 128 else 0), cubin.warnings) == (True, ())
        text = disassemble(cubin.image) or ""
        assert not any(loop.local for loop in loops(text))
        # only where blocks meet: an arrival in the loop that waited for memory would be as many more
        assert text.count("MEMBAR.ALL.GPU") <= 2, config
