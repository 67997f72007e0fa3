"""`flex_attention` under torch.compile: one graph, the same bits, and nothing traced again for lengths."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.utils.checkpoint import checkpoint

from attnc.api.compile import SpecError
from attnc.flex import FlexError, flex_attention
from attnc.flex.compiled import _scale_scores, read, written
from attnc.flex.layouts import order_like
from attnc.flex.recording import Recorder
from attnc.flex.trace import trace
from attnc.support.memory import lay_like
from tests.flex.mods import Case, Setting, causal
from tests.flex.oracle import gradients
from tests.flex.test_mods import NIGHTLY, TODAY, tensors

CASES = TODAY if NIGHTLY else [case for case in TODAY if case.name in ("documents_score", "learned_window")]


@pytest.fixture(autouse=True)
def nothing_traced() -> None:
    torch._dynamo.reset()


def compiled(function: Any, backend: str = "eager", **options: Any) -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mods_compute_what_they_do_outside_of_a_graph(case: Case) -> None:
    setting = Setting()
    q, k, v = tensors(setting)
    score_mod, mask_mod = case.make(setting)
    leaves = (q, k, v, *setting.learned)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        aux = AuxRequest(lse=True, max_scores=True)
        return flex_attention(q, k, v, score_mod, mask_mod=mask_mod, return_aux=aux)

    o, aux = call(q, k, v)
    inside, aux_inside = compiled(call)[0](q, k, v)
    assert torch.equal(inside, o)
    assert torch.equal(aux_inside.lse, aux.lse)
    assert torch.equal(aux_inside.max_scores, aux.max_scores)
    for found, right in zip(gradients(inside, leaves), gradients(o, leaves), strict=True):
        assert found is not None
        assert torch.equal(found, torch.zeros_like(found) if right is None else right)


class Layer(torch.nn.Module):
    """Mods that are made where the graph is traced, with learned tensors of every kind of use."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.linspace(-1, 1, 2 * 64).view(2, 64))
        self.rows = torch.nn.Parameter(torch.linspace(0, 1, 2 * 2 * 3).view(2, 2, 3))
        self.heat = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, document: torch.Tensor, width: int) -> Any:
        def biased(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            row = self.rows[1, h]
            return score * self.heat + self.bias[h, q] + row[0] * torch.tanh(row[2] * score)

        def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return (document[q] == document[kv]) & (q - kv <= width) & ~(q < kv)

        return flex_attention(x, x, x, biased, mask_mod=mask)


def test_lengths_numbers_and_data_share_a_graph() -> None:
    layer = Layer()
    inside, counter = compiled(layer, "aot_eager", dynamic=True)
    for length in (20, 33):
        x = torch.randn(1, 2, length, 16, generator=torch.Generator().manual_seed(length)).requires_grad_()
        arguments = (x, torch.arange(length, dtype=torch.int32) // (length // 3), 5 + length // 4)
        found, expected = inside(*arguments), layer(*arguments)
        assert torch.equal(found, expected)
        leaves = (x, *layer.parameters())
        for ours, right in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
            assert ours is not None
            assert right is not None
            assert torch.equal(ours, right)
    assert counter.frame_count == 1


def test_a_transposed_query_lays_out_the_result() -> None:
    q = torch.randn(2, 9, 3, 16).transpose(1, 2)
    o = compiled(lambda q: flex_attention(q, q, q, mask_mod=causal), "aot_eager")[0](q)
    assert o.transpose(1, 2).is_contiguous()
    assert torch.equal(o, flex_attention(q, q, q, mask_mod=causal))


def test_arguments_mean_the_same_in_a_graph() -> None:
    q, k = torch.randn(2, 4, 9, 16), torch.randn(1, 2, 21, 16)
    block_mask = create_block_mask(causal, None, None, 9, 21, device="cpu")

    def call(q: torch.Tensor, k: torch.Tensor) -> Any:
        options = {"BLOCK_M": 32, "num_stages": 1}
        return flex_attention(
            q, k, k, block_mask=block_mask, scale=0.3, enable_gqa=True, kernel_options=options,
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip

    (o, aux), (expected, expected_aux) = compiled(call)[0](q, k), call(q, k)
    assert torch.equal(o, expected)
    assert torch.equal(aux.lse, expected_aux.lse)


def test_a_call_without_mods() -> None:
    q = torch.randn(1, 2, 9, 16)
    assert torch.equal(compiled(lambda q: flex_attention(q, q, q))[0](q), flex_attention(q, q, q))


def test_what_no_spec_can_say_is_named_while_tracing() -> None:
    def wrong(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.atan(score)

    q = torch.randn(1, 1, 9, 16)
    with pytest.raises(Exception, match=r"E0901(.|\n)*'atan' cannot be written in a spec"):
        compiled(lambda q: flex_attention(q, q, q, wrong))[0](q)


def test_what_torch_hides_is_refused_and_not_guessed() -> None:
    def hidden(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score - abs(q - kv)

    q = torch.randn(1, 2, 9, 16)
    with pytest.raises(Exception, match=r"write torch.abs\(x\) for abs\(x\)"):
        compiled(lambda q: flex_attention(q, q, q, hidden))[0](q)
    inside = torch.compile(lambda q: flex_attention(q, q, q, hidden), backend="eager")(q)
    assert torch.equal(inside, flex_attention(q, q, q, hidden))


def test_options_may_be_dynamic() -> None:
    q = torch.randn(1, 2, 40, 16)
    inside, _ = compiled(flex_attention, dynamic=True)
    for options in ({"BLOCK_N": 32, "BLOCK_M": 16}, {"BLOCK_N": 16, "BLOCK_M": 16}):
        assert torch.equal(
            inside(q, q, q, kernel_options=options), flex_attention(q, q, q, kernel_options=options)
        )
    with pytest.raises(Exception, match="Invalid BACKEND value"):
        inside(q, q, q, kernel_options={"BACKEND": "CUDA"})


def test_a_mod_that_branches_is_refused_at_its_line() -> None:
    """torch.compile leaves the graph there, and Python asks a value without data."""

    def branching(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        if q > kv:
            return score
        return score * 2

    def asking(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score * q.item()

    q = torch.randn(1, 1, 9, 16)
    for mod, text in ((branching, "if q > kv:"), (asking, "q.item()")):
        with pytest.raises(FlexError, match="E0902") as caught:
            torch.compile(lambda q, mod=mod: flex_attention(q, q, q, mod), backend="eager")(q)
        span = caught.value.diagnostics[0].primary.span
        assert span.source.path.endswith("test_compiled.py")
        assert text in span.source.text[span.start - 4 : span.start + 9]


def test_an_error_in_a_graph_names_the_line_of_the_mod() -> None:
    def wrong(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.atan(score)

    q = torch.randn(1, 1, 9, 16)
    with pytest.raises(Exception, match=r"test_compiled.py:\d+(.|\n)*def wrong\(score"):
        compiled(lambda q: flex_attention(q, q, q, wrong))[0](q)


UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
OPERATIONS: list[Any] = [
    lambda s, q, kv: 1 - s * 2,
    lambda s, q, kv: 2.0**-s / (3 + kv),
    lambda s, q, kv: 1 / (1 + s * s) + q // 3 - kv % 4,
    lambda s, q, kv: torch.where(~(q >= kv) | (kv == 0), -2.0, s),
    lambda s, q, kv: s.clamp(min=-1, max=2).to(torch.float32) + torch.zeros_like(s),
    lambda s, q, kv: s + torch.tensor(0.5, dtype=s.dtype, device=s.device) * (q > kv),
    lambda s, q, kv: torch.nn.functional.gelu(-s, approximate="tanh") + (kv < 1),
    lambda s, q, kv: s.masked_fill(kv >= 3, -1.0) + s.new_full((), 2.0),
    lambda s, q, kv: F.tanh(s) + F.sigmoid(s) * F.hardswish(s) - F.hardsigmoid(s),  # which torch hides
    lambda s, q, kv: s + (q & kv) - (kv ^ (q + 1)),
]


def test_operations_are_the_same_in_a_graph() -> None:
    q = torch.randn(1, 1, 9, 16)

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return sum(operation(score, q, kv) for operation in OPERATIONS)

    def call(q: torch.Tensor) -> Any:
        return flex_attention(q, q, q, mod)

    assert torch.equal(compiled(call, dynamic=True)[0](q), call(q))


class Seen(torch.Tensor):
    """Notes by name what is called with it."""

    names: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.names.append(f"{function.__module__}.{function.__name__}")
        show = super().__torch_function__
        return show(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch's


def raising(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    raise ValueError("of the mod")


def branching(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score if kv > 3 else -score


@pytest.mark.parametrize("mod", [lambda score, b, h, q, kv: F.tanh(score), raising, branching])
def test_what_mods_call_is_shown_to_recordings_alone(mod: Any) -> None:
    """Subclasses of tensors see of F.tanh and F.sigmoid what they see without attnc: nothing, in a graph."""
    from torch._dynamo.variables.torch import get_overridable_functions

    before, q = set(get_overridable_functions()), torch.randn(1, 1, 9, 16)

    def call(q: torch.Tensor, x: torch.Tensor) -> Any:
        return flex_attention(q, q, q, mod), F.tanh(x) + F.sigmoid(x)

    with suppress(Exception):
        compiled(call)[0](q, torch.ones(3).as_subclass(Seen))
    assert set(get_overridable_functions()) == before
    assert not any(name.startswith("torch.nn.functional.") for name in Seen.names)


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")  # of strict export
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_holds_its_mods(strict: bool, tmp_path: Path) -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = torch.nn.Parameter(torch.randn(2))

        def forward(self, q: torch.Tensor) -> Any:
            def sloped(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
                return torch.where((q >= kv) & ~(kv == 3), score + self.slope[h] * (q - kv), -1.0)

            return flex_attention(q, q, q, sloped)

    module = Attention()
    rows = torch.export.Dim("rows", min=2, max=64)
    q = torch.randn(1, 2, 9, 16)
    torch.export.save(
        torch.export.export(module, (q,), dynamic_shapes={"q": {2: rows}}, strict=strict), tmp_path / "it.pt2"
    )
    loaded = torch.export.load(tmp_path / "it.pt2").module()
    for length in (9, 21):
        q = torch.randn(1, 2, length, 16)
        assert torch.equal(loaded(q), module(q))


def test_the_operator_keeps_what_torch_asks_of_operators() -> None:
    q = torch.randn(1, 2, 9, 16, requires_grad=True)
    bias = torch.randn(2, requires_grad=True)
    steps = ((("__getitem__", (("tensor", 0), ("symbol", 2)), ()),), ("step", 0))
    program = written(steps, None, None, False, "BHMD", True, (), "triton", (None, None))
    assert read(program).score == steps
    torch.library.opcheck(
        torch.ops.attnc.flex_attention.default,
        (q, q.detach().clone(), q.detach().clone(), [bias], [], [], program, [0, 3]),
        test_utils=UTILITIES,
    )
    torch.library.opcheck(
        torch.ops.attnc.flex_attention_max_scores.default,
        (q.detach(), q.detach(), [bias.detach()], [], [], program),
        test_utils=("test_schema", "test_faketensor"),
    )


POSITIONS = (torch.int32,) * 4


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(4))
def test_the_operator_computes_what_the_function_does(seed: int) -> None:
    """As a graph calls it: results, lse and gradients, whatever the layouts of what comes back."""
    generator = torch.Generator().manual_seed(seed)
    orders = ("BHMD", "BMHD", "BHMD", "HBMD"), ("BHMD", "BHMD", "BMDH", "BHDM")
    sizes = {"B": 2, "H": 2, "M": 9, "D": 16}

    def drawn(order: str) -> torch.Tensor:
        stored = torch.randn([sizes[axis] for axis in order], generator=generator)
        return stored.permute([order.index(axis) for axis in "BHMD"])

    q, k, v = (drawn(orders[0][seed]).requires_grad_(seed != 1 or at == 1) for at in range(3))
    bias, warm = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((2, 2, 9), ()))
    scale = (None, 0.3, None, 0.3)[seed]

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score * warm + bias[1, h, j] + 0.5 * h

    recorder = Recorder(torch.device("cpu"))
    if scale is not None:
        recorder.floats.append(scale)
    score = recorder.record(score_mod, (torch.float32, *POSITIONS))
    mask = recorder.record(causal, POSITIONS)
    order, lse = order_like(q.shape, q), seed != 2
    program = written(score, mask, None, scale is not None, order, lse, (), "", (None, None))
    leaves = [x for x in (q, k, v, bias, warm) if x.requires_grad]
    grads = [at for at, x in enumerate((q, k, v, *recorder.tensors)) if x.requires_grad]
    given = (recorder.tensors, recorder.floats, recorder.integers, program)
    o, log_sum = torch.ops.attnc.flex_attention(q, k, v, *given, grads)
    expected, aux = flex_attention(
        q, k, v, score_mod, mask_mod=causal, scale=scale, return_aux=AuxRequest(lse=True, max_scores=True)
    )
    assert o.stride() == expected.stride()
    assert torch.equal(o, expected)
    assert torch.equal(log_sum, aux.lse)
    do, dlse = drawn(orders[1][seed]), torch.randn(2, 2, 9, generator=generator) * (seed != 2)
    found = torch.autograd.grad([o, log_sum], leaves, [do, dlse])
    right = torch.autograd.grad([expected, aux.lse], leaves, [do, dlse])
    for ours, theirs in zip(found, right, strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        alone, nothing = torch.ops.attnc.flex_attention(q, k, v, *given, [])
        largest = torch.ops.attnc.flex_attention_max_scores(q, k, *given)
    torch.testing.assert_close(alone, o.detach())
    assert nothing.shape == (log_sum.shape if lse else (0,))
    assert torch.equal(largest, aux.max_scores)


def test_a_scale_that_is_a_tensor_multiplies_the_score() -> None:
    """As numbers of NumPy are in a graph."""

    def mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + h

    for score_mod, shown in ((None, "*(score, load)"), (mod, "+(*(score, load), h)")):
        traced = trace(
            _scale_scores(score_mod, torch.tensor(0.5)), None, sizes={}, device=torch.device("cpu")
        )
        assert traced.tape.show(traced.score) == shown


def test_an_error_of_the_spec_is_at_the_mod() -> None:
    q = torch.ones(1, 1, 8, 16)
    recorder = Recorder(torch.device("cpu"))
    score = recorder.record(lambda score, b, h, i, j: score + (i - j) % 0, (torch.float32, *POSITIONS))
    given = (recorder.tensors, recorder.floats, recorder.integers)
    for place, path in ((("mods.py", 1), "mods.py"), (None, ".attn")):
        program = written(score, None, None, False, "BHMD", False, (), "", (None, place))
        with pytest.raises(SpecError, match="E0320") as caught:
            torch.ops.attnc.flex_attention(q, q, q, *given, program, [])
        assert caught.value.diagnostics[0].primary.span.source.path.endswith(path)


def test_gradients_lie_as_their_inputs_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads before rows, as models have them that split the columns of a projection."""

    def sloped(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + 0.1 * (q - kv)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = flex_attention(q, k, v, sloped)
        return made

    leaves = [torch.randn(2, 9, 4, 16).transpose(1, 2).requires_grad_() for _ in range(3)]
    laid: list[bool] = []

    def lay(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        found = lay_like(x, like)
        laid.append(found is x)
        return found

    monkeypatch.setattr("attnc.flex.compiled.lay_like", lay)
    eager = torch.autograd.grad(attend(*leaves).sum(), leaves)
    graph = torch.compile(attend, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(graph(*leaves).sum(), leaves)
    assert [x.stride() for x in found] == [x.stride() for x in leaves]
    assert laid == [True] * 3
    assert all(map(torch.equal, found, eager))


def test_checkpoints_are_compiled_where_torch_lets_mods_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mod is read under a mode, which torch takes for a side effect of what is checkpointed."""
    monkeypatch.setattr(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint", True)
    leaves = [x.requires_grad_() for x in torch.randn(3, 1, 2, 8, 16).unbind()]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flex_attention(q, k, v, lambda score, b, h, i, j: score - (i - j) * 0.1, mask_mod=causal)

    def loss(*tensors: torch.Tensor) -> Any:
        return checkpoint(attend, *tensors, use_reentrant=False).square().sum()

    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves), leaves)
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
