"""Compiling for a GPU that is not there."""

import json
import re
from itertools import product
from pathlib import Path

import pytest

from attnc.build import front, plan_program
from attnc.plan.device import DEVICES
from attnc.plan.triton.resources import estimate
from attnc.runtime.toolchains import tool, triton_kernel
from tests.by_day import each_by_day
from tests.plans import SPECS
from tests.processes import compiling
from tests.profiles import is_night
from tests.sass import staying, unwritten
from tests.verify.judging import modules_of, spec

PROGRAM = """
import json, sys
from pathlib import Path
from attnc.build import front, plan_program
from attnc.plan.device import DEVICES
from attnc.runtime.toolchains import usage_of
usage = usage_of(plan_program(front(Path(sys.argv[1]))).modules[0], 0, DEVICES[sys.argv[2]])
print(json.dumps([usage.registers, usage.stack, usage.shared]))
"""


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_kernel_takes_the_shared_memory_that_was_estimated(arch: str) -> None:
    if tool("cuobjdump") is None:
        pytest.skip("no cuobjdump in Triton's wheel")
    module = plan_program(front(SPECS / "causal_gqa.attn")).modules[0]
    run = compiling(PROGRAM, SPECS / "causal_gqa.attn", arch)
    registers, stack, shared = json.loads(run.stdout)
    needs = estimate(module.kernel.configs[0], module.variant, DEVICES[arch])
    assert 0.8 * needs.shared <= shared <= needs.shared
    assert stack < 1024
    assert 32 < registers <= 255


BACKWARD = """
import json, sys
from pathlib import Path
from attnc.build import front, plan_program
from attnc.plan.device import DEVICES
from attnc.runtime.toolchains import usage_of
module = plan_program(front(Path(sys.argv[1]))).modules[int(sys.argv[2])]
usages = {name: usage_of(module, 0, DEVICES["sm_90"], name) for name in module.backward_kernels}
print(json.dumps({name: [u.registers, u.stack, u.shared] for name, u in usages.items()}))
"""


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "variant"),
    each_by_day([("causal_gqa", 2), ("fa1", 0), ("document", 0), ("selected_training", 0)], of=2),
)
def test_a_backward_kernel_takes_the_shared_memory_that_was_estimated(name: str, variant: int) -> None:
    if tool("cuobjdump") is None:
        pytest.skip("no cuobjdump in Triton's wheel")
    module = plan_program(front(SPECS / f"{name}.attn")).modules[variant]
    run = compiling(BACKWARD, SPECS / f"{name}.attn", str(variant))
    for kernel, (registers, stack, shared) in json.loads(run.stdout).items():
        config = module.backward_kernels[kernel].configs[0]
        estimated = estimate(config, module.variant, DEVICES["sm_90"], kernel).shared
        assert 0.8 * estimated <= shared <= estimated
        assert stack < 256
        assert 32 < registers <= 255


