"""The functions for transformers without a model: every value of an argument beside every value of every
other, held to plain PyTorch, and each call a second time with other numbers.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch._dynamo.testing import CompileCounterWithBackend

from attnc.adapters.specs import tile_rows
from attnc.adapters.transformers import _table, attention, mask
from attnc.api.fastest import count_sharing
from attnc.api.tensors import GivenTensors
from tests.adapters.dropout import keep_weights
from tests.adapters.mask_functions import KINDS, PADDINGS, B, before, functions, padding_of, stand_in
from tests.by_day import each_by_day
from tests.compat.flash_reference import judge
from tests.pairs import Axes, Values, any_of, covering

__all__ = ["stand_in"]

D = 16
BOTH = (False, True)
AXES: Axes = {
    "dtype": (torch.float32, torch.bfloat16),
    "heads": ((4, 4), (4, 2), (3, 1)),
    # queries, keys, and where both begin
    "sizes": ((5, 5, 0, 0), (1, 9, 8, 0), (4, 7, 5, 2), (6, 9, 0, 0)),
    "mask": ("none", *KINDS, "bools", "of keys", "numbers"),
    "padding": PADDINGS,
    "values": (D, 24),
    "softcap": (None, 5.0),
    "scaling": (None, 0.3),
    "sink": BOTH,
    "bias": ("", "shared", "own", "of keys"),
    "dropout": (0.0, 0.25, 0.5),
    "grads": BOTH,
}
OWN = ("none", "bools", "of keys", "numbers")


def fits(x: Values) -> bool:
    """Whether the function takes these values together."""
    if x["padding"] and x["mask"] in OWN:
        return False
    return not (x["mask"] == "around" and x["sizes"][0] == 1)


class Module(torch.nn.Module):
    is_causal = False


@dataclass(frozen=True, slots=True)
class Made:
    """What a call takes, and which keys its queries see: bool[B, 1 or H, M, N]; added: to the scores."""

    leaves: dict[str, torch.Tensor]
    given: Any
    options: dict[str, Any]
    seen: torch.Tensor
    added: torch.Tensor | None


def make(x: Values, seed: int) -> Made:
    """Numbers, masks and options of a call, which follow from the values and the seed."""
    torch.manual_seed(zlib.crc32(f"{x} {seed}".encode()))
    (heads, heads_k), (rows, keys, first_q, first_k) = x["heads"], x["sizes"]
    shapes = {"q": (B, heads, rows, D), "k": (B, heads_k, keys, D), "v": (B, heads_k, keys, x["values"])}
    leaves = {name: torch.randn(shape).to(x["dtype"]) for name, shape in shapes.items()}
    if x["sink"]:
        leaves["s_aux"] = torch.randn(heads)
    if x["bias"]:
        shape = {
            "shared": (1, 1, rows, keys),
            "own": (B, heads, rows, keys),
            "of keys": (1, heads, 1, keys),
        }[x["bias"]]
        leaves["position_bias"] = torch.randn(shape).to(x["dtype"])
    leaves = {name: value.requires_grad_(x["grads"]) for name, value in leaves.items()}
    options = {name: x[name] for name in ("softcap", "scaling", "dropout")}
    options |= {name: leaves[name] for name in ("s_aux", "position_bias") if name in leaves}
    added = leaves.get("position_bias")
    if x["mask"] in OWN:
        seen, given = torch.ones(1, 1, rows, keys, dtype=torch.bool), None
        if x["mask"] == "bools":
            given = torch.rand(B, 1, rows, keys + 2) < 0.7  # of more keys than there are
            seen = given[..., :keys]
        if x["mask"] == "of keys":
            given = torch.rand(B, 1, 1, keys) < 0.7
            seen = given.expand(B, 1, rows, keys)
        if x["mask"] == "numbers":
            given = torch.randn(1, heads, rows, keys).to(x["dtype"])
            added = given if added is None else added.double() + given.double()
        return Made(leaves, given, options, seen, added)
    function, kept = functions(x["mask"]), padding_of(x["padding"], first_k + keys)
    given = mask(B, rows, keys, first_q, first_k, function, kept)
    q_idx, kv_idx = torch.arange(rows)[:, None] + first_q, torch.arange(keys)[None, :] + first_k
    seen = kv_idx <= q_idx if function is None else function(0, 0, q_idx, kv_idx)
    seen = torch.as_tensor(seen).expand(B, 1, rows, keys)
    if kept is not None:
        seen = seen & kept[:, None, None, first_k:].bool()
    return Made(leaves, given, options, seen, added)


def attend(x: Values, made: Made, seed: int, *, low: bool) -> torch.Tensor:
    """o [B, M, H, D] by plain PyTorch. seed: of dropout; low: in the type of q, where float64 is the rule."""
    q, k, v = (made.leaves[name] if low else made.leaves[name].double() for name in "qkv")
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * (D**-0.5 if x["scaling"] is None else x["scaling"])
    if x["softcap"]:
        s = torch.tanh(s / x["softcap"]) * x["softcap"]
    if made.added is not None:
        s = s + made.added.to(s.dtype)
    s = s.masked_fill(~made.seen, -torch.inf)
    if x["sink"]:
        column = made.leaves["s_aux"].to(s.dtype)[None, :, None, None].expand(*s.shape[:3], 1)
        s = torch.cat((s, column), -1)
    blank = ~made.seen.expand(s.shape[0], s.shape[1], *made.seen.shape[2:]).any(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(blank, 0.0), -1)[..., : k.shape[2]].masked_fill(blank, 0.0)
    if x["dropout"]:
        p = p * keep_weights(x["dropout"], seed, p.shape) / (1 - x["dropout"])
    return (p.to(v.dtype) @ v).transpose(1, 2)


def check(x: Values) -> None:
    """Calls the function twice, with other numbers the second time: a plan that is kept holds none."""
    is_low = x["dtype"] is torch.bfloat16
    rate = 3.0 if is_low else 10.0  # differences of sums that should be 0, in f32
    for seed in range(2):
        made = make(x, seed)
        q, k, v = (made.leaves[name] for name in "qkv")
        torch.manual_seed(seed)
        drawn = int(torch.randint(1 << 62, ()))
        torch.manual_seed(seed)
        o, nothing = attention(Module(), q, k, v, made.given, **made.options)
        assert nothing is None
        right, plain = (attend(x, made, drawn, low=low) for low in (False, True))
        # Three products of tf32 leave 2^-22 of each product in f32, where a product of f32 leaves 2^-24.
        judge("o", o, right.detach(), plain.detach(), rate=2.0 if is_low else 4.0)
        if not x["grads"]:
            continue
        do, leaves = torch.randn_like(right), [*made.leaves.values()]
        found = [torch.autograd.grad(y, leaves, do.to(y.dtype)) for y in (o, right, plain)]
        # ds_aux is a sum of p do o over rows, p at most 1, o as it was rounded: by up to 2^-8 of it, and by
        # half of that on average.
        summed = (do * right.detach()).abs().sum((0, 1, 3)).max().item()
        for name, got, exact, low in zip(made.leaves, *found, strict=True):
            rounding = summed * 2.0**-9 if name == "s_aux" and is_low else 0.0
            judge(f"d{name}", got, exact, low, rate=rate, rounding=rounding)


CASES = covering(AXES, fits)


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:attnc. no tile is skipped:UserWarning")
@pytest.mark.parametrize(
    "x", each_by_day(CASES, of=14), ids=lambda x: "-".join(str(value) for value in x.values())
)
def test_every_pair_of_arguments(x: Values) -> None:
    check(x)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:attnc. no tile is skipped:UserWarning")
def test_any_arguments() -> None:
    """By day: a third of the cases that have every pair."""

    @settings(max_examples=600)
    @given(any_of(AXES, fits))
    def run(x: Values) -> None:
        check(x)

    run()


def test_packed_sequences_need_a_mask_that_keeps_them_apart() -> None:
    """As those of transformers' collator, which says both where they begin and their positions."""
    q, starts = torch.randn(1, 4, 9, D), torch.tensor([0, 4, 9], dtype=torch.int32)
    packed: dict[str, Any] = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 5}
    document = torch.arange(9) >= 4
    apart = (document[:, None] == document).tril()[None, None]
    right = torch.nn.functional.scaled_dot_product_attention(q, q, q, apart).transpose(1, 2)
    torch.testing.assert_close(attention(Module(), q, q, q, apart, **packed)[0], right)
    for seen in (None, mask(1, 9, 9)):
        with pytest.raises(ValueError, match="cu_seq_lens_q: expected a mask that keeps packed"):
            attention(Module(), q, q, q, seen, **packed)
    one: dict[str, Any] = {"cu_seq_lens_q": starts[[0, 2]], "cu_seq_lens_k": starts[[0, 2]]}
    attention(Module(), q, q, q, mask(1, 9, 9), **one)


