"""An attention for transformers: decoders, encoders and what is between them; causal, bidirectional, windows
on either side, padding, masks and position biases of a model's own, softcap, sinks; inference, and training
with dropout.

    from attnc.adapters.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attnc")

`register` gives the attention function and the mask function one name: without the latter transformers
drops the mask. The mask function proves that a model's mask is a band (keys first .. last - 1, none beyond a
distance from the query on either side) and hands it to the attention function; other masks come as tensors
with a value for each query and key, which skip no tile.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sized
from functools import lru_cache, partial
from operator import index
from typing import Any, TypeAlias

import torch

from attnc.adapters.bands import BAND, Band, carry
from attnc.adapters.specs import (
    DTYPES,
    Changes,
    Wanted,
    find_function,
    kernel_name,
    number_of,
    plan_of,
    refuse,
    run_kernel,
    tile_rows,
)
from attnc.api.fastest import SHORT_KEYS, are_few, count_sharing, exceeds, share_keys
from attnc.api.repeats import keep, repeat
from attnc.api.tensors import FLOATS, NUMBERS, GivenTensors, draw_seed, lower_to_autocast, to_dropout
from attnc.support.arguments import requires_gradient

is_compiling = torch.compiler.is_compiling
MaskFunction: TypeAlias = Callable[..., torch.Tensor]

#: What models pass on that no implementation of attention computes with, or that the mask has dealt with.
_WITHOUT_EFFECT = frozenset(
    (
        "cache_position",
        "is_causal",
        "logits_to_keep",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "sliding_window",
        "use_cache",
    )
)

#: Where packed sequences begin and how long they are, which masks made of position_ids say, too.
_PACKED = frozenset(("cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q"))


def register(name: str = "attnc") -> None:
    """Makes `attn_implementation=name` known to transformers (5.0 or newer, which must be installed)."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: torch.Tensor | None = None,
    config: Any = None,
    device: torch.device | str = "cpu",
    **rest: object,
) -> torch.Tensor:
    """Returns the band of a forward pass, attached to a tensor [B, 1, q_length, kv_length] that carries it to
    the attention; or, of a mask that is none, what it keeps as bools of this shape.

    mask_function: a band where what it keeps around the query ends at a distance on either side, or nowhere.
    attention_mask: [B, keys]; a band where each row has one run of ones: padding on the left, on the right,
    or on both. Waits for the device, as transformers' own masks do, and warns of a mask that is no band. In a
    graph of torch.compile, where nobody knows about holes, a band with the keys that are kept; torch.export
    takes a mask function that says more than causal by its values.
    """
    lengths, offsets = (q_length, kv_length), (q_offset, kv_offset)
    kept = None if attention_mask is None else _find_kept_keys(attention_mask, kv_offset, kv_length)
    ends = _known_ends(mask_function)
    if ends is None:
        found = _values_of(mask_function, batch_size, lengths, offsets, device)
        ends = None if torch.compiler.is_exporting() else _ends_of(found, lengths, offsets, device)
        if ends is None:
            return _dense(found, kept)
    stop = (torch.as_tensor(q_offset, device=device) + q_length - kv_offset).expand(batch_size)
    if ends == (None, None):
        stop = torch.full_like(stop, kv_length)
    first, last, keys = torch.zeros_like(stop), stop, None
    if kept is not None:
        first, last, is_run = _run_of_ones(kept, stop)
        if is_compiling():  # which has no value of it
            keys = kept
        elif not bool(is_run):
            return _dense(_values_of(mask_function, batch_size, lengths, offsets, device), kept)
    band = Band(first.int().contiguous(), last.int().contiguous(), stop.int().contiguous(), *ends, keys)
    return carry(band, (batch_size, 1, q_length, kv_length))


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **rest: object,
) -> tuple[torch.Tensor, None]:
    """Returns (o: [B, M, Hq, Dv], None) of query [B, Hq, M, D], key [B, Hkv, N, D] and value [B, Hkv, N, Dv],
    all of float16, bfloat16 or float32; under torch.autocast they are converted to its type.

    attention_mask: what `mask` has made; None for modules that are not causal (`is_causal` of the call, else
    of the module), which see all keys; or [B or 1, Hq or 1, M or 1, N or more], added to the scores behind
    softcap, of bools: what they keep
    scaling: 1 / sqrt(D) if None; s_aux: [Hq], a logit for each head that joins the denominator
    position_bias: [B or 1, Hq or 1, M or 1, N], added likewise, with a gradient
    dropout: the probability of dropping a weight, by a mask that follows from a seed drawn from PyTorch's
    generator on the device, as the backward's does
    Rows that see no key (padding on the left) are 0. Raises ValueError or TypeError that names the argument,
    what was expected and what came: no mask for a causal module, weights to return, unknown arguments.
    """
    query, key, value = lower_to_autocast(query, key, value)
    band = getattr(attention_mask, BAND, None)
    own = attention_mask if band is None else _rows_of(band.keys)
    bounds = (None, None, None) if band is None else (band.first, band.last, band.stop)
    plan_key = None
    if dropout == 0 and not is_compiling() and rest.keys() <= _WITHOUT_EFFECT:
        ends = None if band is None else (band.left, band.right)
        causal = attention_mask is None and _is_causal(module, rest.get("is_causal"))
        facts = ("attention", scaling, softcap, ends, causal, rest.get("output_attentions"))
        plan_key, found = repeat(facts, (query, key, value, *bounds, own, position_bias, s_aux))
        if found is not None:
            return found[0], None
    refuse("attention", output_attentions=rest.get("output_attentions"))
    refuse("attention", **{name: rest[name] for name in rest if name not in _WITHOUT_EFFECT | _PACKED})
    _check_packed(rest, own if band is None else None)
    if attention_mask is None and _is_causal(module, rest.get("is_causal")):
        raise ValueError(
            "attention_mask: expected what the mask function of this name returned, got None for a module"
            " that is causal"
        )
    checked = _check_tensors(query, key, value, s_aux)
    lengths = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    tables = {
        name: _table(name, x, lengths, checked)
        for name, x in (("attention_mask", own), ("position_bias", position_bias))
        if x is not None
    }
    gradients = torch.is_grad_enabled() and any(map(requires_gradient, (query, key, value)))
    learned = [("s_aux", s_aux), *tables.items()] if torch.is_grad_enabled() else []
    wanted = [name for name, x in learned if x is not None and requires_gradient(x)]
    dropped = _draw(dropout, query.device)
    size, size_v = index(query.shape[-1]), index(value.shape[-1])  # numbers for torch.compile too
    rows = 0 if gradients or wanted or len(dropped) else _rows_of_few(query, key, value, band, tables)
    form = _form_name(
        query.dtype,
        (size, size_v),
        number_of("attention: scaling", scaling, size**-0.5),
        None if band is None else (band.left, band.right),
        tuple((name, _element(name, x), *map(_is_one, x.shape[:3])) for name, x in tables.items()),
        number_of("attention: softcap", softcap, 0.0),
        s_aux is not None,
        len(dropped) > 0,
        (*(("q", "k", "v") if gradients else ()), *wanted),
        rows,
        rows > 0 and exceeds(key.shape[2], SHORT_KEYS),  # other graphs serve any number of keys
    )
    sinks = () if s_aux is None else (s_aux.float(),)
    given = () if band is None else bounds
    o: torch.Tensor = run_kernel(form, query, key, value, *given, *tables.values(), *sinks, *dropped)
    if plan_key is not None:
        cut = {name: partial(_cut, keys=key.shape[2]) for name in tables}
        changes: Changes = {**cut, **({} if s_aux is None else {"s_aux": torch.Tensor.float})}
        names = (
            "q",
            "k",
            "v",
            *(("first", "last", "stop") if given else ()),
            *tables,
            *(["s_aux"] if sinks else []),
        )
        keep(plan_key, plan_of(find_function(form, query, key, value), names, changes))
    return o, None