UNALIGNED = """
import sys
from attnc.build import plan_program
from attnc.model.resolve import resolve
from attnc.plan.device import DEVICES
from attnc.runtime.cubin import disassemble
from attnc.runtime.toolchains import triton_kernel
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
(module,) = plan_program(resolve(parse(Source("spec.attn", sys.argv[1])), prelude())).modules
for aligned in (False, True):
    print(disassemble(triton_kernel(module, "forward", 0, DEVICES["sm_90"], aligned=aligned).cubin()))
"""
NARROW_VALUES = """
attention narrow {{
  input q: {dtype}[B, M, Hkv * G, {d}]
  input k: {dtype}[B, N, Hkv, {d}]
  input v: {dtype}[B, N, Hkv, {dv}]
  score = dot(q, k) / 8
  mask = causal
  normalize = softmax
  output o: {dtype}[B, M, Hkv * G, {dv}]
}}
schedule narrow for triton {{ loops = [q, kv], tile.q = 64, tile.kv = {keys}, warps = 4, stages = 2 }}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "d", "dv", "keys"),
    [
        ("f16", 72, 8, 64),
        *(
            pytest.param(dtype, d, dv, keys, marks=pytest.mark.nightly)
            for dtype, keys in (("f16", 64), ("bf16", 128), ("f32", 64))
            for d, dv in ((64, 16), (64, 40), (32, 16), (128, 32), (64, 64), (16, 64), (128, 128), (192, 128))
        ),
    ],
)
def test_products_on_hopper_read_no_register_that_nothing_wrote(
    dtype: str, d: int, dv: int, keys: int
) -> None:
    """ptxas 12.8 loses the address of v where its tile is narrower than that of k, of tensors that are not
    aligned (`signature.value_columns`).
    """
    if tool("nvdisasm") is None:
        pytest.skip("no nvdisasm in Triton's wheel")
    text = compiling(UNALIGNED, NARROW_VALUES.format(dtype=dtype, d=d, dv=dv, keys=keys)).stdout
    assert text.count(".text.") >= 2
    assert unwritten(text) == ()


ALIGNED = UNALIGNED.replace("(False, True)", "(True,)").replace('"forward"', "sys.argv[2]")
F32 = """
attention narrow {
  input q: f32[B, M, H, 64]
  input k, v: f32[B, N, H, 64]
  score = dot(q, k) / 8
  mask = causal
  normalize = softmax
  output o: f32[B, M, H, 64]
  grad q, k, v
}
schedule narrow for triton { tile.q = 64, tile.kv = 64, warps = 4, stages = 2 }
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel", ["forward", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("dq", "dkdv"))]
)
def test_no_tile_of_f32_stays_in_registers_on_hopper(kernel: str) -> None:
    """ptxas may give them to another matrix within the loop (`signature.has_descriptors`)."""
    if tool("nvdisasm") is None:
        pytest.skip("no nvdisasm in Triton's wheel")
    text = compiling(ALIGNED, F32, kernel).stdout
    assert "HGMMA" in text
    assert staying(text) == ()


SIZES = """
import json, sys
from attnc.build import plan_program
from attnc.model.resolve import resolve
from attnc.plan.device import DEVICES
from attnc.plan.triton.resources import estimate
from attnc.runtime.toolchains import usage_of
from attnc.source import Source
from attnc.syntax.parser import parse
from attnc.syntax.parser import prelude
found = []
for name, arch, text in json.load(sys.stdin):
    (module,), device = plan_program(resolve(parse(Source(name, text)), prelude())).modules, DEVICES[arch]
    config = module.kernel.configs[0]
    needs = {} if module.backward_kernels else {"forward": (config, usage_of(module, 0, device))}
    for kernel, planned in module.backward_kernels.items():
        needs[kernel] = planned.configs[0], usage_of(module, 0, device, kernel)
    for kernel, (config, usage) in needs.items():
        found.append([name, kernel, estimate(config, module.variant, device, kernel).shared, usage.shared])
print(json.dumps(found))
"""
KIND = """attention sizes {{
  input q: {dtype}[{q}, {d}]{q_via}
  input k: {k_type}[{k}, {d}]{k_via}
  input v: {v_type}[{k}, {dv}]{v_via}
  {inputs}
  score = {score}
  mask = {mask}
  normalize = {form}
  output o: {dtype}[{q}, {dv}]
  {grads}
}}
schedule sizes for triton {{
  {forward}
  {backward}
}}
"""
PLAIN: dict[str, object] = {
    "dtype": "bf16", "d": 64, "dv": 64, "q": "B, M, H", "k": "B, N, H", "q_via": "", "k_via": "", "v_via": "",
    "inputs": "", "score": "dot(q, k) / sqrt(D)", "grads": "", "backward": "",
    "forward": "tile.q = 64, tile.kv = 64, stages = 2", "mask": "causal", "form": "softmax",
}  # fmt: skip
LENGTHS = "input n: i32[B]\n  length N = n[b]"
PAGES: dict[str, object] = {
    "k_via": " via paged(table, page = 16)",
    "v_via": " via paged(table, page = 16)",
    "inputs": f"input table: i32[B, P]\n  {LENGTHS}",
}
BIAS: dict[str, object] = {
    "inputs": "input bias: f32[M, N]",
    "score": "dot(q, k) / sqrt(D) + bias[q_idx, kv_idx]",
}
IN_MEMORY = """backward {{
    accumulate.dq = {}
    dkdv {{ tile.q = {}, tile.kv = {}, stages = 2, warps = {} }}
  }}"""
