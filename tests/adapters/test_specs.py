"""On whose kernels the specs of engines run, on GPUs that are not here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from attnc.adapters import specs
from attnc.adapters.specs import Wanted, kernel, suits_conversion
from attnc.api.compile import SpecError
from attnc.diagnostics import error
from attnc.plan.order import promise_of
from attnc.source import Source
from tests.gpus import fake_gpu
from tests.verify.judging import modules_of

PLAIN = Wanted(
    name="plain",
    dtype=torch.bfloat16,
    head_dim=64,
    scale=0.125,
    q="[B, M, Hkv * G, D]",
    kv="[B, N, Hkv, D]",
    o="[B, M, Hkv * G, D]",
    inputs=(),
    length="",
)
LATENT = replace(
    PLAIN,
    name="latent",
    head_dim=576,
    value_dim=512,
    kv="[B, N, 1, D]",
    value="[B, N, 1, Dv] via prefix(k)",
    q="[B, M, G, D]",
    o="[B, M, G, Dv]",
    decode=True,
)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The targets whose kernels were called, in order."""
    found: list[str] = []

    def made(wanted: Wanted, target: str) -> Any:
        if wanted.softcap and target != "triton":
            raise SpecError([error("E0602", "not yet", Source("it.attn", "x").span(0, 1), "")])
        return lambda *inputs, **named: found.append(target)

    monkeypatch.setattr(specs, "_make", made)
    monkeypatch.setattr(specs, "_WANTED", {})
    monkeypatch.setattr(specs, "_NAMES", {})
    monkeypatch.setattr(specs, "FUNCTIONS", ModuleType("functions"))
    specs.kernel_name.cache_clear()
    fake_gpu(monkeypatch)
    yield found
    specs.kernel_name.cache_clear()


def test_each_call_takes_the_fastest_for_its_tensors(ran: list[str]) -> None:
    x = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    made = kernel(PLAIN)
    made(x, x, x)
    made(q=x, k=x, v=x)
    with pytest.warns(UserWarning, match="plain: .* need strides"):
        made(x, x, torch.zeros(1, 8, 2, 68, dtype=torch.bfloat16)[..., :64])
    with pytest.warns(UserWarning, match="need a spec without this: not yet"):
        kernel(replace(PLAIN, softcap=30.0))(x, x, x)
    kernel(replace(PLAIN, decode=True))(x[:, :1], x, x)
    assert ran == ["cuda.sm_90a", "cuda.sm_90a", "triton", "triton", "triton"]


@pytest.mark.parametrize(
    ("size", "value_dim", "cache", "expected"),
    [
        (128, 64, None, "triton"),
        (192, 128, None, "cuda.sm_90a"),  # Triton's tiles are short of room
        (128, 192, None, "cuda.sm_90a"),
        (128, 64, torch.float8_e4m3fn, "cuda.sm_90a"),  # by warps
        (192, 128, torch.float8_e4m3fn, "triton"),
    ],
)
def test_few_queries_of_values_of_another_width_share_the_keys(
    size: int, value_dim: int, cache: torch.dtype | None, expected: str, ran: list[str]
) -> None:
    few = replace(
        PLAIN, name="few", head_dim=size, value_dim=value_dim, value="[B, N, Hkv, Dv]", cache=cache,
        o="[B, M, Hkv * G, Dv]", decode=True,
    )  # fmt: skip
    q = torch.zeros(1, 1, 2, size, dtype=torch.bfloat16)
    k, v = (torch.zeros(1, 8, 2, width, dtype=cache or torch.bfloat16) for width in (size, value_dim))
    kernel(few)(q, k, v)
    assert ran == [expected]
    assert "split.kv = auto" in few.hopper_text
    modules_of(few.hopper_text)


ORDERED = replace(PLAIN, name="ordered", order=2048, mask="causal")


