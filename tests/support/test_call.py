"""Wrong arguments of a generated callable: each is refused by name, with what was expected and what came."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

from attnc.runtime.loader import load_text
from attnc.support.configs import choose_config
from attnc.support.devices import Gpu
from attnc.verify.interpreter import ensure_interpreter

pytestmark = pytest.mark.quick

GENERATED = Path(__file__).parents[2] / "generated"


@pytest.fixture(scope="module")
def dropout() -> ModuleType:
    ensure_interpreter()
    return load_text((GENERATED / "dropout" / "triton" / "d64.py").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def forget_calls(request: pytest.FixtureRequest) -> None:
    """Lets each test repeat calls of its own: four alike make a guard, wherever others have left off."""
    for name in {"full", "dropout"} & set(request.fixturenames):
        call = request.getfixturevalue(name).CALL
        call.repeated.forget()
        call.repeated_keeping.forget()


def sequence(length: int = 16) -> torch.Tensor:
    return torch.zeros(1, length, 2, 64, dtype=torch.bfloat16)


def outputs(**changed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    given = {"o": torch.empty(1, 16, 2, 64, dtype=torch.bfloat16), "lse": torch.empty(1, 2, 16)}
    return tuple((given | changed).values())


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": 1.0}, TypeError, "q: expected a tensor, got float"),
    ({"q": sequence().half()}, TypeError, "q: expected dtype torch.bfloat16, got torch.float16"),
    ({"k": sequence()[0]}, ValueError, r"k: expected shape \[1, any, 2, 64\], got \[16, 2, 64\]"),
    ({"q": sequence()[0].half()}, ValueError, r"q: expected shape \[any, any, any, 64\], got \[16, 2, 64\]"),
    ({"v": sequence(17)}, ValueError, r"v: expected shape \[1, 16, 2, 64\], got \[1, 17, 2, 64\]"),
    ({"k": torch.zeros(1, 16, 64, 2).bfloat16().mT}, ValueError, r"k: expected a contiguous last axis"),
    ({"k": sequence().to("meta")}, ValueError, "k: expected device cpu, like q, got meta"),
    ({"q": sequence().to("meta")}, ValueError, "q: expected a tensor with data, got one on the device meta"),
    ({"p": 1.5}, ValueError, "p: expected a probability, 0 to 1, got 1.5"),
    ({"p": math.nan}, ValueError, "p: expected a probability, 0 to 1, got nan"),
    ({"p": "half"}, TypeError, "p: expected a number or a 0-d tensor, got 'half'"),
    ({"p": torch.zeros(2)}, ValueError, r"p: expected shape \[\], got \[2\]"),
    ({"p": 10**400}, ValueError, "p: expected a probability, 0 to 1, got 1000"),
    ({"seed": 1.5}, TypeError, "seed: expected an integer or a 0-d tensor, got 1.5"),
    ({"seed": 1 << 63}, ValueError, "seed: expected a number that fits torch.int64, got 9223372036854775808"),
    ({"config": 1}, TypeError, "config: expected one of CONFIGS, got 1"),
    ({"backward_config": 3}, TypeError, r"backward_config: expected a config by kernel \(dq, dkdv\), got 3"),
    (
        {"backward_config": {"dq": 3}},
        TypeError,
        r"backward_config: expected one of BACKWARD_CONFIGS\['dq'\], got 3",
    ),
    ({"backward_config": {"dv": None}}, ValueError, "backward_config: the kernels are dq, dkdv, not dv"),
    ({"out": outputs()[0]}, TypeError, r"out: expected a tuple of 2 tensors \(o, lse\), got Tensor"),
    ({"out": outputs()[:1]}, TypeError, r"out: expected a tuple of 2 tensors \(o, lse\), got 1 of them"),
    ({"out": outputs(lse=torch.empty(1, 2, 15))}, ValueError, r"out lse: expected shape \[1, 2, 16\]"),
    (
        {"out": outputs(lse=torch.empty(1).expand(1, 2, 16))},
        ValueError,
        r"out lse: expected an element of memory for each value, got strides \(0, 0, 0\)",
    ),
    *(
        (
            {"out": outputs(**{name: torch._neg_view(x)})},
            ValueError,
            f"out {name}: expected elements as they are in memory, got a lazily negated view",
        )
        for name, x in zip(("o", "lse"), outputs(), strict=True)
    ),
]


@pytest.mark.parametrize(("changed", "error", "message"), WRONG, ids=[text for *_, text in WRONG])
def test_a_wrong_argument_is_refused_by_name(
    dropout: ModuleType, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    given: dict[str, Any] = {"q": sequence(), "k": sequence(), "v": sequence(), "p": 0.5, "seed": 0} | changed
    inputs = ("q", "k", "v", "p", "seed")
    keywords = {name: value for name, value in given.items() if name not in inputs}
    with pytest.raises(error, match=message):
        dropout.dropout(*(given[name] for name in inputs), **keywords)
    if "out" in given:
        return
    for name in {"q", "k", "v"} - changed.keys():  # the same where a gradient is wanted
        given[name] = given[name].requires_grad_()
    with pytest.raises(error, match=message):
        dropout.dropout(*(given[name] for name in inputs), **keywords)


def test_a_gradient_that_the_spec_does_not_ask_for_is_refused(dropout: ModuleType) -> None:
    """It would be None, which a training goes on with."""
    p, seed = torch.tensor(0.5, requires_grad=True), torch.tensor(3)
    said = "^p requires a gradient, which the spec does not ask for: detach it, or add it to 'grad'$"
    for wants in (True, False):
        q, k, v = (sequence().requires_grad_(wants) for _ in range(3))
        with pytest.raises(RuntimeError, match=said):
            dropout.dropout(q, k, v, p, seed)
    with torch.no_grad():
        dropout.dropout(sequence(), sequence(), sequence(), p, seed)


# --- views, transforms and numbers of torch's own -----------------------------------------------------------


@pytest.fixture(scope="module")
def full() -> ModuleType:
    ensure_interpreter()
    return load_text((GENERATED / "full" / "triton" / "bf16_d64.py").read_text(encoding="utf-8"))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture
def qkv() -> tuple[torch.Tensor, ...]:
    return tuple(drawn(1, 16, 2, 64, seed=seed) for seed in range(3))


def negated(x: torch.Tensor) -> torch.Tensor:
    """Returns the same numbers as a view that torch negates when it reads them, like `z.conj().imag`."""
    return torch._neg_view(-x)


@pytest.mark.parametrize("at", range(3))
def test_a_lazily_negated_view_has_the_numbers_that_torch_reads(
    full: ModuleType, qkv: tuple[torch.Tensor, ...], at: int
) -> None:
    """Also where a call with tensors of the same layout has been prepared, and is found by a guard."""
    views = [*qkv[:at], negated(qkv[at]), *qkv[at + 1 :]]
    expected = [full.full(*qkv) for _ in range(8)][-1]
    for found, wanted in zip(full.full(*views), expected, strict=True):
        assert torch.equal(found, wanted)


_Tensor: Any = torch.Tensor  # has other types


class Wrapper(_Tensor):  # type: ignore[misc]  # for which reason nothing is known of its base
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, x: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, strides=x.stride(), dtype=x.dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{function} reads a tensor without memory")


def test_what_was_prepared_is_of_memory_as_it_is(full: ModuleType, qkv: tuple[torch.Tensor, ...]) -> None:
    """A view that torch negates is not written to, and a tensor without memory is not read, as at first."""
    q, k, v = qkv
    o, lse = full.full(*qkv)
    wrong: list[tuple[list[torch.Tensor], Any, str]] = [
        ([*qkv], (torch._neg_view(o.clone()), lse), "lazily negated view"),
        ([Wrapper(q), k, v], None, "q: "),
    ]
    for _ in range(2):
        for given, out, said in wrong:
            with pytest.raises((TypeError, ValueError), match=said):
                full.full(*given, out=out)
        for _ in range(6):
            full.full(*qkv)
            full.full(*qkv, out=(o, lse))


def test_gradients_of_lazily_negated_views_and_cotangents(
    full: ModuleType, qkv: tuple[torch.Tensor, ...]
) -> None:
    """`z.conj().imag` of a sum hands such a view to what comes before it."""
    weights = drawn(1, 16, 2, 64, seed=3)

    def gradients(inputs: list[torch.Tensor], do: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(full.full(*leaves)[0], leaves, do)

    plain = gradients([*qkv], weights)
    assert all(bool(x.any()) for x in plain)
    for found, wanted in zip(gradients([*map(negated, qkv)], negated(weights)), plain, strict=True):
        assert torch.equal(found, wanted)


def test_a_sparse_cotangent_is_refused_by_name(full: ModuleType, qkv: tuple[torch.Tensor, ...]) -> None:
    """Also where gradients with a dense one of its layout have been prepared."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    o = full.full(*leaves)[0]
    for _ in range(8):
        torch.autograd.grad(o, leaves, torch.zeros_like(o[..., :1]).expand(o.shape), retain_graph=True)
    with pytest.raises(TypeError, match=r"^do: expected a dense tensor, got layout torch\.sparse_coo"):
        torch.autograd.grad(o, leaves, torch.ones_like(o).to_sparse())