def test_a_compiled_model_takes_a_band_from_outside() -> None:
    """As transformers' `generate` does with static caches."""

    def attend(q: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        assert len(given.shape) == 4
        return attention(Module(), q, q, q, given[:, :, :, :9])[0] * 2

    q = torch.randn(2, 4, 9, D)
    inside = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for kept in (None, (torch.arange(9) >= torch.tensor([[0], [3]])).long()):
        given = mask(2, 9, 9, attention_mask=kept)
        torch.testing.assert_close(inside(q, given), attend(q, given))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_converts_to_its_type(compiled: bool) -> None:
    """As of models with rotary embeddings, whose queries and keys are of 32 bits there."""
    leaves = [torch.randn(1, 2, 5, D).requires_grad_() for _ in range(3)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(Module(), q, k, v.bfloat16(), None)[0]

    function = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    q, k, v = (x.bfloat16() for x in leaves)
    right = attention(Module(), q, k, v, None)[0]
    found = list[torch.Tensor]()
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(function(*leaves))
    assert all(o.dtype is torch.bfloat16 and torch.equal(o, right) for o in found)
    squares = [o.float().square().sum() for o in (found[-1], right)]
    torch.testing.assert_close(*(torch.autograd.grad(x, leaves, retain_graph=True) for x in squares))
    with pytest.raises(TypeError, match=r"value: expected dtype torch\.float32, like query"):
        attend(*leaves)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_model_drops_the_same_weights(dynamic: bool) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(Module(), q, k, v, None, is_causal=False, dropout=0.4)[0]

    inside = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (5, 7):
        leaves = [torch.randn(1, 2, rows, D).requires_grad_() for _ in range(3)]
        found = []
        for function in (inside, attend):
            torch.manual_seed(rows)
            o = function(*leaves)
            found.append([o, *torch.autograd.grad(o.sum(), leaves)])
        torch.testing.assert_close(*found)


class Model(Module):
    """A layer of a model that makes its mask in its forward pass."""

    is_causal = True

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        made = mask(x.shape[0], x.shape[2], x.shape[2], mask_function=self.function, attention_mask=kept)
        return attention(self, x, x, x, made)[0]


def kept_keys(kind: str) -> torch.Tensor | None:
    kept = torch.ones(2, 20, dtype=torch.int64)
    if kind == "all":
        return None
    kept[0, :6], kept[1, 17:] = 0, 0
    if kind == "holes":
        kept[1, 5:8] = 0
    return kept


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:attnc. no tile is skipped")
@pytest.mark.parametrize("kind", ["all", "padding", "holes"])
def test_a_graph_holds_a_mask_and_needs_no_break(kind: str) -> None:
    torch._dynamo.reset()
    model, kept = Model(None), kept_keys(kind)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        x = torch.randn(2, 2, 20, 16)
        torch.testing.assert_close(compiled(x, kept), model(x, kept))


@pytest.mark.filterwarnings("ignore:attnc. no tile is skipped")
@pytest.mark.one_in(6)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["all", "padding", "holes"])
@pytest.mark.parametrize("function", [None, before])
def test_a_model_is_exported_with_its_mask(function: Any, kind: str, strict: bool) -> None:
    torch._dynamo.reset()
    model, kept = Model(function), kept_keys(kind)
    x = torch.randn(2, 2, 20, 16)
    exported = torch.export.export(model, (x, kept), strict=strict).module()
    for keys in (kept, None if kept is None else kept.flip(0)):
        x = torch.randn(2, 2, 20, 16)
        torch.testing.assert_close(exported(x, keys), model(x, keys))


def test_a_graph_of_many_queries_serves_any_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnc.adapters.transformers.SHORT_KEYS", 30)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")

    def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return attention(torch.nn.Identity(), q, k, k, None, is_causal=False)[0]

    compiled = torch.compile(attend, fullgraph=True, backend=counter, dynamic=True)
    q = torch.randn(1, 2, 20, 16)
    for keys in (24, 40):
        k = torch.randn(1, 2, keys, 16)
        torch.testing.assert_close(compiled(q, k), attend(q, k))
    assert counter.frame_count == 1


