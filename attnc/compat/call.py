"""From the arguments of a call to those of a kernel: checks, the form that the call has, the functions of
that form (found once for all its calls), and the tensors in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from operator import index
from threading import RLock
from types import MappingProxyType, ModuleType
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch

from attnc.api.fastest import (
    HOPPER,
    are_few,
    count_sharing,
    exceeds,
    pack_heads,
    share_keys,
    targets_of_call,
    targets_of_few,
)
from attnc.api.repeats import Arrange, Plan, keep
from attnc.api.tensors import (
    FLOATS,
    LARGEST_HEAD,
    NUMBERS,
    GivenTensors,
    draw_seed,
    is_hidden,
    is_true,
    is_unknown,
    refuse_gradients,
    to_dropout,
    to_finite,
)
from attnc.compat.blocks import list_of_blocks
from attnc.compat.compiled import builds_in, load_form, making
from attnc.compat.form import Facts, Form, Layout
from attnc.diagnostics.shown import show_value
from attnc.runtime.locks import renew_in_forks
from attnc.support.arguments import leaving_transforms, requires_gradient
from attnc.support.memory import made_apart, make_picker

#: No row is further from another; q_pos - left stays inside of 32 bits.
_FAR = 1 << 30


def refuse(function: str, **asked: object) -> None:
    """Raises ValueError for the first argument that asks for what there is not: anything but None, False and
    0.
    """
    for name, value in asked.items():
        if value is not None and (isinstance(value, torch.Tensor) or bool(value)):
            came = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(f"{function}: {name} is not supported: expected None, got {came}")


def one_of(function: str, **named: Any) -> Any:
    """Returns the one value that is not None among names of the same argument. TypeError for two."""
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        raise TypeError(f"{function}: {' and '.join(given)} are the same argument: give one of them")
    return next(iter(given.values()), None)


#: Axes of q, k and v: sequences of one length, end to end, keys in pages, keys in a cache.
DENSE = ("B M H D", "B N Hkv D", "B N Hkv Dv")
PACKED = ("T H D", "S Hkv D", "S Hkv Dv")
PAGED = ("T H D", "P page Hkv D", "P page Hkv Dv")


def check(function: str, axes: tuple[str, str, str], **named: Any) -> GivenTensors:
    """Holds q, k and v, by the names that the caller has for them, to these axes; returns what the other
    tensors of the call are held to. TypeError and ValueError name the argument.
    """
    given = GivenTensors(function)
    first, q = next(iter(named.items()))
    for (name, x), shape in zip(named.items(), axes, strict=True):
        if x is q:
            given.check(name, x, shape, FLOATS)
        else:
            given.check(name, x, shape, (q.dtype,), f"like {first}")
        if not 1 <= x.shape[-1] <= LARGEST_HEAD:
            wanted = f"a last axis of 1 to {LARGEST_HEAD}"
            raise ValueError(f"{function}: {name}: expected {wanted}, got {list(x.shape)}")
        if "page" in shape:
            given.check_pages(name, q)
    given.check_groups(first, [*named][1])
    return given


def _is_usual(scale: float, size: int) -> bool:
    """Returns whether a scale is 1 / sqrt(size), however it was rounded: kernels have it in float32."""
    usual: float = size**-0.5
    return abs(scale - usual) <= usual * 2.0**-40


def unpack_qkv(function: str, axes: str, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Takes q, k and v out of the tensor that holds them along an axis of 3."""
    given = GivenTensors(function)
    given.check("qkv", qkv, axes, FLOATS)
    given.check_range("qkv", "H", 1)
    given.check_range("qkv", "D", 1, LARGEST_HEAD)
    return qkv.unbind(axes.split().index("3"))