def test_tensors_without_memory_have_results_without_memory(full: ModuleType) -> None:
    """As estimators of memory call it; and real ones are computed with before and after."""
    q = drawn(1, 16, 2, 64)
    plain = full.full(q, q, q)
    with FakeTensorMode():
        made = torch.empty(3, 40, 2, 64, dtype=torch.bfloat16, requires_grad=True)
        o, lse = full.full(made, made, made)
        (gradient,) = torch.autograd.grad(o.sum() + lse.sum(), made)
    assert (o.shape, lse.shape, gradient.shape) == ((3, 40, 2, 64), (3, 2, 40), (3, 40, 2, 64))
    assert all(isinstance(x, FakeTensor) for x in (o, lse, gradient))
    assert torch.equal(full.full(q, q, q)[0], plain[0])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which torch loads for them
def test_forward_mode_is_refused_where_an_input_has_a_tangent(
    full: ModuleType, qkv: tuple[torch.Tensor, ...]
) -> None:
    """A result without a tangent would say that it does not depend on the input."""
    q, k, v = qkv
    for _ in range(8):
        full.full(q, k, v)
    with forward_ad.dual_level():
        assert torch.equal(full.full(q, k, v)[0], full.full(*qkv)[0])
        for x in (q, q.clone().requires_grad_()):
            dual = forward_ad.make_dual(x, torch.ones_like(x))  # type: ignore[no-untyped-call]  # torch's
            with pytest.raises(RuntimeError, match=r"^full has no forward-mode derivative: "):
                full.full(dual, k, v)