def test_under_an_order_all_calls_of_a_layer_take_one_target(ran: list[str]) -> None:
    """Other kernels would give other bits: also where tensors have to be copied, and to decode."""
    x = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    odd = torch.zeros(1, 8, 2, 68, dtype=torch.bfloat16)[..., :64]
    kernel(ORDERED)(x, x, x)
    kernel(ORDERED)(x, odd, odd)
    kernel(replace(ORDERED, decode=True))(x[:, :1], x, x)
    assert ran == ["cuda.sm_90a"] * 3
    ran.clear()
    wide = torch.zeros(1, 8, 2, 576, dtype=torch.bfloat16)
    for changed, y in (
        (replace(ORDERED, head_dim=320), wide[..., :320]),
        (replace(ORDERED, head_dim=576), wide),
        (replace(ORDERED, head_dim=60), x[..., :60]),
        (replace(ORDERED, dtype=torch.float32), x.float()),
        (replace(ORDERED, head_dim=512, cache=torch.float8_e4m3fn), wide[..., :512]),
    ):
        assert not changed.keeps_order_on_hopper
        kernel(changed)(y, y, y)
        kernel(replace(changed, decode=True))(y[:, :1], y, y)
    assert ran == ["triton"] * 10


SCALES = {"cache": torch.float8_e4m3fn, "k_scale": "ks", "v_scale": "vs", "length": "n"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"softcap": 30.0},
        {"head_dim": 128, "sink": "s"},
        {"head_dim": 192},
        {"head_dim": 256},
        {"head_dim": 192, "value": "[B, N, Hkv, Dv]", "value_dim": 128, "o": "[B, M, Hkv * G, Dv]"},
        {"head_dim": 512},
        {"inputs": ("n: i32[B]",), **SCALES},
        {"inputs": ("n: i32[B]",), "converts": True, **SCALES},
        *({"inputs": ("n: i32[B]",), "head_dim": size, **SCALES} for size in (96, 128, 192, 256)),
        {"inputs": ("n: i32[B]",), "head_dim": 128, "converts": True, **SCALES},
        {
            "value": LATENT.value,
            "head_dim": 576,
            "value_dim": 512,
            "kv": LATENT.kv,
            "q": LATENT.q,
            "o": LATENT.o,
        },
    ],
)
def test_prompts_and_decode_steps_of_hopper_promise_the_same(changes: dict[str, Any]) -> None:
    made = [modules_of(replace(ORDERED, decode=decode, **changes).hopper_text)[0] for decode in (False, True)]
    assert made[0].target == "cuda.sm_90a"
    assert replace(ORDERED, **changes).keeps_order_on_hopper
    assert promise_of(made[0]) == promise_of(made[1]) != ()
    assert len({(x.kernel.configs[0].tile_kv, x.kernel.configs[0].softmax) for x in made}) == 1


def test_packed_prompts_of_wide_heads_promise_what_decode_steps_do() -> None:
    packed: dict[str, Any] = {
        "q": "[T, Hkv * G, D] via ragged(cu)",
        "o": "[T, Hkv * G, D]",
        "inputs": ("cu: i32[B + 1]",),
    }
    wide = replace(ORDERED, head_dim=512)
    prompt, step = (x.hopper_text for x in (replace(wide, **packed), replace(wide, decode=True)))
    made = [modules_of(text)[0] for text in (prompt, step)]
    assert promise_of(made[0]) == promise_of(made[1]) != ()
    assert [x.kernel.segments is None for x in made] == [False, True]
    assert replace(wide, **packed).keeps_order_on_hopper


def test_packed_steps_share_keys_in_segments_on_hopper_and_are_prompts_on_triton() -> None:
    packed = replace(
        ORDERED, q="[T, Hkv * G, D] via ragged(cu)", o="[T, Hkv * G, D]", inputs=("cu: i32[B + 1]",)
    )
    few = replace(packed, decode=True)
    made = [modules_of(wanted.hopper_text)[0] for wanted in (packed, few, replace(ORDERED, decode=True))]
    assert len({promise_of(module) for module in made}) == 1
    assert [x.kernel.structure == "decode" and x.kernel.split is not None for x in made] == [
        False,
        True,
        True,
    ]
    assert modules_of(few.text)[0].kernel.structure == "forward_q_kv"


def test_many_sequences_of_latents_have_a_block_for_all_segments() -> None:
    ordered = replace(LATENT, order=2048, mask="causal")
    apart, walks = (modules_of(replace(ordered, walks=x).hopper_text)[0] for x in (False, True))
    assert promise_of(apart) == promise_of(walks) != ()
    assert [x.kernel.segments is None for x in (apart, walks)] == [True, False]


