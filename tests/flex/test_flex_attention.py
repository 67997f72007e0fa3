"""`flex_attention` as a stand-in for torch's: layouts, arguments, block masks, and what is compiled again."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, noop_mask

from attnc.api.compile import SpecWarning, compile_family
from attnc.flex import family_of, flex_attention, programs, tape, to_spec
from tests.flex.mods import Setting, causal
from tests.flex.oracle import compare_strides, dense_flex, gradients, torch_flex
from tests.processes import run_program


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The specs that the test compiles, with none known before."""
    specs: list[str] = []
    original = compile_family
    monkeypatch.setattr(programs, "_PROGRAMS", {})

    def noting(text: str, **options: Any) -> Any:
        specs.append(text)
        return original(text, **options)

    monkeypatch.setattr(programs, "compile_family", noting)
    return specs


def made(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)


def test_lengths_that_differ_are_aligned_at_the_top_left() -> None:
    q, k, v = made(1, 2, 9, 16), made(1, 2, 21, 16, seed=1), made(1, 2, 21, 8, seed=2)
    close(flex_attention(q, k, v, mask_mod=causal), torch_flex(q, k, v, None, causal))


def test_groups_of_heads_and_a_shared_batch() -> None:
    q, k, v = made(3, 4, 9, 16), made(1, 2, 21, 16, seed=1), made(1, 2, 21, 16, seed=2)

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + h - b

    close(
        flex_attention(q, k, v, mod, mask_mod=causal, enable_gqa=True, scale=0.3),
        torch_flex(q, k, v, mod, causal, enable_gqa=True, scale=0.3),
    )


def test_the_result_is_laid_out_as_the_query() -> None:
    rows_first = made(2, 9, 3, 16)
    q = rows_first.transpose(1, 2)
    o = flex_attention(q, q, q, mask_mod=causal)
    assert o.shape == q.shape
    assert o.transpose(1, 2).is_contiguous()
    close(o, torch_flex(q, q, q, None, causal))
    assert flex_attention(q.contiguous(), q, q, mask_mod=causal).is_contiguous()


def test_no_argument_is_copied_but_one_with_a_strided_last_axis() -> None:
    q = made(1, 2, 16, 9).mT
    close(flex_attention(q, q, q), torch_flex(q, q, q, None, None))


@pytest.mark.usefixtures("gradients_on_cpu")
def test_lse_has_gradients_and_auxiliary_outputs() -> None:
    q, k, v = (made(1, 2, 9, 16, seed=seed).requires_grad_() for seed in range(3))
    o, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    expected, lse = torch_flex(q, k, v, None, None, return_lse=True)
    close(o, expected)
    close(aux.lse, lse)
    for found, right in zip(gradients(aux.lse, (q, k)), gradients(lse, (q, k)), strict=True):
        assert found is not None
        assert right is not None
        close(found, right)


def test_a_block_mask_gives_its_mask_mod() -> None:
    q = made(1, 2, 40, 16)
    block_mask = create_block_mask(causal, None, None, 40, 40, device="cpu")
    assert torch.equal(
        flex_attention(q, q, q, block_mask=block_mask), flex_attention(q, q, q, mask_mod=causal)
    )
    noop = create_block_mask(noop_mask, None, None, 40, 40, device="cpu")
    close(flex_attention(q, q, q, block_mask=noop), torch_flex(q, q, q, None, None))


