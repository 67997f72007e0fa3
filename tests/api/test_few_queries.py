"""Which kernels doors take for few queries: those whose programs share the keys of a sequence out. Tiles of
query rows would leave most of a GPU idle.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import attnc
from attnc.adapters import flashinfer, transformers
from attnc.adapters.bands import Band, carry
from attnc.api import fastest, repeats
from attnc.api.fastest import FEW, HOPPER, SM80, TRITON, count_sharing, targets_of_few
from attnc.compat import call, flash_attn, flash_attn_interface, sdpa
from attnc.flex import family_of, flex_attention
from attnc.tuned.tables import guess_rows
from attnc.verify.interpreter import ensure_interpreter
from tests.gpus import fake_gpu

ensure_interpreter()

B, H, HKV, N, D, PAGE = 2, 4, 2, 48, 16, 16


def shares(call: Callable[[], Any]) -> bool:
    """Whether the one kernel that a call runs on shares keys out."""
    repeats.forget()
    for known in list_kernels():
        known.prepared.clear()
        known.repeated.forget()
    call()
    (found,) = (x for x in list_kernels() if x.prepared)
    return found.split is not None


def list_kernels() -> list[Any]:
    """Lists what loaded Triton modules declare of their calls."""
    declared = (vars(module).get("CALL") for module in [*sys.modules.values()])
    return [call for call in declared if type(call).__name__ == "TritonAttention"]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def starts(rows: int) -> torch.Tensor:
    return torch.arange(B + 1, dtype=torch.int32) * rows


def lengths() -> torch.Tensor:
    return torch.tensor([N, N - 5], dtype=torch.int32)


def dense(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return draw(B, rows, H, D), draw(B, N, HKV, D), draw(B, N, HKV, D) + 1


def paged(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = dense(rows)
    table = torch.arange(B * N // PAGE, dtype=torch.int32).view(B, -1)
    return q, k.reshape(-1, PAGE, HKV, D), v.reshape(-1, PAGE, HKV, D), table


def turned(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (x.transpose(1, 2) for x in dense(rows))
    return q, k, v


def near(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - 0.1 * (q_idx - kv_idx)


def by_flash(rows: int) -> Any:
    return flash_attn.flash_attn_func(*dense(rows), causal=True)


def by_flash_3(rows: int) -> Any:
    return flash_attn_interface.flash_attn_func(*dense(rows), causal=True)


def by_cache(rows: int) -> Any:
    return flash_attn.flash_attn_with_kvcache(*dense(rows), cache_seqlens=lengths(), causal=True)


def by_pages(rows: int) -> Any:
    q, k, v, table = paged(rows)
    named: Any = {"block_table": table, "cache_seqlens": lengths(), "causal": True}
    return flash_attn.flash_attn_with_kvcache(q, k, v, **named)


def by_sdpa(rows: int) -> Any:
    return sdpa.sdpa_forward(*turned(rows))[0]


def by_flex(rows: int) -> Any:
    return flex_attention(*turned(rows), near, enable_gqa=True)


def by_block_mask(rows: int) -> Any:
    def before(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx + N - rows >= kv_idx

    block_mask = create_block_mask(before, None, None, rows, N, device="cpu")
    return flex_attention(*turned(rows), near, block_mask, enable_gqa=True)


def by_offset(rows: int) -> Any:
    offsets = torch.tensor([N - 9, N - 20])

    def before(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx + offsets[b] >= kv_idx

    return flex_attention(*turned(rows), mask_mod=before, enable_gqa=True)


def by_compiled_flex(rows: int) -> Any:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, near, enable_gqa=True), backend="eager")
    return compiled(*turned(rows))


def by_transformers(rows: int) -> Any:
    module, stop = torch.nn.Module(), lengths()
    band = carry(Band(torch.zeros_like(stop), stop, stop, None, 0), (B, 1, rows, N))
    return transformers.attention(module, *turned(rows), band, 0.25)[0]


def by_compiler(rows: int) -> Any:
    family = attnc.compile("""
        attention few {
          input q: f32[B, M, Hkv * G, 16]
          input k, v: f32[B, N, Hkv, 16]
          score = dot(q, k) / 4
          mask = causal
          normalize = softmax
          output o: f32[B, M, Hkv * G, 16]
        }
    """)
    return family(*dense(rows))


def by_flashinfer(rows: int) -> Any:
    q, k, v, table = paged(rows)
    made = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(8), "NHD")
    last = torch.full((B,), PAGE, dtype=torch.int32)
    indptr = torch.arange(B + 1, dtype=torch.int32) * (N // PAGE)
    made.plan(starts(rows), indptr, table.flatten(), last, H, HKV, D, PAGE, causal=True, q_data_type=q.dtype)
    return made.run(q.flatten(0, 1), (k, v))


DOORS = [
    by_flash, by_flash_3, by_cache, by_pages, by_sdpa, by_flex, by_block_mask, by_offset, by_compiled_flex,
    by_transformers,
    by_compiler, by_flashinfer,
]  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_doors_share_the_keys_of_few_queries_out(door: Callable[[int], Any]) -> None:
    assert [shares(partial(door, rows)) for rows in (1, FEW, FEW + 1)] == [True, True, False]


def packed(keys: str) -> Callable[[int], Any]:
    q, k, v, table = paged(1)
    k, v = (k, v) if keys == "paged" else (x.flatten(0, 1) for x in (k, v))
    named: Any = {"block_table": table, "seqused_k": lengths()} if keys == "paged" else {}
    given = q.squeeze(1), k, v, starts(1), None if keys == "paged" else starts(N)

    def call(most: int) -> Any:
        return flash_attn.flash_attn_varlen_func(*given, most, N, causal=True, return_lse=True, **named)

    return call


@pytest.mark.one_in(2)
@pytest.mark.parametrize("keys", ["ragged", "paged"])
def test_packed_queries_of_which_sequences_have_one_are_few(keys: str) -> None:
    call = packed(keys)
    assert shares(lambda: call(1))
    assert not shares(lambda: call(2))
    (o, lse), (expected, log_sum) = call(1), call(2)
    torch.testing.assert_close((o, lse), (expected, log_sum))
    for _ in range(6):  # and repeats it
        assert all(map(torch.equal, call(1), (o, lse)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("keys", ["ragged", "paged"])
@pytest.mark.parametrize("ends", [[0, 1, 1, 2], [0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 2, 3], [0, 2, 2, 4]])
@pytest.mark.parametrize("rows", [3, 4])
def test_one_query_at_most_is_right_whichever_sequences_have_none(
    keys: str, ends: list[int], rows: int
) -> None:
    """As many rows as sequences, of which one has none, so that the last row is padding; and a promise that
    is not kept.
    """
    if ends[-1] > rows:
        return
    q = torch.randn(rows, H, D).half()
    k, v = torch.randn(2, 3, N, HKV, D).half()
    of_k: Any = torch.tensor([0, 30, 40, 3 * N - 20], dtype=torch.int32)
    named: Any = {}
    if keys == "paged":
        table = torch.randperm(3 * N // PAGE).int().view(3, -1)
        k, v = (x.reshape(-1, PAGE, HKV, D) for x in (k, v))
        used = torch.tensor([30, 0, N - 20], dtype=torch.int32)
        of_k, named = None, {"block_table": table, "seqused_k": used}
    else:
        k, v = (x.flatten(0, 1) for x in (k, v))
    given = q, k, v, torch.tensor(ends, dtype=torch.int32), of_k

    def call(most: int) -> Any:
        return flash_attn.flash_attn_varlen_func(*given, most, N, causal=True, return_lse=True, **named)

    for _ in range(6):
        torch.testing.assert_close(call(1), call(2), rtol=2e-3, atol=2e-3)


def test_packed_queries_of_a_cache_and_of_torch_are_few_too() -> None:
    q, k, v, table = paged(1)
    q, keys, values = q.squeeze(1), k.flatten(0, 1), v.flatten(0, 1)
    given: Any = {"block_table": table, "cache_seqlens": lengths(), "causal": True, "max_seqlen_q": 1}

    def by_cache(**more: Any) -> Any:
        return flash_attn.flash_attn_with_kvcache(q, k, v, cu_seqlens_q=starts(1), **given, **more)

    out = torch.empty_like(q)
    assert by_cache(out=out) is out
    assert torch.equal(by_cache(), out)
    assert shares(by_cache)
    ends = starts(1), starts(N), 1, N
    assert shares(lambda: sdpa.flash_attention_forward(q, keys, values, *ends, 0.0, False, False))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("wanted", ["gradients", "a gradient of a bias", "dropout", "tiles"])
def test_what_no_such_kernel_has_takes_tiles_of_rows(wanted: str) -> None:
    q, k, v = turned(2)
    slope = torch.nn.Parameter(torch.ones(H))

    def sloped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - slope[h] * (q_idx - kv_idx)

    def call() -> None:
        if wanted == "gradients":
            flex_attention(q.requires_grad_(), k, v, enable_gqa=True).sum().backward()
            assert q.grad is not None
        elif wanted == "a gradient of a bias":
            flex_attention(q, k, v, sloped, enable_gqa=True).sum().backward()
            assert slope.grad is not None
        elif wanted == "tiles":
            flex_attention(q, k, v, enable_gqa=True, kernel_options={"BLOCK_M": 32})
        else:
            flash_attn.flash_attn_func(*dense(2), dropout_p=0.5)

    assert not shares(call)


def test_a_call_with_other_sizes_chooses_again() -> None:
    """Also where each is known as the repetition of one before."""
    expected = {rows: by_flex(rows) for rows in (1, 20)}
    for rows in (*(1, 20) * 8, *[1] * 8, *[20] * 8, 1):
        assert torch.equal(by_flex(rows), expected[rows])
    assert shares(lambda: [by_flex(1) for _ in range(8)])
    assert not shares(lambda: [by_flex(20) for _ in range(8)])


def test_flex_says_which_kernel_it_runs() -> None:
    few, many = (family_of(*turned(rows), near, enable_gqa=True) for rows in (FEW, FEW + 1))
    assert "split.kv = auto" in few.spec
    assert "split.kv" not in many.spec
    assert "split" in few.explain()


# --- one rule for all doors ---------------------------------------------------------------------------------


def test_one_number_says_how_many_are_few() -> None:
    family = attnc.compile("""
        attention plain {
          input q: f16[B, M, H, 64]
          input k, v: f16[B, N, H, 64]
          score = dot(q, k) / 8
          normalize = softmax
          output o: f16[B, M, H, 64]
        }
    """)
    modules: Any = family._modules.values()
    rows = guess_rows([*modules])
    assert rows[0] == ((FEW, None, None), "decode")


@pytest.mark.parametrize(
    ("rows", "heads", "width", "keys", "dtype", "expected"),
    [
        (1, (32, 8), 128, "dense", torch.float16, TRITON),
        (4, (32, 8), 128, "dense", torch.float16, TRITON),
        (5, (32, 8), 128, "dense", torch.float16, HOPPER),  # more rows than a tile of Triton's
        (1, (32, 8), 136, "ragged", torch.float16, HOPPER),  # whose tiles are short of room
        (1, (32, 8), 64, "paged", torch.float16, HOPPER),  # whose addresses take longer than the rows
        (1, (8, 8), 64, "dense", torch.bfloat16, SM80),  # nobody shares keys: warps do
        (1, (8, 8), 64, "ragged", torch.bfloat16, TRITON),
        (1, (8, 8), 64, "dense", torch.float32, TRITON),
    ],
)
def test_whose_kernels_few_queries_run_on(
    rows: int,
    heads: tuple[int, int],
    width: int,
    keys: str,
    dtype: torch.dtype,
    expected: str,
    hopper: None,
) -> None:
    q, k = (torch.empty(1, 16, number, width, dtype=dtype) for number in heads)
    sharing = count_sharing(rows, *heads)
    assert targets_of_few("door", q, k, k, sharing=sharing, keys=keys)[0] == expected


@pytest.mark.parametrize(
    ("heads", "width", "keys", "length", "dtype", "expected"),
    [
        ((32, 8), 128, "dense", 3008, torch.bfloat16, HOPPER),
        ((32, 8), 64, "dense", 8192, torch.bfloat16, HOPPER),
        ((32, 32), 128, "dense", 4096, torch.bfloat16, HOPPER),
        ((20, 20), 64, "dense", 4096, torch.bfloat16, SM80),
        ((32, 8), 128, "dense", 2048, torch.bfloat16, TRITON),
        ((32, 8), 128, "dense", 8192, torch.float32, TRITON),
        ((32, 8), 128, "paged", 8192, torch.bfloat16, HOPPER),
        ((32, 8), 128, "paged", 512, torch.bfloat16, TRITON),
        ((32, 8), 64, "paged", 512, torch.bfloat16, TRITON),  # rows are short, and there are few of them
        ((32, 8), 96, "paged", 512, torch.bfloat16, HOPPER),  # Triton would pad heads to 128 columns
        ((32, 8), 128, "ragged", 8192, torch.bfloat16, TRITON),
        ((32, 8), 100, "dense", 8192, torch.bfloat16, TRITON),  # rows that TMA does not read
    ],
)
def test_whose_kernels_read_long_tensors(
    heads: tuple[int, int],
    width: int,
    keys: str,
    length: int,
    dtype: torch.dtype,
    expected: str,
    hopper: None,
) -> None:
    q, k = (torch.empty(1, 16, number, width, dtype=dtype) for number in heads)
    sharing = count_sharing(1, *heads)
    assert targets_of_few("door", q, k, k, sharing=sharing, keys=keys, length=length)[0] == expected


@pytest.mark.parametrize(("length", "target"), [(2048, TRITON), (2049, HOPPER)])
def test_flex_takes_them_too(length: int, target: str, hopper: None) -> None:
    q, k = (torch.empty(1, heads, length, 128, dtype=torch.bfloat16) for heads in (32, 8))
    family = family_of(q[:, :, :1], k, k, near, enable_gqa=True)
    assert family.target == target
    assert "split.kv = auto" in family.spec


@pytest.mark.parametrize(
    ("shape", "kv_heads", "keys", "shares"),
    [
        ((1, 128, 32, 128), 8, 32768, True),  # 32 tiles of 128 rows
        ((1, 384, 32, 128), 8, 4096, False),  # 96, and too few keys for so many
        ((1, 384, 32, 128), 8, 11264, True),
        ((1, 512, 32, 128), 8, 32768, False),  # 128
        ((8, 64, 32, 128), 8, 4096, True),  # 128, of which one head would fill half of twice as many
        ((8, 64, 32, 128), 8, 1024, True),
        ((8, 64, 32, 128), 8, 400, False),  # which end before another round would begin
        ((1, 640, 32, 128), 8, 16384, True),  # 160, whose second round would leave most idle
        ((1, 640, 32, 128), 8, 4096, False),
        ((1, 34816, 4, 128), 4, 34816, False),  # a prompt, whose last tiles are short
        ((1, 17, 8, 128), 1, 2048, True),
        ((1, 17, 8, 128), 1, 800, False),
        ((4, 512, 1, 64), 1, 8192, True),
        ((1, 64, 8, 100), 8, 8192, False),  # rows that TMA does not read
    ],
)
def test_chunks_that_leave_a_hopper_idle_share_keys(
    shape: tuple[int, ...],
    kv_heads: int,
    keys: int,
    *,
    shares: bool,
    hopper: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fastest, "_count_processors", lambda index: 132)
    q, k = torch.empty(shape, dtype=torch.bfloat16), torch.empty(1, 1, kv_heads, shape[-1]).bfloat16()
    heads = shape[2], kv_heads
    assert fastest.share_keys("door", q, k, k, heads=heads, keys=keys) == shares
    assert not fastest.share_keys("door", q.float(), k.float(), k.float(), heads=heads, keys=keys)
    fastest.run_on(TRITON)
    assert not fastest.share_keys("door", q, k, k, heads=heads, keys=keys)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("door", [by_transformers, by_flash, by_cache, by_pages, by_sdpa])
def test_chunks_that_share_keys_have_the_same_results(
    door: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = door(20)
    for module in (transformers, call):
        monkeypatch.setattr(module, "share_keys", lambda *given, **named: True)
    repeats.forget()
    assert shares(lambda: door(20))
    torch.testing.assert_close(door(20), expected)


def test_chunks_share_keys_unless_one_split_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def share_keys(*given: Any, keys: int, **named: Any) -> bool:
        found.append(keys)
        return keys > 0

    monkeypatch.setattr(call, "share_keys", share_keys)
    for splits in (0, 1, 3):
        given = partial(flash_attn.flash_attn_with_kvcache, *dense(20), num_splits=splits)
        assert shares(given) == (splits != 1)
    assert found == [N, 0, N]


@pytest.mark.parametrize(
    ("heads", "rows", "most", "options", "packs"),
    [
        ((8, 1, 64), 6144, 64, {}, True),
        ((8, 2, 128), 7680, 1024, {}, True),
        ((8, 4, 128), 6144, 64, {}, False),  # a group of two gains less
        ((8, 1, 128), 7681, 400, {}, False),  # tiles of a head are fuller
        ((8, 1, 64), 6145, 400, {}, False),
        ((8, 1, 128), 6144, 1025, {}, False),  # a sequence may be long
        ((8, 1, 128), 6144, None, {}, False),
        ((8, 1, 128), 6144, 64, {"window": (100, 0)}, False),
    ],
)
def test_short_packed_prompts_fill_tiles_with_rows_of_all_heads(
    heads: tuple[int, int, int],
    rows: int,
    most: int | None,
    options: dict[str, tuple[int, int]],
    *,
    packs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fastest, "targets_of_call", lambda *given, **named: (HOPPER,))
    *numbers, width = heads
    q, k = (torch.empty(rows, number, width, dtype=torch.bfloat16) for number in numbers)
    ends = torch.empty(97, dtype=torch.int32)  # of 96 sequences
    made = call.Call("door", q, k, k, call.check("door", call.PACKED, q=q, k=k, v=k))
    made.set_ragged(ends, None, most=most)
    made.set_packed(ends)
    made.mask(True, options.get("window", (-1, -1)))
    assert fastest.pack_heads("door", made._tensors, made._form, made._most) == packs


@pytest.mark.slow
def test_tiles_with_rows_of_all_heads_have_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.flatten(0, 1) for x in dense(N))
    ends = torch.tensor([0, 5, 5, N, 2 * N], dtype=torch.int32)

    def packed_prompts() -> Any:
        return flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, N, N, causal=True, return_lse=True)

    expected, known = packed_prompts(), len(vars(call.FUNCTIONS))
    monkeypatch.setattr(call, "pack_heads", lambda *given: True)
    repeats.forget()
    torch.testing.assert_close(packed_prompts(), expected)
    assert len(vars(call.FUNCTIONS)) > known  # of another form


@pytest.mark.parametrize("target", fastest.NEEDS)
def test_a_chosen_target_serves_few_queries_too(target: str, hopper: None) -> None:
    q = torch.empty(1, 1, 8, 128, dtype=torch.float16)
    fastest.run_on(target)
    assert targets_of_few("door", q, q, q, sharing=1)[0] == target


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake_gpu(monkeypatch)
    yield
    fastest.run_on(None)


class Trained(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = flash_attn.flash_attn_func(q, k, v, causal=True)
        return result


def test_keys_of_exported_gradients_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """That few keys have kernels of their own is no bound of a program's keys."""
    fake_gpu(monkeypatch)
    q, k, v = (x.bfloat16().requires_grad_() for x in dense(32))
    keys = torch.export.Dim("keys", min=2, max=4096)
    shapes = {"q": None, "k": {1: keys}, "v": {1: keys}}
    made = torch.export.export(Trained(), (q, k, v), dynamic_shapes=shapes)
    (found,) = made.range_constraints.values()
    assert (found.lower, found.upper) == (2, 4096)


def test_queries_of_exported_calls_stay_open() -> None:
    """That few queries have kernels of their own is no bound of a program's queries."""
    q, k, v = dense(32)
    queries = torch.export.Dim("queries", min=2, max=4096)
    shapes = {"q": {1: queries}, "k": None, "v": None}
    made = torch.export.export(Trained(), (q, k, v), dynamic_shapes=shapes)
    (found,) = made.range_constraints.values()
    assert (found.lower, found.upper) == (2, 4096)
    for rows in (3, 40):
        given = draw(B, rows, H, D)
        torch.testing.assert_close(made.module()(given, k, v), Trained()(given, k, v))