def unpack_kv(
    function: str, axes: tuple[str, str], q: torch.Tensor, kv: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Takes k and v out of the tensor that holds them along an axis of 2. axes: of q and of kv."""
    given = GivenTensors(function)
    given.check("q", q, axes[0], FLOATS)
    given.check("kv", kv, axes[1], (q.dtype,), "like q")
    given.check_groups("q", "kv")
    return kv.unbind(axes[1].split().index("2"))


def rows(x: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with a contiguous last axis: itself, or, as in flash-attention, a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def window(function: str, causal: Any, window_size: Any) -> tuple[bool, Any, Any]:
    """Returns (causal, left, right) of a mask; None: no bound; a tensor: of torch.compile. Causal is a right
    of 0, whatever the window says.
    """
    causal = is_true(f"{function}: causal", causal)
    try:
        left, right = map(_read_bound, window_size)
    except (TypeError, ValueError):
        raise ValueError(
            f"{function}: window_size: expected (left, right), -1 for no bound, got {show_value(window_size)}"
        ) from None
    causal = causal or (isinstance(right, int) and right == 0)
    return causal, left, None if causal else right


def _read_bound(given: Any) -> Any:
    """Returns a bound of a window, None for none; a tensor where torch.compile knows no more, which then is
    far from the query if there is none.
    """
    if is_hidden(given):
        bound = torch.as_tensor(given)
        if bound.is_floating_point():
            raise TypeError
        return torch.where(bound < 0, _FAR, bound).clamp(max=_FAR).int()
    if isinstance(given, float):
        raise TypeError
    reach = -1 if given is None else int(given)
    return min(reach, _FAR) if reach >= 0 else None


def number(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Returns a scalar as kernels take it: on the device, the same tensor for the same value.

    What is made while a graph is captured belongs to the graph, what is made under a mode of torch's (fake
    tensors) to the mode, and the tracer wants the number.
    """
    if torch.compiler.is_compiling():
        return value
    is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if is_captured or torch._C._len_torch_dispatch_stack():
        return torch.full((), value, dtype=dtype, device=device)
    found = _scalar_tensor(value, dtype, device)
    _KEPT_NUMBERS[id(found)] = found
    return found


#: Those that no graph owns, which plans may hold.
_KEPT_NUMBERS: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
#: Bytes from one number to the next, so that each is aligned as kernels assume; numbers of a page.
_PLACE, _PLACES = 16, 1024
#: By device: pages of numbers, the last of which has places left, and how many of its places are taken.
_PAGES: dict[torch.device, tuple[list[torch.Tensor], int]] = {}


@lru_cache(maxsize=1024)
def _scalar_tensor(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a number in memory that is never freed and never written again: a graph that was captured
    reads it for as long as there is the graph, whoever forgets it here.
    """
    make = partial(_place_number, value, dtype, device)
    if device.type == "cuda":
        return made_apart(make)
    with leaving_transforms(), torch.inference_mode(False):
        return make()


def _place_number(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with _PLACING:
        pages, taken = _PAGES.get(device, ([], _PLACES))
        if taken == _PLACES:
            pages, taken = [*pages, torch.empty(_PLACE * _PLACES, dtype=torch.uint8, device=device)], 0
        _PAGES[device] = pages, taken + 1
    # No view of the page: it counts its own changes, as gradients ask for.
    number = torch.empty((), dtype=dtype, device=device)
    number.set_(pages[-1].untyped_storage(), taken * _PLACE // dtype.itemsize, (), ())
    return number.fill_(value)


_PLACING = RLock()
renew_in_forks(globals(), "_PLACING")


#: Functions of this process, by names that `prepare_form` returns: attributes, which torch.compile follows.
FUNCTIONS = ModuleType("attnc.compat.functions")
_PREPARED: dict[Facts, tuple[str, ...]] = {}


def prepare_form(facts: Facts) -> tuple[str, ...]:
    """Returns (name in FUNCTIONS, names of the arguments) of a form, whose fields come sorted.

    `NAME_call` there is what its module calls, and `NAME_gradients` the backward of a form with gradients:
    (do, dlse, inputs, o, lse, configs). It is compiled, kept on disk, and found again in this process.
    """
    found = _PREPARED.get(facts)
    if found is None:
        with making():
            found = _PREPARED.get(facts) or _prepare_form(facts)
    return found


def _prepare_form(facts: Facts) -> tuple[str, ...]:
    form = Form(**dict(facts))
    name = f"form_{len(vars(FUNCTIONS))}"
    module = load_form(form)
    setattr(FUNCTIONS, name, module.flash_attention)
    setattr(FUNCTIONS, f"{name}_call", module.CALL)
    if form.grads:
        setattr(FUNCTIONS, f"{name}_gradients", module.CALL.gradients)
    found = _PREPARED[facts] = name, *(name for name, _ in form.inputs)
    return found


# What torch.compiler.assume_constant_result does, without importing the compiler: tracing calls it for real.
prepare_form._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes


def _facts(form: Mapping[str, Any]) -> Facts:
    """Returns the fields of a form, sorted. Kernels are made for the numbers among them, so in a graph of
    torch.compile these are no symbols.
    """
    numbers = ("size", "size_v", "page", "splits", "slopes")
    fixed = {name: index(form[name]) for name in numbers if form.get(name) is not None}
    return tuple(sorted({**form, **fixed}.items(), key=lambda fact: fact[0]))


_NOTHING: Mapping[Any, Any] = MappingProxyType({})
Window: TypeAlias = tuple[int | None, int | None]
#: A tensor that is given -> what a kernel has in its place.
Change: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

#: The target of a form that names none.
_USUAL = "triton"
#: Keys of a packed sequence, up to which gradients with the same bits in every run are the fastest: sums of
#: dq need not be cleared first, of which short sequences have most (measured on an H200).
FEW_KEYS = 1024
#: The same of tensors: keys of one tile, for which no block waits.
TILE_KEYS = 128


def arrange_by(order: Sequence[int | torch.Tensor], changes: Mapping[int, Change] = _NOTHING) -> Arrange:
    """Returns a function that takes the inputs of a kernel out of the tensors of a call. order: their
    positions there, or numbers on the device; changes: by position, the change that makes the kernel's input
    of a tensor.
    """
    places = [x for x in order if isinstance(x, int)]
    if changes:

        def change(tensors: Sequence[torch.Tensor], x: int) -> torch.Tensor:
            return changes[x](tensors[x]) if x in changes else tensors[x]

        return lambda tensors: ([change(tensors, x) if isinstance(x, int) else x for x in order], None)
    if len(places) == len(order):
        pick = make_picker(places)
        return lambda tensors: (pick(tensors), None)
    return lambda tensors: ([tensors[x] if isinstance(x, int) else x for x in order], None)


def draw_seed_for(dropout_p: Any, q: Any) -> torch.Tensor | None:
    """Returns the seed of a call with dropout, None of one without, or whose arguments will be refused."""
    wants = isinstance(q, torch.Tensor) and isinstance(dropout_p, float) and 0 < dropout_p < 1
    return draw_seed(q.device) if wants else None


def one_sink(function: str, s_aux: Any, learnable_sink: Any, sinks: Any) -> Any:
    """Returns the logits of heads by whichever name they have; None if they are left out."""
    if s_aux is None and learnable_sink is None and sinks is None:
        return None
    return one_of(function, s_aux=s_aux, learnable_sink=learnable_sink, sinks=sinks)


class Call:
    """A call being put together. Its methods raise TypeError and ValueError with the name of an argument.

    given: what `check` returned of q, k and v; is_inference: whether there are no gradients
    """

    def __init__(
        self,
        name: str,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        given: GivenTensors,
        *,
        is_inference: bool = False,
    ) -> None:
        self._name, self._given = name, given
        q, k, v = map(rows, (q, k, v))
        dtype = str(q.dtype).removeprefix("torch.")
        self._tensors: dict[str, Any] = {"q": q, "k": k, "v": v}
        self._form: dict[str, Any] = {"dtype": dtype, "size": q.shape[-1], "size_v": v.shape[-1]}
        needed = not is_inference and any(self.wants_gradient(x) for x in (q, k, v))
        self._grads = ["q", "k", "v"] if needed else []
        self._is_fast = False
        self._cap: tuple[float, float] | None = None
        self._inputs: Mapping[str, Any] = _NOTHING
        #: What was given for those tensors that kernels have otherwise, and how these are made of it.
        self._given_as: dict[str, torch.Tensor] = {}
        self._changes: dict[str, Change] = {}
        self._has_one, self._packs, self._most = False, False, 0
        #: The name in FUNCTIONS of the kernel that was called.
        self.function = ""

    def wants_gradient(self, x: torch.Tensor | None) -> bool:
        return x is not None and torch.is_grad_enabled() and requires_gradient(x)

    def score(
        self,
        scale: Any,
        softcap: float | None,
        slopes: torch.Tensor | None,
        sink: torch.Tensor | None,
    ) -> None:
        device = self._tensors["q"].device
        if isinstance(scale, bool):  # what is `causal` there
            raise TypeError(
                f"{self._name}: softmax_scale: expected a number, got {scale}: arguments have the positions"
                " of flash-attn 2; attnc.compat.flash_attn_interface has those of flash-attn 3"
            )
        if is_hidden(scale):
            scale = torch.as_tensor(scale, dtype=torch.float32, device=device)
        elif scale is not None:
            scale = to_finite(f"{self._name}: softmax_scale", scale)
        cap = self._cap_of(softcap)
        if isinstance(cap, torch.Tensor) or cap > 0:
            inner = (self._form["size"] ** -0.5 if scale is None else scale) / cap
            self._tensors["cap"] = number(cap, torch.float32, device)
            self._tensors["softmax_scale"] = number(inner, torch.float32, device)
            self._form["softcap"] = True
            self._cap = cap, inner
        elif scale is not None and (is_hidden(scale) or not _is_usual(scale, self._form["size"])):
            self._tensors["softmax_scale"] = number(scale, torch.float32, device)
            self._form["scaled"] = True
        for name, x in (("alibi_slopes", slopes), ("s_aux", sink)):
            if x is None:
                continue
            by_sequence = name == "alibi_slopes" and getattr(x, "ndim", 1) == 2
            self._given.check(name, x, "B H" if by_sequence else "H", NUMBERS)
            self._tensors[name] = x.float()
            if x.dtype != torch.float32:
                self._given_as[name], self._changes[name] = x, torch.Tensor.float
            if self.wants_gradient(x):
                self._grads.append(name)
        if slopes is not None:
            self._form["slopes"] = slopes.dim()
        if sink is not None:
            self._form["sink"] = True

    def _cap_of(self, softcap: Any) -> Any:
        """Returns a softcap, 0 for none. What torch.compile has no value of is held to be one when the graph
        runs.
        """
        if softcap is None:
            return 0.0
        if not is_unknown(softcap):
            return to_finite(f"{self._name}: softcap", softcap)
        cap = torch.as_tensor(softcap, dtype=torch.float32)
        torch._assert_async(cap > 0, f"{self._name}: softcap: expected more than 0; for none give 0.0 itself")
        return cap.to(self._tensors["q"].device)

    def mask(self, causal: bool, window_size: Window) -> None:
        device = self._tensors["q"].device
        is_causal, left, right = window(self._name, causal, window_size)
        if is_causal:
            self._form["causal"] = True
        for side, bound in (("left", left), ("right", right)):
            if isinstance(bound, torch.Tensor):
                self._tensors[f"window_{side}"], self._form[side] = bound.to(device), True
            elif bound is not None:
                self._tensors[f"window_{side}"] = number(bound, torch.int32, device)
                self._form[side] = True

    def hurry(self, deterministic: Any) -> None:
        """Takes the fastest gradients, whose bits may differ from run to run, where neither the caller nor
        PyTorch asks for deterministic ones.
        """
        same_bits = is_true(f"{self._name}: deterministic", deterministic)
        self._is_fast = not same_bits and not torch.are_deterministic_algorithms_enabled()

    def drop(self, p: Any, seed: torch.Tensor | None = None) -> None:
        """Adds dropout. seed: of an earlier call; drawn from torch's generator if left out."""
        device = self._tensors["q"].device
        if is_unknown(p):
            p = torch.as_tensor(p, dtype=torch.float32, device=device)
        else:
            p = to_dropout(f"{self._name}: dropout_p", p)
        if isinstance(p, torch.Tensor) or p:
            self._tensors["dropout_p"] = number(p, torch.float32, device)
            self._tensors["seed"] = draw_seed(device) if seed is None else seed
            self._form["dropout"] = True

    def set_ragged(
        self,
        starts: torch.Tensor,
        used: torch.Tensor | None,
        *,
        name: str = "cu_seqlens_q",
        most: int | None,
    ) -> None:
        """Lays queries end to end. name: what the caller calls the starts; most: queries of a sequence, None
        if the caller does not say. It chooses kernels, which are right for any number.
        """
        self._given.check(name, starts, "B+1", (torch.int32,))
        self._lay("q", "ragged", cu_seqlens_q=starts)
        self._has_one, self._most = most == 1 and used is None, most if isinstance(most, int) else 0
        if used is not None:
            self._given.check("seqused_q", used, "B", (torch.int32,))
            self._tensors["seqused_q"] = used
            self._form["rows"] = "seqused_q"

    def set_packed(self, starts: torch.Tensor | None, *, name: str = "cu_seqlens_k") -> None:
        """Lays keys end to end. name: what the caller calls the starts."""
        self._given.check(name, starts, "B+1", (torch.int32,))
        self._lay("kv", "ragged", cu_seqlens_k=starts)

    def set_paged(self, table: torch.Tensor) -> None:
        """Lays keys in pages; the table has been checked."""
        self._lay("kv", "paged", block_table=table)
        self._form["page"] = self._tensors["k"].shape[1]

    def length(self, name: str, lengths: torch.Tensor, *, called: str = "") -> None:
        """Takes lengths of keys, or where sequences of them begin. called: by the caller, if not `name`."""
        shape = "B+1" if name == "cu_seqlens_k" else "B"
        self._given.check(called or name, lengths, shape, (torch.int32,))
        self._tensors[name] = lengths
        self._form["lengths"] = name

    def pad(self, rows: torch.Tensor) -> None:
        self._given.check("cache_leftpad", rows, "B", (torch.int32,))
        self._tensors["cache_leftpad"] = rows
        self._form["leftpad"] = "cache_leftpad"

    def list_blocks(self, given: Any) -> None:
        """Restricts the mask to the blocks that lists of each block of queries name (`list_of_blocks`)."""
        q, k = self._tensors["q"], self._tensors["k"]
        blocks, size = list_of_blocks(self._name, given, q, k)
        axes = [name for name, length in zip("bh", blocks.shape, strict=False) if length > 1]
        self._form |= {"blocks": size, "lists": "".join(axes)}
        self._tensors["blocks"] = blocks.squeeze([axis for axis, x in enumerate("bh") if x not in axes])

    def hold(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Takes these tensors in place of those that were checked, whose types and widths they have."""
        self._tensors |= dict(zip("qkv", map(rows, (q, k, v)), strict=True))

    @property
    def seed(self) -> torch.Tensor | None:
        return self._tensors.get("seed")

    def run(
        self,
        splits: int = 0,
        out: torch.Tensor | None = None,
        *,
        key: Any = None,
        given: Mapping[str, Any] = _NOTHING,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (o, lse) of the call; o is `out` if there is one. key: of these arguments, by the
        names that forms have for them, None where left out, so that `repeat` finds them again; or None.
        """
        has_more = bool(self._grads) or "blocks" in self._form or "dropout" in self._form
        if not has_more and self._shares_keys(splits):
            self._form["splits"] = max(0, splits)
            if self._form.get("q", "dense") == "dense" and not are_few(self._tensors["q"].shape[1]):
                self._form["many"] = True
        elif not has_more and pack_heads(self._name, self._tensors, self._form, self._most):
            self._packs, self._form["splits"] = True, 1
        self._choose()
        name, inputs = self._prepare_function()
        function = getattr(FUNCTIONS, name)
        if key is not None:
            self._remember(key, given, name)
        if out is None:
            o, lse = function(*inputs)
            return o, lse
        q = self._tensors["q"]
        wanted = [*q.shape[:-1], self._form["size_v"]]
        self._given.check("out", out, wanted, (q.dtype,), "like q")
        self._given.check_rows(out=out)
        refuse_gradients(self._name, out=out)
        *rows, heads, _ = out.shape
        shape = (heads, *rows) if len(rows) == 1 else (rows[0], heads, rows[1])
        lse = torch.empty(shape, dtype=torch.float32, device=out.device)
        function(*inputs, out=(out, lse))
        return out, lse

    def _remember(self, key: Any, given: Mapping[str, Any], function: str) -> None:
        names = [name for name, x in given.items() if x is not None]
        order = self.order(names, given)
        if order is not None:
            call = getattr(FUNCTIONS, f"{function}_call")
            changes = {names.index(name): change for name, change in self._changes.items()}
            keep(key, Plan(getattr(FUNCTIONS, function), call, arrange_by(order, changes)))

    def order(self, names: Sequence[str], given: Mapping[str, Any]) -> tuple[int | torch.Tensor, ...] | None:
        """Returns, for each input of the kernel that was called, its position among the given tensors, or a
        number on the device. None if an input is anything else, such as a copy.
        """
        inputs = {name: self._given_as.get(name, x) for name, x in self._inputs.items()}
        order = tuple(names.index(name) if x is given.get(name) else x for name, x in inputs.items())
        return order if all(isinstance(x, int) or id(x) in _KEPT_NUMBERS for x in order) else None

    def gradients(
        self, do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (dq, dk, dv) of what `run` gave for the same arguments."""
        self._grads = ["q", "k", "v"]
        self._choose()
        name, inputs = self._prepare_function()
        dq, dk, dv = getattr(FUNCTIONS, f"{name}_gradients")(
            do, None, *inputs, rows(o), lse.contiguous(), None
        )
        return dq, dk, dv

    def _shares_keys(self, splits: int) -> bool:
        """splits: that are asked for; of a single one only few queries have a kernel of their own."""
        if self._form.get("q", "dense") != "dense":
            return self._has_one
        q, k, v = (self._tensors[name] for name in "qkv")
        is_known = splits != 1 and "left" not in self._form and self._form.get("kv", "dense") != "ragged"
        heads, keys = (q.shape[2], k.shape[-2]), self._count_keys() if is_known else 0
        return share_keys(self._name, q, k, v, heads=heads, keys=keys)

    def _count_keys(self) -> int:
        """Returns how many keys of a sequence, which has its own, there is room for."""
        pages = self._tensors["block_table"].shape[1] if "page" in self._form else 1
        keys: int = pages * self._tensors["k"].shape[1]
        return keys

    def _choose(self) -> None:
        q, k, v = (self._tensors[name] for name in "qkv")
        if "splits" in self._form and not self._packs:
            is_packed = self._form.get("q", "dense") == "ragged"
            sharing = count_sharing(1 if is_packed else q.shape[1], q.shape[-2], k.shape[-2])
            keys = self._form.get("kv", "dense")
            length = 0 if keys == "ragged" else self._count_keys()
            targets = targets_of_few(
                self._name, q, k, v, sharing=sharing, keys=keys, length=length, is_packed=is_packed
            )
        else:
            targets = targets_of_call(self._name, q, k, v, gradients=bool(self._grads))
        if targets[0] != _USUAL:  # torch.compile compares no tuples
            self._form["targets"] = targets
            if self._is_fast and self._grads and not self._sees_one_tile():
                self._form["fast"] = True
            if self._cap is not None and targets[0] == HOPPER and "splits" not in self._form:
                self._build_in(self._cap)

    def _sees_one_tile(self) -> bool:
        """Returns whether there is one tile of keys: gradients of q, k and v with the same bits in every
        run are the faster ones there.
        """
        is_dense = self._form.get("q", "dense") == self._form.get("kv", "dense") == "dense"
        is_whole = is_dense and self._grads == ["q", "k", "v"]
        return is_whole and exceeds(TILE_KEYS + 1, self._tensors["k"].shape[1])

    def _build_in(self, cap: tuple[float, float]) -> None:
        """Makes a softcap part of the kernel, where it may be: by a polynomial it takes a fraction of what
        tanh of any number takes.
        """
        if not torch.compiler.is_compiling() and builds_in(cap):
            self._form["cap"] = cap

    def _prepare_function(self) -> tuple[str, list[Any]]:
        """Returns the name in FUNCTIONS of the form that the call has, and what it takes."""
        if self._grads:
            self._form["grads"] = tuple(self._grads)
        function, *names = prepare_form(_facts(self._form))
        self.function, self._inputs = function, {name: self._tensors[name] for name in names}
        return function, list(self._inputs.values())

    def _lay(self, which: str, layout: Layout, **tensors: Any) -> None:
        self._form[which] = layout
        self._tensors |= tensors