def test_a_block_mask_of_blocks_alone_is_looked_up() -> None:
    q = made(1, 1, 32, 16)
    counts, columns = torch.tensor([[[1, 1]]]).int(), torch.tensor([[[[1, 0], [0, 1]]]]).int()
    block_mask = BlockMask.from_kv_blocks(counts, columns, BLOCK_SIZE=16)

    def other_half(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q // 16 != kv // 16

    close(flex_attention(q, q, q, block_mask=block_mask), torch_flex(q, q, q, None, other_half))


def test_a_mask_that_is_looked_up_warns_the_caller_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnc.api.compile._SAID", set())
    monkeypatch.setattr("attnc.flex.programs._PROGRAMS", {})
    q, k, kept = made(1, 2, 32, 16), made(1, 1, 32, 16), torch.rand(2, 32, 32) > 0.3

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return kept[h, q, kv]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for scale in (None, None, 0.5):  # the last has another kernel of the same mask
            flex_attention(q, k, k, mask_mod=mask, scale=scale, enable_gqa=True)
    assert re.match("flex_attention: no tile is skipped.*'kept'", str(caught[0].message))
    assert caught[0].category is SpecWarning
    assert [found.filename for found in caught] == [__file__]


def test_blocks_of_a_mask_that_is_looked_up_are_found() -> None:
    """Of documents whose numbers do not ascend: keys of other blocks may be NaN."""
    documents = torch.tensor([4, 0, 9])[torch.arange(300) // 128]
    q = made(1, 2, 300, 16).requires_grad_()
    v = made(1, 2, 300, 16)

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return documents[q] == documents[kv]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = flex_attention(q, q.detach(), v, mask_mod=mask)
    close(found.detach(), torch_flex(q.detach(), q.detach(), v, None, mask))
    v[:, :, :128] = torch.nan
    found = flex_attention(q, q.detach(), v, mask_mod=mask)
    assert found[:, :, 128:].isfinite().all()
    assert torch.autograd.grad(found[:, :, 128:].sum(), q)[0][:, :, 128:].isfinite().all()


def test_other_lengths_and_data_compile_nothing(compiled: list[str]) -> None:
    for length in (20, 33, 48):
        setting = Setting(S=length, seed=length)
        document = setting.documents()
        q = made(1, 2, length, 16)

        def mask(b: Any, h: Any, q: Any, kv: Any, document: torch.Tensor = document) -> Any:
            return document[q] == document[kv]

        close(flex_attention(q, q, q, mask_mod=mask), torch_flex(q, q, q, None, mask))
    assert len(compiled) == 1
    assert compiled[0].count("is sorted") == 2


def test_numbers_that_go_on_changing_become_arguments(compiled: list[str]) -> None:
    q = made(1, 1, 20, 16)
    for step in range(8):
        cap, width = 5.0 + step, 3 + step

        def mod(score: Any, b: Any, h: Any, q: Any, kv: Any, cap: float = cap) -> Any:
            return cap * torch.tanh(score / cap)

        def window(b: Any, h: Any, q: Any, kv: Any, width: int = width) -> Any:
            return (q - kv <= width) & (q >= kv)

        close(flex_attention(q, q, q, mod, mask_mod=window), torch_flex(q, q, q, mod, window))
    assert len(compiled) == 5
    assert "input constant: f32[]" in compiled[-1]
    assert "input constant_0: f32[]" in compiled[-1]
    assert "i32[]" in compiled[-1]


def test_what_is_read_of_a_tensor_is_remembered_with_its_version() -> None:
    document = torch.tensor([0, 0, 1, 2], dtype=torch.int32)
    assert tape.facts_of(document) == (True, True)
    document[1] = 3
    assert tape.facts_of(document) == (False, True)
    document[2] = -1
    assert tape.facts_of(document[1:]) == (False, False)


def test_integers_of_inference_mode_are_looked_at_at_every_call() -> None:
    """torch does not count how often they change."""
    q, tiles = made(1, 1, 64, 16), {"BLOCK_M": 16, "BLOCK_N": 16}
    with torch.inference_mode():
        document = torch.arange(64) // 16

        def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return document[q_idx] == document[kv_idx]

        flex_attention(q, q, q, mask_mod=same, kernel_options=tiles)
        document.copy_(torch.arange(64) % 3)
        found = flex_attention(q, q, q, mask_mod=same, kernel_options=tiles)
    torch.testing.assert_close(found.double(), torch_flex(q, q, q, None, same), rtol=1e-4, atol=1e-5)


def test_order_that_is_lost_is_noticed() -> None:
    q, document = made(1, 1, 24, 16), torch.arange(24, dtype=torch.int32) // 9

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return document[q] == document[kv]

    for _ in range(2):
        close(flex_attention(q, q, q, mask_mod=mask), torch_flex(q, q, q, None, mask))
        document[:5] = 7


def test_a_condition_on_the_score_excludes_keys() -> None:
    """No mask depends on the product of q and k: the score is minus infinity there."""
    q, k, limit = made(2, 2, 9, 16), made(2, 2, 21, 16, seed=1), torch.tensor([0.3, 1.0])

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where(score <= limit[b], torch.where(q >= kv, score, -torch.inf), -torch.inf)

    def either(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where(
            score > 9, torch.where(q > 3, score, -torch.inf), torch.where(q < 5, 2.0, -torch.inf)
        )

    for each in (mod, either):
        close(flex_attention(q, k, k, each), torch_flex(q, k, k, each, None))
    assert "mask = q_idx >= kv_idx" in to_spec(mod, query=q, key=k, value=k)


@pytest.mark.usefixtures("gradients_on_cpu")
def test_largest_scores_have_no_gradient() -> None:
    q, k = made(2, 4, 9, 16).requires_grad_(), made(1, 2, 21, 16, seed=1)
    table = made(4, 9, seed=2)

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where(kv == 5, -torch.inf, score * 2 + table[h, q] / (1 + kv % 3))

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q - kv < 4) & (q != 6)

    o, aux = flex_attention(
        q, k, k, mod, mask_mod=mask, enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True)
    )
    _, lse, largest = dense_flex(
        q, k.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1), mod, mask, enable_gqa=True
    )
    close(aux.max_scores, largest)
    close(aux.lse, lse)
    assert aux.max_scores.isneginf().nonzero()[:, 2].unique().tolist() == [6]
    assert not aux.max_scores.requires_grad
    assert o.requires_grad
    _, alone = flex_attention(
        q, k, k, mod, mask_mod=mask, enable_gqa=True, return_aux=AuxRequest(max_scores=True)
    )
    assert alone.lse is None
    assert torch.equal(alone.max_scores, aux.max_scores)
    _, empty = flex_attention(
        q, k[:, :, :0], k[:, :, :0], enable_gqa=True, return_aux=AuxRequest(max_scores=True)
    )
    assert empty.max_scores.isneginf().all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_keys_and_values_of_8_bits(dtype: torch.dtype) -> None:
    q = made(1, 2, 9, 16, dtype=torch.bfloat16)
    k, v = (made(1, 2, 21, 16, seed=seed).to(dtype) for seed in (1, 2))
    expected = torch_flex(q.float(), k.float(), v.float(), None, causal)
    found = flex_attention(q, k, v, mask_mod=causal)
    assert found.dtype == q.dtype
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)
    close(flex_attention(q.float(), k, v, mask_mod=causal), expected)
    family = family_of(q, k, v, mask_mod=causal)
    assert f"input k, v: {'e4m3' if dtype == torch.float8_e4m3fn else 'e5m2'}[" in str(family.spec)
    o = flex_attention(q.clone().requires_grad_(), k, v, mask_mod=causal)
    assert o.requires_grad
    torch.testing.assert_close(o.double(), expected, rtol=1e-2, atol=1e-2)
    bias = made(2, 21, seed=3).requires_grad_()
    o = flex_attention(q, k, v, lambda score, b, h, q, kv: score + bias[h, kv])
    assert gradients(o, [bias])[0] is not None