# --- packages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "target"), [("causal_gqa", "triton"), ("causal_gqa", "cuda_sm_80"), ("extend", "triton")]
)
def test_what_is_no_tensor_is_refused_by_name_before_a_variant_is_chosen(name: str, target: str) -> None:
    """A NumPy array has a dtype and a shape too."""
    ensure_interpreter()
    dispatcher = import_module(f"generated.{name}.{target}")
    x, length = sequence(), torch.ones(1, dtype=torch.int32)
    array = x.float().numpy()
    rest = (length,) if name == "extend" else ()
    with pytest.raises(TypeError, match=r"^q: expected a tensor, got ndarray$"):
        getattr(dispatcher, name)(array, x, x, *rest)
    with pytest.raises(ValueError, match=r"^q: expected shape \[any, any, any, \d+\], got \[1, 16, 128\]$"):
        getattr(dispatcher, name)(x.reshape(1, 16, 128), x, x, *rest)


@pytest.mark.parametrize("target", ["triton", "cuda_sm_80"])
@pytest.mark.parametrize("batch", [0, 1])
def test_a_config_of_other_numbers_is_refused_at_every_call(target: str, batch: int) -> None:
    """Also where there is nothing to compute, and where a call with an equal config has been prepared."""
    ensure_interpreter()
    module = load_text((GENERATED / "alibi" / target / "d64.py").read_text(encoding="utf-8"))
    x, slopes = sequence()[:batch], torch.zeros(2)
    good = module.CONFIGS[0]
    if batch == 0 or target == "triton":
        module.alibi(x, x, x, slopes, config=good)
    others = (float(good.BLOCK_M), None)
    for wrong in (*(good._replace(BLOCK_M=x) for x in others), tuple(good), list(good)):
        with pytest.raises(TypeError, match=r"^config: expected one of CONFIGS, got "):
            module.alibi(x, x, x, slopes, config=wrong)


@pytest.mark.parametrize("target", ["triton", "cuda_sm_80"])
def test_a_kept_lse_has_memory_for_every_row(target: str) -> None:
    ensure_interpreter()
    module = load_text((GENERATED / "alibi" / target / "d64.py").read_text(encoding="utf-8"))
    x = sequence()
    with pytest.raises(ValueError, match=r"lse: expected an element of memory for each value, got strides"):
        module.alibi(x, x, x, torch.zeros(2), lse=torch.empty(1).expand(1, 2, 16))


class Elsewhere:
    """Kernels that write 3 to the first result. serves: whether they are for the device."""

    def __init__(self, own: Any, *, serves: bool) -> None:
        self.serves, self._own = lambda gpu: serves, own

    def _prepare(self, *given: Any) -> Any:
        own, self._own.forward = self._own, None
        layouts, scratch, _ = own._prepare(*given)
        own.forward = self
        return layouts, scratch, (self,)

    def run(self, tensors: Any) -> None:
        tensors[3].fill_(3)