def _rows_of(keys: torch.Tensor | None) -> torch.Tensor | None:
    """Returns [B, N] as a mask of every head and query."""
    return None if keys is None else keys[:, None, None, :]


def _is_causal(module: torch.nn.Module, is_causal: object) -> bool:
    """Returns whether a call without a mask is to be refused."""
    return (getattr(module, "is_causal", True) if is_causal is None else is_causal) is not False


def _check_packed(rest: Mapping[str, object], own: torch.Tensor | None) -> None:
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        starts = rest.get(name)
        if isinstance(starts, torch.Tensor) and starts.shape[0] > 2 and own is None:
            raise ValueError(
                f"attention: {name}: expected a mask that keeps packed sequences apart, which transformers"
                " makes of position_ids without a cache (use_cache=False), got none"
            )


def _draw(dropout: object, device: torch.device) -> tuple[float, torch.Tensor] | tuple[()]:
    p = to_dropout("attention: dropout", dropout)
    return (p, draw_seed(device)) if p else ()


def _cut(x: torch.Tensor, keys: int) -> torch.Tensor:
    return x[..., :keys]


def _check_tensors(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, s_aux: torch.Tensor | None
) -> GivenTensors:
    checked = GivenTensors()
    checked.check("query", query, "B H M D", FLOATS)
    checked.check("key", key, "B Hkv N D", (query.dtype,), "like query")
    checked.check("value", value, "B Hkv N Dv", (query.dtype,), "like query")
    checked.check_columns(query="D", value="Dv")
    checked.check_rows(query=query, key=key, value=value)
    checked.check_groups("query", "key")
    if s_aux is not None:
        checked.check("s_aux", s_aux, "H", NUMBERS)
    return checked