def test_masks_and_biases_broadcast_on_each_axis_alone() -> None:
    checked, lengths = GivenTensors(), (2, 4, 3, 5)
    for axis, size in enumerate(lengths[:3]):
        for wrong in range(1, 6):
            shape = [*lengths]
            shape[axis] = wrong
            x = torch.zeros(shape)
            if wrong in (1, size):
                assert _table("bias", x, lengths, checked).shape == (*shape[:3], 5)
                continue
            with pytest.raises(ValueError, match=r"bias: expected shape \[2 or 1, 4 or 1, 3 or 1, 5\]"):
                _table("bias", x, lengths, checked)
    assert _table("bias", torch.zeros(1, 1, 1, 9), lengths, checked).shape == (1, 1, 1, 5)
    with pytest.raises(ValueError, match="bias: expected shape"):
        _table("bias", torch.zeros(1, 1, 1, 4), lengths, checked)


def test_kernels_are_those_of_gradients_or_of_few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    forms: list[tuple[Any, ...]] = []

    def name_of(*form: Any) -> str:
        forms.append(form)
        raise Asked

    monkeypatch.setattr("attnc.adapters.transformers._form_name", name_of)
    module = torch.nn.Module()
    module.is_causal = False  # type: ignore[assignment]  # as transformers' modules have it

    def asked(rows: int, heads: int, kv_heads: int, *, learns: bool = False) -> tuple[Any, int]:
        q, k = torch.zeros(2, heads, rows, D), torch.zeros(2, kv_heads, 40, D)
        with pytest.raises(Asked):
            attention(module, q.requires_grad_(learns), k, k, None)
        *_, grads, tile, _ = forms[-1]
        return grads, tile

    assert asked(1, 8, 2) == ((), tile_rows(count_sharing(1, 8, 2)))
    assert asked(1, 40, 8) == ((), tile_rows(count_sharing(1, 40, 8)))
    assert asked(3, 40, 8) == ((), tile_rows(count_sharing(3, 40, 8)))
    assert asked(100, 4, 2) == ((), 0)
    assert asked(1, 8, 2, learns=True) == (("q", "k", "v"), 0)
    with torch.no_grad():
        assert asked(1, 8, 2, learns=True)[0] == ()