def test_other_kernels_may_make_results_on_the_devices_that_they_are_for(
    full: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where a caller names a config, of which they know nothing."""
    x, call = drawn(1, 16, 2, 64), full.CALL
    assert call.forward is None
    own, _ = full.full(x, x, x)
    for serves in (True, False):
        call.forget()
        monkeypatch.setattr(call, "forward", Elsewhere(call, serves=serves))
        for _ in range(6):  # some are prepared, some repeated
            assert torch.equal(full.full(x, x, x)[0], torch.full_like(own, 3)) == serves
        assert torch.equal(full.full(x, x, x, config=full.CONFIGS[0])[0], own)
    call.forget()


def test_an_lse_that_is_asked_for_may_lie_anywhere_but_in_an_input() -> None:
    """Also after calls with one that lies otherwise, and where o is the module's own."""
    ensure_interpreter()
    module = load_text((GENERATED / "alibi" / "triton" / "d64.py").read_text(encoding="utf-8"))
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 16, 2, 64, generator=generator).bfloat16() for _ in range(3))
    slopes, first = torch.ones(2), torch.empty(1, 2, 16)
    o = module.alibi(q, k, v, slopes, lse=first)
    turned = torch.empty(1, 16, 2).mT
    assert torch.equal(module.alibi(q, k, v, slopes, lse=turned), o)
    assert torch.equal(turned, first)
    seen = torch.func.grad(lambda s: (module.alibi(q, k, v, slopes, lse=torch.empty(1, 2, 16)) * s).sum())
    assert torch.equal(seen(torch.ones(()).bfloat16()), o.sum())  # made inside of a transform
    within = q.view(-1)[:64].view(torch.float32).view(1, 2, 16)
    with pytest.raises(
        ValueError, match=r"^lse: expected memory of its own, got elements that are those of q"
    ):
        module.alibi(q, k, v, slopes, lse=within)


def qkvo() -> tuple[torch.Tensor, ...]:
    """Four tensors whose rows lie between each other's."""
    return torch.zeros(1, 16, 4, 2, 64, dtype=torch.bfloat16).unbind(2)


@pytest.mark.parametrize("repeats", [0, 8])
def test_results_that_share_elements_with_something_else_are_refused(
    dropout: ModuleType, repeats: int
) -> None:
    """Also in a call that looks like those before it; what lies between inputs is taken."""
    q, k, v, o = qkvo()
    long, lse = torch.zeros(1, 32, 2, 64, dtype=torch.bfloat16), torch.empty(1, 2, 16)
    for _ in range(repeats):
        dropout.dropout(q, k, v, 0.1, 0, out=(o, lse))
    within = long.view(-1)[:64].view(torch.float32).view(1, 2, 16)
    refused = [
        ((q, k, v), (q, lse), "out o: expected memory of its own, got elements that are those of q"),
        ((q, k, v), (v, lse), "out o: expected memory of its own, got elements that are those of v"),
        ((long[:, 1:17], k, v), (long[:, :16], lse), "out o: .* those of q"),
        ((q, k, v), (long[:, :16], within), "out lse: .* those of out o"),
    ]
    for inputs, out, said in refused:
        with pytest.raises(ValueError, match=said):
            dropout.dropout(*inputs, 0.1, 0, out=out)
    dropout.dropout(q, k, v, 0.1, 0, out=(o, lse))
    dropout.dropout(q, k, v, 0.1, 0, out=(long[:, :16], lse))


def test_everything_is_dropped_at_one(dropout: ModuleType) -> None:
    q = torch.ones_like(sequence())
    o, lse = dropout.dropout(q, q, q, 1, 0)
    assert bool((o == 0).all())
    assert bool(lse.isfinite().all())


def test_k_and_v_have_as_many_pages() -> None:
    """The table leads to both: fewer pages of v would be read past their end."""
    ensure_interpreter()
    module = load_text((GENERATED / "paged_decode" / "triton" / "d64.py").read_text(encoding="utf-8"))
    q = torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16)
    k = torch.zeros(3, 16, 2, 64, dtype=torch.bfloat16)
    table, length = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"v: expected shape \[3, 16, 2, 64\], got \[2, 16, 2, 64\]"):
        module.paged_decode(q, k, k[:2], table, length)