def _table(
    name: str, x: torch.Tensor, lengths: tuple[int, int, int, int], checked: GivenTensors
) -> torch.Tensor:
    """Returns a mask or bias with a value for each query and key, cut to the keys that there are. ValueError
    for another shape.
    """
    B, H, M, N = lengths
    checked.check(name, x, "_ _ _ _", (*FLOATS, torch.bool))
    fits = x.shape[0] in (1, B) and x.shape[1] in (1, H) and x.shape[2] in (1, M)
    if not fits or x.shape[3] < N:
        raise ValueError(f"{name}: expected shape [{B} or 1, {H} or 1, {M} or 1, {N}], got {list(x.shape)}")
    return _cut(x, N)


def _element(name: str, x: torch.Tensor) -> str:
    if x.dtype is torch.bool:
        return "bool"
    return DTYPES[x.dtype]


@lru_cache(maxsize=256)
def _kernel_name(
    dtype: torch.dtype,
    sizes: tuple[int, int],
    scale: float,
    band: tuple[int | None, int | None] | None,
    tables: tuple[tuple[str, str, bool, bool, bool], ...],
    softcap: float,
    sinks: bool,
    dropout: bool,
    grad: tuple[str, ...],
    rows: int,
    is_long: bool,
) -> str:
    """Returns the name of a form's kernel. sizes: of a head of q and k, and of v. tables: name, element type,
    whether sequences share it, whether heads, whether queries. rows: of a tile of few queries, 0 of many;
    is_long: whether there are more than `SHORT_KEYS` keys.
    """
    head_dim, value_dim = sizes
    is_own = value_dim != head_dim
    kept = [] if band is None else ["first[b] <= kv_idx < last[b]"]
    for bound, text in zip(band or (), ("q_pos - {} <= kv_idx", "kv_idx <= q_pos + {}"), strict=False):
        kept += [] if bound is None else [text.format(bound)]
    inputs = [] if band is None else ["first, last, stop: i32[B]"]
    terms: list[str] = []
    for name, element, *of_one in tables:
        shape = [1 if is_one else size for size, is_one in zip(("B", "Hkv * G", "M"), of_one, strict=True)]
        index = [0 if is_one else place for place, is_one in zip(("b", "h", "q_idx"), of_one, strict=True)]
        inputs.append(f"{name}: {element}[{', '.join(map(str, (*shape, 'N')))}]")
        value = f"{name}[{', '.join(map(str, (*index, 'kv_idx')))}]"
        (kept if element == "bool" else terms).append(value)
    return kernel_name(
        Wanted(
            name="transformers_attention",
            dtype=dtype,
            head_dim=head_dim,
            scale=scale,
            q="[B, Hkv * G, M, D]",
            kv="[B, Hkv, N, D]",
            value="[B, Hkv, N, Dv]" if is_own else "",
            value_dim=value_dim if is_own else 0,
            o=f"[B, M, Hkv * G, {'Dv' if is_own else 'D'}]",
            inputs=tuple(inputs),
            length="" if band is None else "stop",
            mask=" and ".join(kept),
            terms=tuple(terms),
            softcap=softcap,
            sink="s_aux" if sinks else "",
            dropout=dropout,
            grad=grad,
            decode=rows > 0,
            rows=rows,
            is_long=is_long,
        )
    )