def test_float64_is_computed_by_torch() -> None:
    q, k = made(1, 2, 9, 4).double(), made(1, 2, 21, 4, seed=1).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        found = flex_attention(q, k, k, lambda s, b, h, q, kv: torch.atan(s), mask_mod=causal, scale=0.3)
        block_mask = create_block_mask(causal, None, None, 9, 21, device="cpu")
        o, lse = flex_attention(q, k, k, block_mask=block_mask, return_lse=True)
    assert found.dtype == o.dtype == lse.dtype == torch.float64
    expected = torch_flex(q, k, k, lambda s, b, h, q, kv: torch.atan(s), causal, scale=0.3)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(o, torch_flex(q, k, k, None, causal))
    with pytest.raises(TypeError, match=r"query: expected dtype .*, got torch\.float64"):
        flex_attention(q, k, k, target="triton")


AUXILIARY: dict[str, Any] = {
    "nothing": None,
    "nothing by name": AuxRequest(),
    "lse": AuxRequest(lse=True),
    "largest": AuxRequest(max_scores=True),
    "of an older torch": SimpleNamespace(lse=True),
}


@pytest.mark.parametrize("laid", ["BHMD", "BHDM"])
def test_what_is_asked_for_comes_at_every_call(laid: str) -> None:
    """The first calls look at their arguments, later ones repeat them. One mod reads data that changes, one
    makes a tensor of it.
    """
    stored = made(*({"B": 1, "H": 2, "M": 9, "D": 16}[axis] for axis in laid))
    q, k, v = (
        stored.permute([laid.index(axis) for axis in "BHMD"]),
        made(1, 2, 11, 16),
        made(1, 2, 11, 16, seed=3),
    )
    table = made(11, seed=4)
    mods = [
        lambda score, b, h, q, kv: score + table[kv],
        lambda score, b, h, q, kv: score * 2 + (table * 0.5)[kv],
    ]
    for mod in mods:
        for _ in range(4):
            o, lse, largest = dense_flex(q, k, v, mod, causal)
            for name, asked in AUXILIARY.items():
                found = flex_attention(q, k, v, mod, mask_mod=causal, return_aux=asked)
                out, aux = (found, None) if asked is None else found
                close(out, o)
                compare_strides(out, q)
                if asked is None or aux is None:
                    continue
                for ours, right, is_wanted in (
                    (aux.lse, lse, asked.lse), (aux.max_scores, largest, getattr(asked, "max_scores", False)),
                ):  # fmt: skip
                    assert (ours is not None) == is_wanted, name
                    if is_wanted:
                        close(ours, right)
            table.neg_()