def test_a_config_of_the_caller_leaves_no_key_out() -> None:
    """With splits that are not the segments of an order, whose kernel walks over a segment of each."""
    ensure_interpreter()
    text = (GENERATED / "serving_invariant" / "triton" / "decode.py").read_text(encoding="utf-8")
    module = load_text(text)
    q = torch.zeros(1, 1, 2, 128, dtype=torch.bfloat16)
    k = torch.zeros(300, 16, 2, 128, dtype=torch.bfloat16)
    table, length = torch.arange(300, dtype=torch.int32)[None], torch.full((1,), 4800, dtype=torch.int32)
    for changed in ({"split_size": 4096}, {"split_size": 1024}, {"split_size": 0, "splits": 2}):
        config = module.CONFIGS[0]._replace(**changed)
        with pytest.raises(ValueError, match=r"config: expected a split_size of 2048, .* got"):
            module.serving_invariant(q, k, k, table, length, config=config)


def large_tiles(path: str) -> ModuleType:
    """A decode module whose first tiles are so large that what they take depends on the device."""
    return load_text((GENERATED / path).read_text(encoding="utf-8"))


@pytest.fixture
def mla() -> ModuleType:
    return large_tiles("mla_decode/triton/d576_dv512.py")


@pytest.fixture
def shared_prefix() -> ModuleType:
    return large_tiles("shared_prefix/triton/d128.py")


def pretend(major: int, room: int) -> Gpu:
    """A device on whose multiprocessors blocks can have so many bytes of shared memory."""
    return Gpu(0, "none", (major, 0), room, room + 1024, 108, 1 << 25, 1 << 37)


def counted(module: ModuleType, config: Any, gpu: Gpu, batch: int) -> int:
    """How many splits a call with so many sequences of 8192 keys has."""
    sizes = {"B": batch, "M": 1, "H": 16, "Hkv": 1, "G": 16, "N": 8192, "P": 8192}
    names = {**sizes, "BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N}
    splits: int = module.CALL.split.sizes(names, config, gpu)["SPLITS"]
    return splits


@pytest.mark.parametrize(("major", "room", "chosen"), [(8, 166912, 1), (9, 232448, 0), (8, 101376, 9)])
def test_a_device_takes_the_first_config_that_it_can_run(
    mla: ModuleType, major: int, room: int, chosen: int
) -> None:
    found = choose_config(None, pretend(major, room), 8192, mla.CONFIGS, mla.TUNED)
    assert found == mla.CONFIGS[chosen]


@pytest.mark.parametrize(("major", "room", "programs"), [(8, 166912, 1), (8, 232448, 2), (9, 232448, 1)])
def test_programs_are_counted_by_what_they_take_on_the_device(
    shared_prefix: ModuleType, major: int, room: int, programs: int
) -> None:
    gpu, config = pretend(major, room), shared_prefix.CONFIGS[0]
    plain = config._replace(shared=room // programs, staged=0)
    for batch in (1, 8, 64):
        assert counted(shared_prefix, config, gpu, batch) == counted(shared_prefix, plain, gpu, batch)


def test_a_config_that_does_not_say_what_it_takes_is_shared_out_too(mla: ModuleType) -> None:
    assert counted(mla, mla.Config(64, 32, 8, 2), pretend(9, 232448), 1) > 1


def test_a_cuda_module_says_that_it_needs_a_gpu() -> None:
    module = load_text((GENERATED / "alibi" / "cuda_sm_80" / "d64.py").read_text(encoding="utf-8"))
    q = torch.zeros(1, 16, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="q: expected a tensor on a CUDA device, got one on the cpu"):
        module.alibi(q, q, q, torch.zeros(2))


def test_a_cuda_module_refuses_another_device_by_name() -> None:
    module = load_text((GENERATED / "alibi" / "cuda_sm_80" / "d64.py").read_text(encoding="utf-8"))
    q = torch.zeros(1, 16, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="k: expected device cpu, like q, got meta"):
        module.alibi(q, q.to("meta"), q, torch.zeros(2))


@pytest.mark.parametrize("target", ["triton", "cuda_sm_80"])
def test_cumulative_lengths_have_a_first(target: str) -> None:
    """One more than sequences: none at all is no number of sequences."""
    ensure_interpreter()
    module = load_text((GENERATED / "varlen" / target / "d128.py").read_text(encoding="utf-8"))
    q = torch.zeros(5, 2, 128, dtype=torch.bfloat16)
    cu = torch.zeros(0, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cu_q: expected shape \[B \+ 1\], got \[0\]"):
        module.varlen(q, q, q, cu, cu)


@pytest.mark.parametrize("target", ["triton", "cuda_sm_80"])
def test_q_is_looked_at_before_lse_is_kept_for_gradients(target: str) -> None:
    ensure_interpreter()
    module = load_text((GENERATED / "alibi" / target / "d64.py").read_text(encoding="utf-8"))
    k = torch.zeros(1, 16, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(TypeError, match="q: expected a tensor, got NoneType"):
        module.alibi(None, k, k, torch.zeros(2))