def _rows_of_few(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, band: Band | None, tables: Sized
) -> int:
    """Returns the rows of a tile of a call whose programs share keys, 0 for others: a constant, as `_is_one`.
    Such are calls of few queries, and chunks beside a cache of which they see all before them.
    """
    (heads, kv_heads), queries = (x.shape[1] for x in (query, key)), query.shape[2]
    is_chunk = not are_few(queries)
    if is_chunk:
        sees_all = (band is None or band.left is None) and not tables and not is_compiling()
        rows, sizes = query.transpose(1, 2), (heads, kv_heads)
        if not sees_all or not share_keys("attention", rows, key, value, heads=sizes, keys=key.shape[2]):
            return 0
    return tile_rows(count_sharing(queries, heads, kv_heads), many=is_chunk)


def _is_one(size: int) -> bool:
    """Returns whether a size is 1: a constant of a graph of torch.compile, where sizes may be symbols."""
    return any(known == 1 for known in (size,))


def _form_name(*form: Any) -> str:
    return _kernel_name(*form)


# What torch.compiler.assume_constant_result does, without importing the compiler: tracing calls it for real.
_form_name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes


def _find_kept_keys(attention_mask: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Returns which keys count, bool[B, count]; those behind the mask, where a cache has room, do not."""
    kept = attention_mask[:, first : first + count].bool()
    return torch.nn.functional.pad(kept, (0, count - kept.shape[1]))


def _run_of_ones(kept: torch.Tensor, stop: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the first key of [B, N] that is kept and one past the last, before `stop`; and whether there is
    no hole between them.
    """
    index = torch.arange(kept.shape[1], device=kept.device)
    kept = kept & (index < stop[:, None])
    count = kept.sum(1)
    first = torch.where(count > 0, kept.int().argmax(1), stop)
    last = torch.where(kept, index + 1, 0).amax(1)
    return first, last, ((last - first == count) | (count == 0)).all()


Lengths: TypeAlias = tuple[int, int]
#: How far a band reaches before the query and behind it; None: to the end.
Ends: TypeAlias = tuple["int | None", "int | None"]
Offsets: TypeAlias = tuple["int | torch.Tensor", int]


def _known_ends(function: MaskFunction | None) -> Ends | None:
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if function is bidirectional_mask_function:
        return None, None
    return (None, 0) if function is None or function is causal_mask_function else None


def _values_of(
    function: MaskFunction | None,
    batch: int,
    lengths: Lengths,
    offsets: Offsets,
    device: torch.device | str,
) -> torch.Tensor:
    from transformers.masking_utils import causal_mask_function

    b = torch.arange(batch, device=device)[:, None, None, None]
    found = (function or causal_mask_function)(b, torch.zeros_like(b), *_positions(lengths, offsets, device))
    return torch.as_tensor(found, device=device).expand(batch, 1, *lengths)


def _positions(
    lengths: Lengths, offsets: Offsets, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    q_idx = (torch.arange(lengths[0], device=device) + offsets[0])[:, None]
    return q_idx, (torch.arange(lengths[1], device=device) + offsets[1])[None, :]


def _ends_of(
    found: torch.Tensor, lengths: Lengths, offsets: Offsets, device: torch.device | str
) -> Ends | None:
    """Returns how many keys before its own and after it a query sees, None for all; None where what is found
    is no band around the query, or has keys behind the last query beside an end in front of it.
    """
    q_idx, kv_idx = _positions(lengths, offsets, device)
    distance = (kv_idx - q_idx).expand_as(found)
    if not bool(found.any()):
        return None
    least, most = (int(end) for end in distance[found].aminmax())
    reach = int(distance.min()), int(distance.max())
    if least > 0 or most < 0 or not bool((found == ((distance >= least) & (distance <= most))).all()):
        return None
    left, right = (None if least == reach[0] else -least), (None if most == reach[1] > 0 else most)
    behind = int(kv_idx.max() - q_idx.max())
    return None if behind and right != 0 and (left, right) != (None, None) else (left, right)


def _dense(found: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    warnings.warn(
        "attnc: no tile is skipped for a mask of transformers that is no band (packed prompts, holes in"
        " attention_mask): it is looked up element by element",
        stacklevel=2,
    )
    return found if kept is None else found & kept[:, None, None, :]