def test_latent_attention_decodes_by_wgmma(ran: list[str]) -> None:
    q, k = (torch.zeros(1, 8, heads, 576, dtype=torch.bfloat16) for heads in (16, 1))
    kernel(LATENT)(q=q, k=k)
    kernel(replace(LATENT, split_size=64))(q=q, k=k)  # splits of a size are for Triton alone
    assert ran == ["cuda.sm_90a", "triton"]


def test_few_rows_of_caches_of_8_bits_are_read_by_warps_of_hopper(ran: list[str]) -> None:
    x = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    k = x.to(torch.float8_e4m3fn)
    narrow = replace(PLAIN, decode=True, cache=k.dtype)
    for wanted in (narrow, replace(narrow, split_size=256), replace(narrow, split=False)):
        assert "warp_split = kv" in wanted.hopper_text
        kernel(wanted)(x[:, :1], k, k)
    for wanted in (replace(narrow, rows=32), replace(narrow, split_size=192), replace(narrow, head_dim=256)):
        assert not wanted.suits_warps
    kernel(replace(narrow, rows=32))(x[:, :1], k, k)
    kernel(replace(narrow, split_size=192))(x[:, :1], k, k)
    assert ran == ["cuda.sm_90a"] * 3 + ["triton"] * 2


def test_prompts_on_8_bits_convert_them_before_where_that_pays_and_fits() -> None:
    prompt = {"heads": (32, 8), "columns": (128, 128)}
    assert suits_conversion(1024, sequences=4, keys=4 * 8192, **prompt)
    assert not suits_conversion(1023, sequences=4, keys=4 * 8192, **prompt)  # 1023 rows meet a key
    assert not suits_conversion(0, sequences=0, keys=0, **prompt)
    assert suits_conversion(1024, sequences=1, keys=2**18, **prompt)
    assert not suits_conversion(1024, sequences=1, keys=2**18 + 16, **prompt)  # more than 1 GiB
    assert not suits_conversion(1024, (8, 8), 1, 64, (512, 512))
    narrow = replace(PLAIN, cache=torch.float8_e4m3fn)
    assert narrow.hopper_text == narrow.attention
    (module,) = modules_of(replace(narrow, converts=True).hopper_text)
    assert module.conversion is not None
    assert "convert" not in replace(narrow, converts=True, decode=True).hopper_text