def test_a_family_is_that_of_the_same_call() -> None:
    q, k = made(1, 2, 9, 16), made(1, 2, 21, 16)
    spec = str(family_of(q, k, k, mask_mod=causal, scale=0.25).spec)
    assert "lse" not in spec
    assert "output lse" in str(family_of(q, k, k, mask_mod=causal, return_lse=True).spec)
    assert "grad" not in spec
    assert "grad q\n" in str(family_of(q.requires_grad_(), k, k, mask_mod=causal).spec)
    with torch.no_grad():
        assert "grad" not in str(family_of(q, k, k, mask_mod=causal).spec)


def test_return_lse_is_deprecated_as_in_torch() -> None:
    q = made(1, 2, 9, 16)
    with pytest.warns(FutureWarning, match="return_lse is deprecated") as caught:
        o, lse = flex_attention(q, q, q, return_lse=True)
    assert caught[0].filename == __file__
    expected, aux = flex_attention(q, q, q, return_aux=AuxRequest(lse=True))
    assert torch.equal(o, expected)
    assert torch.equal(lse, aux.lse)


@pytest.mark.slow
def test_torchs_block_masks_may_come_first() -> None:
    """They import Triton, as a compiler."""
    program = """if True:
        import torch, triton.language
        from torch.nn.attention.flex_attention import create_block_mask
        q = torch.ones(1, 2, 9, 16)
        mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 9, 9, device="cpu")
        from attnc.flex import flex_attention
        print(float(flex_attention(q, q, q, block_mask=mask).sum()))
    """
    done = run_program(program, check=True, has_attnc=True)
    assert done.stdout == "288.0\n"


def test_options_choose_tiles() -> None:
    q = made(1, 1, 20, 16)
    options = {"BLOCK_M": 32, "fwd_BLOCK_N": 32, "num_stages": 1, "PRESCALE_QK": True}
    close(flex_attention(q, q, q, kernel_options=options), torch_flex(q, q, q, None, None))


def test_the_cuda_target() -> None:
    q = made(1, 2, 20, 16, dtype=torch.float16)
    found = flex_attention(q, q, q, mask_mod=causal, target="cuda.sm_80")
    torch.testing.assert_close(found.double(), torch_flex(q, q, q, None, causal), rtol=0, atol=2e-3)


def mask_for(M: int, N: int, **sizes: int) -> BlockMask:
    return create_block_mask(causal, sizes.get("B"), sizes.get("H"), M, N, device="cpu")