EIGHT: dict[str, object] = {"k_type": "e5m2", "v_type": "i8"}
GRADS: dict[str, object] = {"grads": "grad q, k, v"}
AS_THEY_COME = "accumulate.dk = atomic, accumulate.dv = atomic"
SELECTED: dict[str, object] = {
    **GRADS, "inputs": "input idx: i32[B, M, S]", "mask": "listed(idx, rows = 1, keys = 1)",
    "q": "B, M, Hkv * G", "k": "B, N, Hkv",
    "forward": "loops = [kv], pack = gqa, tile.q = 16, tile.kv = 32",
}  # fmt: skip
LATENTS: dict[str, object] = {
    "d": 576, "dv": 512, "q": "B, M, G", "k": "B, N, 1", "v_via": " via prefix(k)",
}  # fmt: skip
KINDS: dict[str, dict[str, object]] = {
    "f32, pages, two passes": {
        **PAGES, "dtype": "f32", "d": 128, "dv": 128,
        "forward": "softmax = two_pass, tile.q = 64, tile.kv = 32, stages = 2",
    },
    "f32, sequential dq": {
        **GRADS, "dtype": "f32", "dv": 128, "inputs": LENGTHS, "forward": "tile.q = 64, tile.kv = 32",
        "backward": IN_MEMORY.format("sequential", 32, 32, 4),
    },
    "sequential dq": {**GRADS, "backward": IN_MEMORY.format("sequential", 64, 128, 8)},
    "atomic dq": {**GRADS, "backward": IN_MEMORY.format("atomic", 128, 64, 8)},
    "outside in": {
        "forward": "loops = [kv, q], softmax = online(rescale = every_step), tile.q = 128, tile.kv = 64",
    },
    "bias": {**BIAS, "grads": "grad q, k, v, bias", "forward": "tile.q = 64, tile.kv = 64, stages = 3"},
    "bias and dropout": {
        **GRADS, "inputs": "input bias: f32[M, N]\n  input p: f32[]\n  input seed: i64[]",
        "score": BIAS["score"], "form": "softmax(dropout = p, seed = seed)",
    },
    "persistent": {
        "d": 128, "dv": 128, "mask": "window(64, 0)",
        "forward": "tile.q = 128, tile.kv = 64, stages = 2, warps = 8, persistent = true",
    },
    "pages": PAGES,
    "decode": {
        **PAGES, "q": "B, M, Hkv * G", "k": "B, N, Hkv",
        "forward": "loops = [kv], pack = gqa, tile.q = 16",
    },
    "compressed keys": {
        **PAGES, "d": 576, "dv": 512, "q": "B, M, G", "k": "B, N, 1", "v_via": " via prefix(k)",
        "forward": "loops = [kv], pack = gqa, tile.q = 16, tile.kv = 32, stages = 2",
    },
    "compressed keys, whole": {
        "d": 192, "dv": 128, "v_via": " via prefix(k)", "forward": "tile.q = 64, tile.kv = 64, stages = 2",
    },
    "packed": {
        **GRADS, "q": "T, H", "k": "S, H", "q_via": " via ragged(e)", "k_via": " via ragged(f)",
        "v_via": " via ragged(f)",
        "inputs": "input e, f: i32[B + 1]",
    },
    "sticks, decode": {
        "d": 128, "dv": 128, "q": "B, M, Hkv * G", "k": "B, N, Hkv", "form": "stick_breaking",
        "forward": "loops = [kv], pack = gqa, tile.q = 64, tile.kv = 64, stages = 3",
    },
    "sticks": {
        **GRADS, "d": 128, "dv": 128, "form": "stick_breaking",
        "forward": "tile.q = 128, tile.kv = 64, warps = 8, stages = 2",
    },
    "selected tokens": {
        **SELECTED, "d": 128, "dv": 128,
        "backward": f"backward {{ {AS_THEY_COME}, tile.q = 64, tile.kv = 64, stages = 2, warps = 8 }}",
    },
    "selected tokens, few heads": {
        **SELECTED, "backward": f"backward {{ {AS_THEY_COME}, tile.q = 16, tile.kv = 16, stages = 1 }}",
    },
    "selected latents": {
        **SELECTED, **LATENTS, "grads": "grad q",
        "backward": "backward { tile.q = 64, tile.kv = 32, stages = 1, warps = 8 }",
    },
    "selected latents, few heads": {
        **SELECTED, **LATENTS, "grads": "grad q, k",
        "backward": "backward { accumulate.dk = atomic, tile.q = 16, tile.kv = 32, stages = 2, warps = 4 }",
    },
    "8 bits": {**EIGHT, "forward": "tile.q = 128, tile.kv = 64, stages = 3"},
    "8 bits, wide, one stage": {
        **EIGHT, "d": 128, "dv": 128, "forward": "tile.q = 64, tile.kv = 64, stages = 1",
    },
    "8 bits, v alone": {
        "v_type": "i8", "d": 128, "dv": 128, "forward": "tile.q = 64, tile.kv = 32, stages = 2",
    },
    "8 bits, pages": {**PAGES, **EIGHT},
    "8 bits, decode": {
        **PAGES, **EIGHT, "d": 128, "dv": 128, "q": "B, M, Hkv * G", "k": "B, N, Hkv",
        "forward": "loops = [kv], pack = gqa, tile.q = 16, tile.kv = 64, stages = 3",
    },
    "8 bits, decode, wide values": {
        "k_type": "i8", "v_type": "e5m2", "d": 64, "dv": 256, "q": "B, M, Hkv * G", "k": "B, N, Hkv",
        "forward": "loops = [kv], pack = gqa, tile.q = 16, tile.kv = 64, stages = 2",
    },
    "8 bits, few queries": {**EIGHT, "forward": "tile.q = 32, tile.kv = 64, stages = 3"},
    "8 bits, decode, one stage": {
        **PAGES, **EIGHT, "d": 128, "dv": 128, "q": "B, M, Hkv * G", "k": "B, N, Hkv",
        "forward": "loops = [kv], pack = gqa, tile.q = 16, tile.kv = 64, stages = 1",
    },
    "8 bits, compressed keys": {
        **PAGES, "k_type": "e5m2", "v_type": "e5m2", "d": 576, "dv": 512, "q": "B, M, G", "k": "B, N, 1",
        "v_via": " via prefix(k)",
        "forward": "loops = [kv], pack = gqa, tile.q = 16, tile.kv = 32, stages = 2",
    },
    "8 bits, compressed keys by queries": {
        **PAGES, "k_type": "i8", "v_type": "i8", "d": 576, "dv": 512, "q": "B, M, G", "k": "B, N, 1",
        "v_via": " via prefix(k)",
        "forward": "loops = [kv], pack = gqa, tile.q = 64, tile.kv = 32, stages = 2, warps = 8",
    },
}  # fmt: skip


