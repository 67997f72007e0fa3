"""What people do with mods and calls besides what is documented: it works, or says what is meant."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

import attnc.flex
from attnc.flex import FlexError, flex_attention, to_spec
from tests.flex.oracle import torch_flex

Q = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("mod", "expected"),
    [
        (lambda score, b, h, q, kv: score * np.float64(2), "* 2.0"),
        (lambda score, b, h, q, kv: np.float64(2) * score, "2.0 *"),
        (lambda score, b, h, q, kv: np.float32(0.5) + score, "0.5 + dot"),
        (lambda score, b, h, q, kv: np.tanh(score), "tanh("),
        (lambda score, b, h, q, kv: np.maximum(score, 0.0), "max("),
        (lambda score, b, h, q, kv: score + np.int64(3) * h, "3 * h"),
        (lambda score, b, h, q, kv: np.float32(2) ** 2 * score, "4.0 *"),
    ],
)
def test_numbers_and_functions_of_numpy(mod: Callable[..., Any], expected: str) -> None:
    (line,) = (line for line in to_spec(mod).splitlines() if "score =" in line)
    assert expected in line


def test_a_number_of_numpy_means_that_number() -> None:
    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return np.float64(0.5) * score - np.float32(0.25) * (q - kv)

    found = flex_attention(Q, Q, Q, mod)
    expected = torch_flex(Q, Q, Q, mod, None)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "mod",
    [
        lambda score, b, h, q, kv: score + np.arange(8)[q],
        lambda score, b, h, q, kv: np.where(q > kv, score, 0),
        lambda score, b, h, q, kv: np.add.outer(score, 1),
    ],
)
def test_arrays_of_numpy_are_refused_with_a_way_out(mod: Callable[..., Any]) -> None:
    with pytest.raises(FlexError, match=r"E0902(.|\n)*on torch's tensors"):
        to_spec(mod)


def test_a_mod_that_prints_shows_what_it_computes(capsys: pytest.CaptureFixture[str]) -> None:
    table = torch.zeros(8)

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        print(f"{q}", score * 2 + table[kv], q > 3)
        return score

    to_spec(mod)
    assert capsys.readouterr().out == (
        "<int q_idx> <float +(*(score, 2), load(kv_idx))> <bool >(q_idx, 3)>\n"
    )


def test_a_long_value_is_shown_in_part(capsys: pytest.CaptureFixture[str]) -> None:
    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        for _ in range(6):
            score = score * score
        print(score)
        return score

    to_spec(mod)
    assert capsys.readouterr().out.count("...") == 32


@pytest.mark.parametrize(
    ("mods", "expected"),
    [
        ({"mask_mod": lambda q, kv: q >= kv}, r"mask_mod: expected a function of \(b, h, q_idx, kv_idx\)"),
        ({"mask_mod": partial(lambda w, b, h, q: q > w, 3)}, r"got partial\(b, h, q\)"),
        ({"score_mod": lambda b, h, q, kv: q >= kv}, r"of \(score, b, .*\), got .*<lambda>\(b, h, q, kv\)"),
        ({"score_mod": "alibi"}, "score_mod: expected a function, got 'alibi'"),
        ({"scale": "small"}, "scale: expected a number, got 'small'"),
    ],
)
def test_a_mod_of_other_arguments_is_named(mods: dict[str, Any], expected: str) -> None:
    with pytest.raises(TypeError, match=expected):
        flex_attention(Q, Q, Q, **mods)


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number(scale: float) -> None:
    with pytest.raises(ValueError, match=r"scale: expected a finite number, got (nan|inf)"):
        flex_attention(Q, Q, Q, scale=scale)


def test_names_of_mods_may_have_any_letters() -> None:
    größe = torch.ones(2)

    def fenêtre(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.max(score * größe[h], score - 1)

    def ß(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.min(q, kv) >= 0

    found = flex_attention(Q, Q, Q, fenêtre, mask_mod=ß)
    expected = torch_flex(Q, Q, Q, fenêtre, ß)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_largest_along_an_axis_is_no_operation_of_two() -> None:
    with pytest.raises(FlexError, match="'max' cannot be written in a spec"):
        to_spec(lambda score, b, h, q, kv: torch.max(score, 0))


@pytest.mark.parametrize(
    ("mod", "hint"),
    [
        (lambda score, b, h, q_idx, kv_idx: score.add_(1.0), "write 'add', and use what it returns"),
        (lambda score, b, h, q_idx, kv_idx: score + score.detach(), "a tensor that requires none"),
    ],
    ids=["in place", "detach"],
)
def test_what_has_another_word_in_a_mod_is_named(mod: Any, hint: str) -> None:
    x = torch.randn(1, 1, 4, 16)
    with pytest.raises(FlexError, match=hint):
        flex_attention(x, x, x, score_mod=mod)


@pytest.mark.parametrize("name", ["two words", "class", "dot", "1st", "fenêtre"])
def test_a_name_that_no_spec_can_have(name: str) -> None:
    with pytest.raises(ValueError, match=r"name: expected letters, digits and '_'.*got '"):
        to_spec(name=name)


def test_a_wrong_call_inside_of_a_mod_is_its_own() -> None:
    def inner(x: Any) -> Any:
        return x

    with pytest.raises(TypeError, match="takes 1 positional argument"):
        to_spec(mask_mod=lambda b, h, q, kv: inner(q, kv))  # type: ignore[call-arg]  # which is the point


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (Q.to_sparse(), "query: expected a dense tensor, got layout torch.sparse_coo"),
        (torch.nested.nested_tensor([Q[0], Q[0]], layout=torch.jagged), "got a nested tensor"),
    ],
)
def test_tensors_without_strides_are_refused(x: torch.Tensor, expected: str) -> None:
    with pytest.raises(TypeError, match=expected):
        flex_attention(x, x, x)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mapped", ["query", "bias", "documents"])
def test_torch_func_transforms_calls_and_what_mods_capture(mapped: str) -> None:
    """Whether documents ascend cannot be seen inside of a transform: nothing depends on it."""
    bias, documents = torch.randn(2, 8, 8), torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])

    def attend(q: torch.Tensor, bias: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score + bias[h, i, j]

        found = flex_attention(q, Q, Q, score_mod, mask_mod=lambda b, h, i, j: documents[i] == documents[j])
        return found.square().sum()  # type: ignore[no-any-return]  # as torch's own

    of_each = {
        "query": [(Q * factor, bias, documents) for factor in (1.0, 2.0)],
        "bias": [(Q, bias * factor, documents) for factor in (1.0, 2.0)],
        "documents": [(Q, bias, documents), (Q, bias, documents * 0)],
    }[mapped]
    axes = tuple(0 if name == mapped else None for name in ("query", "bias", "documents"))
    given = [
        torch.stack(list(xs)) if axis == 0 else xs[0]
        for xs, axis in zip(zip(*of_each, strict=True), axes, strict=True)
    ]
    found = torch.func.vmap(torch.func.grad(attend, argnums=(0, 1)), axes)(*given)
    for number, one in enumerate(of_each):
        leaves = [x.clone().requires_grad_() for x in one[:2]]
        expected = torch.autograd.grad(attend(leaves[0], leaves[1], one[2]), leaves)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x[number], y)


def test_other_names_of_torchs_module_are_torchs() -> None:
    """So that an import changes whole."""
    from torch.nn.attention import flex_attention as torchs

    private = {"_mask_mod_signature", "_score_mod_signature", "_DEFAULT_SPARSE_BLOCK_SIZE"}
    for name in set(torchs.__all__) - {"flex_attention"} | private:
        assert getattr(attnc.flex, name) is getattr(torchs, name)
    with pytest.raises(AttributeError, match=r"module 'attnc\.flex' has no attribute 'nonsense'"):
        attnc.flex.nonsense  # noqa: B018  # that is what is asked


# --- autocast -----------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_converts_as_in_torch(compiled: bool) -> None:
    """Rotary embeddings make queries and keys of 32 bits there, but not values."""
    torch._dynamo.reset()
    function = (
        torch.compile(flex_attention, backend="aot_eager", fullgraph=True) if compiled else flex_attention
    )
    types = torch.float32, torch.float32, torch.bfloat16
    q, k, v = leaves = [torch.randn(1, 2, 9, 16, dtype=kind).requires_grad_() for kind in types]
    expected = flex_attention(q.bfloat16(), k.bfloat16(), v)
    gradients = torch.autograd.grad(expected.float().square().sum(), leaves)
    for _ in range(7):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            o = function(q, k, v)
            theirs = torch_flex_attention(q.detach(), k.detach(), v.detach())
            assert o.dtype is theirs.dtype is torch.bfloat16
        assert torch.equal(o, expected)
        found = torch.autograd.grad(o.float().square().sum(), leaves)
        assert all(map(torch.equal, found, gradients))
    assert flex_attention(q, k, k).dtype is torch.float32
    with pytest.raises(ValueError, match="to have the same dtype"):
        flex_attention(q, k, v)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_autocast_leaves_what_is_no_operand_alone() -> None:
    q = torch.randn(1, 1, 5, 16)
    bias = torch.linspace(-9, 9, 5).requires_grad_()

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[kv_idx]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = flex_attention(q, q, q, biased)
        (gradient,) = torch.autograd.grad(o.float().sum(), bias)
        assert flex_attention(q.double(), q.double(), q.double()).dtype is torch.float64
    low = q.bfloat16()
    assert torch.equal(o, flex_attention(low, low, low, biased))
    assert gradient.dtype is torch.float32