Q = made(1, 2, 4, 16)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": 1.0}, TypeError, "query: expected a tensor, got float"),
    ({"key": Q[0]}, ValueError, r"key: expected a tensor \[B, H, length, D\], got shape \[2, 4, 16\]"),
    (
        {"value": Q.half()},
        ValueError,
        "Expected query, key, and value to have the same dtype.*value.dtype: torch.float16",
    ),
    ({"key": Q.to(torch.float8_e4m3fn)}, ValueError, "or key and value one of torch.float8_e4m3fn"),
    ({"query": Q.double()}, TypeError, "query: expected dtype .*, got torch.float64"),
    ({"key": Q.to("meta")}, ValueError, "the same device type, but got query.device: cpu, key.device: meta"),
    ({"key": Q[..., :8]}, ValueError, "key: expected rows of 16, like query, got 8"),
    (
        {"value": Q[:, :, :2]},
        ValueError,
        r"value: expected heads and length \[2, 4\], like key, got \[2, 2\]",
    ),
    (
        {"query": Q.repeat(1, 2, 1, 1)},
        ValueError,
        "enable_gqa: expected True where query has 4 heads and key 2",
    ),
    ({"query": Q[:, :1], "enable_gqa": True}, ValueError, "query: expected a multiple of the 2 heads of key"),
    ({"query": Q[:, :0], "key": Q[:, :0], "value": Q[:, :0]}, ValueError, "key: expected at least one head"),
    ({"key": Q.repeat(2, 1, 1, 1)}, ValueError, "key, value: expected a batch of 1, like query, or 1, got 2"),
    (
        {"key": Q.repeat(2, 1, 1, 1), "value": Q.repeat(2, 1, 1, 1)},
        ValueError,
        "key, value: expected a batch of 1, like query, or 1, got 2 and 2",
    ),
    ({"value": Q.repeat(2, 1, 1, 1)}, ValueError, "expected a batch of 1, like query, or 1, got 1 and 2"),
    ({"query": Q[..., :0], "key": Q[..., :0]}, ValueError, "query: expected rows of at least one element"),
    ({"value": Q[..., :0]}, ValueError, r"value: expected rows of at least one element, got \[1, 2, 4, 0\]"),
    ({"query": Q.to_sparse()}, TypeError, "query: expected a dense tensor, got layout torch.sparse_coo"),
    (
        {"mask_mod": causal, "block_mask": mask_for(4, 4)},
        ValueError,
        "mask_mod: expected None beside a block",
    ),
    ({"block_mask": causal}, TypeError, "block_mask: expected a BlockMask of torch's, got function"),
    ({"kernel_options": 3}, TypeError, "kernel_options: expected a dict, got int"),
    ({"kernel_options": {"BLOCK": 1}}, ValueError, "kernel_options: BLOCK: expected one of BLOCK_M"),
    (
        {"kernel_options": {"BLOCK_M": 33}},
        ValueError,
        "kernel_options: BLOCK_M: expected a power of two or a multiple of 16, at most 1024, got 33",
    ),
    ({"kernel_options": {"fwd_num_warps": 3}}, ValueError, "expected 1, 2, 4, 8, 12 or 16, got 3"),
    ({"kernel_options": {"num_stages": -1}}, ValueError, "num_stages: expected 1 to 8, got -1"),
    (
        {"kernel_options": {"BLOCK_M": "1"}},
        ValueError,
        "kernel_options: BLOCK_M: expected an integer, got '1'",
    ),
    ({"kernel_options": {"BACKEND": "CUDA"}}, ValueError, "Invalid BACKEND value 'CUDA'"),
    (
        {"kernel_options": {"BACKEND": "TRITON", "FORCE_USE_FLEX_ATTENTION": True}},
        RuntimeError,
        "BACKEND cannot be combined with legacy FORCE_USE_FLEX_ATTENTION",
    ),
    (
        {"return_lse": True, "return_aux": AuxRequest()},
        ValueError,
        "Cannot specify both return_lse and return_aux",
    ),
    (
        {"block_mask": mask_for(5, 4)},
        ValueError,
        r"block_mask was created for lengths \[5, 4\], got .* \[4, 4\]",
    ),
    (
        {"block_mask": mask_for(4, 3)},
        ValueError,
        r"block_mask was created for lengths \[4, 3\], got .* \[4, 4\]",
    ),
    ({"block_mask": mask_for(4, 4, H=3)}, ValueError, "block_mask: expected heads 1 or 2, like query, got 3"),
    ({"block_mask": mask_for(4, 4, B=2)}, ValueError, "block_mask: expected sequences 1 or 1"),
    ({"block_mask": mask_for(4, 4)[:, :, 0]}, RuntimeError, "Cannot use mask_mod from a sliced BlockMask"),
    ({"block_mask": mask_for(4, 4).to("meta")}, RuntimeError, "block_mask to be on the same device"),
]


@pytest.mark.parametrize(("changed", "error", "message"), WRONG)
def test_wrong_arguments(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flex_attention(**({"query": Q, "key": Q, "value": Q} | changed))