def test_drafts_narrow_pages_and_wide_heads_are_decoded_by_wgmma(ran: list[str]) -> None:
    q, pages = (torch.zeros(2, 8, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    few = replace(PLAIN, head_dim=128, decode=True)
    paged = replace(few, kv="[B, N, Hkv, D] via paged(table, page = 16)")
    for wanted in (few, paged, replace(few, rows=32), replace(few, rows=32, split_size=64)):
        kernel(wanted)(q, pages, pages)
    kernel(replace(paged, head_dim=64))(q[..., :64], pages[..., :64], pages[..., :64])
    kernel(replace(few, rows=64, cache=torch.int8))(q, pages, pages)
    wide = torch.zeros(2, 8, 2, 192, dtype=torch.bfloat16)
    kernel(replace(few, head_dim=192))(wide, wide, wide)
    kernel(replace(few, head_dim=192, split_size=64))(wide, wide, wide)
    assert ran == [*["triton"] * 2, *["cuda.sm_90a", "triton"] * 3]


def test_kernels_of_wgmma_for_few_queries_share_keys_out_too() -> None:
    few = replace(PLAIN, decode=True)
    for wanted, split in ((few, "auto"), (replace(few, split=False), "1")):
        assert f"loops = [kv], pack = gqa\n  split.kv = {split}" in wanted.hopper_text
    for wanted in (PLAIN, LATENT):
        assert "schedule" not in wanted.hopper_text


def test_torch_compile_follows_other_targets(ran: list[str]) -> None:
    """Of torch 2.11 a name of a function has no dot."""
    x = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    name = specs.kernel_name(PLAIN)
    torch.compiler.reset()

    def layer(x: torch.Tensor) -> torch.Tensor:
        specs.run_kernel(name, x, x, x)
        return x * 2

    torch.compile(layer, fullgraph=True, backend="eager")(x)
    assert ran == ["cuda.sm_90a"]
    assert not any("." in name for name in vars(specs.FUNCTIONS))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("grad", [False, True])
def test_torch_compile_follows_the_attention_of_transformers(grad: bool) -> None:
    from attnc.adapters.transformers import attention

    module = torch.nn.Module()
    q, k, v = torch.randn(3, 1, 2, 20, 16, generator=torch.Generator().manual_seed(0)).half().unbind()
    q.requires_grad_(grad)

    def layer(q: torch.Tensor) -> torch.Tensor:
        return attention(module, q * 2, k, v, None, scaling=0.25, is_causal=False)[0]

    torch.compiler.reset()
    o = torch.compile(layer, fullgraph=True, backend="aot_eager")(q)
    assert torch.equal(o, layer(q))
    if grad:
        found, right = (torch.autograd.grad(x.sum(), q)[0] for x in (o, layer(q)))
        assert torch.equal(found, right)


def test_the_spec_of_latent_attention_is_one_of_hopper() -> None:
    made: Any = specs._make(LATENT, "cuda.sm_90a")
    assert made.__name__ == "latent"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("dtype", "columns", "grad"),
    [(torch.float16, 520, ()), (torch.float32, 264, ("q", "k", "v")), (torch.bfloat16, 1024, ())],
)
def test_heads_wider_than_a_schedule_has_tiles_for(
    dtype: torch.dtype, columns: int, grad: tuple[str, ...]
) -> None:
    """Kernels without a schedule take them."""
    wanted = replace(PLAIN, name=f"wide{columns}", dtype=dtype, head_dim=columns, scale=0.05, grad=grad)
    q, k = torch.randn(1, 3, 2, columns).to(dtype), torch.randn(1, 5, 1, columns).to(dtype)
    leaves = [x.requires_grad_(bool(grad)) for x in (q, k, torch.randn_like(k))]
    o = kernel(wanted)(*leaves)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    score = torch.einsum("bmhd,bnxd->bhmn", *exact[:2]) * 0.05
    hidden = torch.ones(3, 5, dtype=torch.bool).triu(3)
    right = torch.einsum("bhmn,bnxd->bmhd", score.masked_fill(hidden, -torch.inf).softmax(-1), exact[2])
    torch.testing.assert_close(o.double(), right, rtol=2e-2, atol=2e-2)
    if grad:
        do = torch.randn_like(o)
        found, expected = torch.autograd.grad(o, leaves, do), torch.autograd.grad(right, exact, do.double())
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=1e-3, atol=1e-3)


def test_heads_that_no_tile_fits_are_refused_in_words_of_the_call() -> None:
    said = r"^plain: expected heads that kernels are made for, got 600 columns of torch.float32: no config"
    with pytest.raises(ValueError, match=said):
        kernel(replace(PLAIN, dtype=torch.float32, head_dim=600))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 256, 264, 576])
def test_tiles_of_wide_heads_are_few(head_dim: int, dtype: torch.dtype) -> None:
    """Those that shared memory holds: beyond 256 columns others than for narrow ones."""
    made: dict[bool, str] = {}
    for decode in (False, True):
        wanted = Wanted(
            name="it", dtype=dtype, head_dim=head_dim, scale=0.1, q="[B, M, H, D]", kv="[B, N, H, D]",
            o="[B, M, H, D]", inputs=(), length="", decode=decode, rows=16 if decode else 0,
        )  # fmt: skip
        made[decode] = wanted.text
    wide, narrow = "config tile.q = 64, warps = 8", "tile.q in {"
    assert (wide in made[False]) == (head_dim > 256)
    assert (narrow in made[False]) == (head_dim <= 256)
    largest = {(False, False): 128, (False, True): 64, (True, False): 64, (True, True): 16}
    most = largest[head_dim > 256, dtype is torch.float32]
    assert f"tile.kv in {{{most}" in made[True] or f"tile.kv = {most}" in made[True]


@pytest.mark.parametrize("is_gpu", [False, True])
def test_kernels_run_in_the_interpreter_where_there_is_no_gpu(
    is_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    loaded = ModuleType("loaded")
    vars(loaded).update(plain=lambda: None, CALL=None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_gpu)
    monkeypatch.setattr("attnc.verify.interpreter.ensure_interpreter", lambda: asked.append("interpreter"))
    monkeypatch.setattr("attnc.runtime.loader.load_module", lambda module: loaded)
    assert specs._make_scheduled(PLAIN) is loaded.plain
    assert asked == [] if is_gpu else ["interpreter"]