#: Compiled for a minute more.
BY_NIGHT = {
    "sticks",
    "selected tokens",
    "selected latents",
    "selected latents, few heads",
    "8 bits, wide, one stage",
    "8 bits, v alone",
    "8 bits, decode, one stage",
    "8 bits, compressed keys by queries",
}


ARCHS = ("sm_80", "sm_90", "sm_100")


def kinds_of(arch: str, by_night: bool) -> list[str]:
    """What is compiled for an architecture: by day a quarter of the kinds, each for one of the three; all
    every night.
    """
    names = [name for name in KINDS if (name in BY_NIGHT) == by_night]
    return names if is_night() else names[ARCHS.index(arch) :: 4 * len(ARCHS)]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("by_night", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_no_kernel_takes_more_shared_memory_than_estimated(arch: str, by_night: bool) -> None:
    if tool("cuobjdump") is None:
        pytest.skip("no cuobjdump in Triton's wheel")
    whole = {name: {**PLAIN, **KINDS[name]} for name in kinds_of(arch, by_night)}
    types = {name: {"k_type": kind["dtype"], "v_type": kind["dtype"]} for name, kind in whole.items()}
    cases = [(name, arch, KIND.format(**{**types[name], **kind})) for name, kind in whole.items()]
    run = compiling(SIZES, stdin=json.dumps(cases))
    found = json.loads(run.stdout)
    assert len(found) >= len(whole)
    assert [case for case in found if case[2] < case[3]] == []
    assert [case for case in found if case[2] > 2.5 * case[3] and "f32" not in case[0]] == []


EIGHT_ON = {"e4m3": ("sm_90", "sm_100", "sm_120"), "e5m2": ("sm_80", "sm_90"), "i8": ("sm_80",)}
CONVERSIONS = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from attnc.build import plan_program
from attnc.model.resolve import resolve
from attnc.plan.device import DEVICES
from attnc.runtime import toolchains
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
found = {}
for name, arch, text in json.load(sys.stdin):
    (module,) = plan_program(resolve(parse(Source(name, text)), prelude())).modules
    kernel = toolchains.triton_kernel(module, "forward", 0, DEVICES[arch])
    target = GPUTarget("cuda", kernel.capability, 32)
    compiled = triton.compile(kernel._source(), target=target, options=kernel.options)
    found[f"{name} {arch}"] = compiled.asm["ptx"]
print(json.dumps(found))
"""
#: What converts one number at a time to bf16, at an eighth of the usual rate, and what reads single bytes.
SLOW = re.compile(r"cvt\.(?:rn\.)?bf16\.f16|cvt\.\w+\.f(?:16|32)\.s8|ld\.shared\.[bsu]8")


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["8 bits, decode", "8 bits"])
def test_8_bits_are_converted_four_at_a_time(kind: str) -> None:
    """Where tensor cores read registers, values beside 64 queries and more are still read byte by byte."""
    if tool("cuobjdump") is None:
        pytest.skip("no cuobjdump in Triton's wheel")
    cases = [
        (dtype, arch, KIND.format(**{**PLAIN, **KINDS[kind], "k_type": dtype, "v_type": dtype}))
        for dtype, archs in EIGHT_ON.items()
        for arch in archs
        if kind == "8 bits, decode" or DEVICES[arch].has_mma_from_shared
    ]
    found = json.loads(compiling(CONVERSIONS, stdin=json.dumps(cases)).stdout)
    assert len(found) == len(cases)
    for name, ptx in found.items():
        assert "cvt.rn.bf16x2.f32" in ptx, name
        assert SLOW.findall(ptx) == [], name
        assert "cp.async" in ptx, name


COMBINE = """
import sys
from pathlib import Path
from attnc.build import front, plan_program
from attnc.runtime.toolchains import TritonKernel
from attnc.runtime.loader import load_module
kernel = load_module(plan_program(front(Path(sys.argv[1]))).modules[0]).paged_decode_combine
kinds = {"O": "*bf16", "BLOCK_S": "constexpr"}
signature = {n: kinds.get(n, "*fp32" if n.endswith("_ptr") else "i32") for n in kernel.arg_names}
for splits in (2, 16, 128):
    TritonKernel(
        function=kernel, signature=signature, constants={"BLOCK_S": splits}, capability=90, warps=4, stages=3
    ).compile()
"""


@pytest.mark.slow
def test_shares_of_any_number_are_combined() -> None:
    """The interpreter does not mind a variable that changes its shape; the compiler does."""
    compiling(COMBINE, SPECS / "paged_decode.attn")


LONG = """attention long {{
  param D in {{64}}
  input q: bf16[B, M, H, D]
  input k, v: bf16[B, N, H, D]
  input n_len, w: i64[B]
  length N = n_len[b]
  score = dot(q, k) / sqrt(D)
  mask = window(w[b], 9999999999) or kv_idx % 9999999999 == abs(q_pos - 9999999999) // w[b]
  normalize = softmax
  output o: bf16[B, M, H, D]
  grad q, k, v
}}
schedule long for {target} {{
  tile.q = 64, tile.kv = 64
}}
"""


BOTH_WAYS = """
import sys
from pathlib import Path
from attnc.build import front, plan_program
from attnc.plan.device import DEVICES
from attnc.runtime.toolchains import usage_of
for path in sys.argv[1:]:
    (module,) = plan_program(front(Path(path))).modules
    usage_of(module, 0, DEVICES["sm_90"])
    for name in module.backward_kernels:
        usage_of(module, 0, DEVICES["sm_90"], name)
"""


@pytest.mark.slow
def test_bounds_of_64_bits_compile(tmp_path: Path) -> None:
    """The interpreter and g++ let a loop's counter have 64 bits; tiles are addressed by 32."""
    if tool("cuobjdump") is None:
        pytest.skip("no cuobjdump in Triton's wheel")
    targets = "triton", "cuda.sm_80"
    texts = LONG.replace("  length N = n_len[b]\n", ""), LONG  # the first with tensor descriptors
    files: list[Path] = []
    for target, text in product(targets, texts) if is_night() else zip(targets, texts, strict=True):
        files.append(tmp_path / f"{len(files)}.attn")
        files[-1].write_text(text.format(target=target))
    compiling(BOTH_WAYS, *files)


SUMS = """
import re, sys
from itertools import product
from pathlib import Path
import triton
from attnc.build import front, plan_program
from attnc.plan.device import DEVICES
from attnc.runtime.toolchains import usage_of

compiled, compile = [], triton.compile
triton.compile = lambda *args, **options: compiled.append(compile(*args, **options)) or compiled[-1]
modules = [m for m in plan_program(front(Path(sys.argv[1]))).modules if m.target == "triton"]
assert {m.variant.params["D"] for m in modules} >= {64, 128}
for module, arch in product((m for m in modules if m.variant.params["D"] in (64, 128)), ("sm_80", "sm_90")):
    before = len(compiled)
    usage_of(module, 0, DEVICES[arch])
    for name in module.backward_kernels:
        usage_of(module, 0, DEVICES[arch], name)
    assert len(compiled) == before + 1 + len(module.backward_kernels)
dot = re.compile(r"(%\\w+)(?::\\d+)? = (?:tt.dot|ttng.warp_group_dot) [^,]+, [^,]+, (%\\w+)")
for binary in compiled:
    text = binary.asm["ttgir"]
    starts = [start for _, start in dot.findall(text)]
    assert len(starts) >= 6 and len(starts) % 3 == 0
    added = re.findall(r"= arith.addf (%\\w+)(?:#0)?, (%\\w+)", text)
    for first, second, third in zip(*[iter(starts)] * 3):
        assert first.startswith("%cst") and not second.startswith("%cst"), (first, second, third)
    ends = [name for name, _ in dot.findall(text)][2::3]
    waited = dict(re.findall(r"(%\\w+):2 = ttng.warp_group_dot_wait (%\\w+)", text))
    sums = {waited.get(sum, sum) for sum, _ in added}
    assert set(ends) <= sums, (ends, added)
"""


@pytest.mark.nightly
def test_triton_adds_the_sum_of_each_tile_of_f32_by_itself() -> None:
    """The error bound of f32 counts on it: the first of three products starts at 0, the last is added."""
    if tool("cuobjdump") is None:
        pytest.skip("no cuobjdump in Triton's wheel")
    compiling(SUMS, SPECS / "f32.attn")


def test_kernels_of_gradients_read_rows_in_place_of_pages_of_8_bits() -> None:
    lines = (
        "input q: bf16[B, M, H, 64]",
        "input k, v: e4m3[B, N, H, 64] via paged(table, page = 16)",
        "input table: i32[B, P]",
        "input lens: i32[B]",
        "length N = lens[b]",
        *("score = dot(q, k)", "normalize = softmax", "output o: bf16[B, M, H, 64]", "grad q"),
    )
    (module,) = modules_of(spec(lines))
    types = {name: triton_kernel(module, name, 0, DEVICES["sm_90"]).signature["K"] for name in module.kernels}
    assert {name: "fp8" in kind for name, kind in types.items()} == {"forward": True, "dq": False}
