"""Whose kernels a call runs on where its caller does not say: one choice for all functions of attnc.

Targets are ranked by what was measured on an H200 (`docs/figures`). Those that the device or a missing
package rules out are left out, and so is wgmma's for tensors that TMA would have to copy. What a Hopper GPU
loses by that is said once in a process.

`attnc export` copies this file beside kernels that run without the compiler.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import Literal, TypeAlias, get_args

import torch

from attnc.support.by_target import Needs, runs
from attnc.support.devices import gpu_of

HOPPER, SM80, TRITON = "cuda.sm_90a", "cuda.sm_80", "triton"
#: `attnc.target.dispatch.needs_of` each target, without the compiler, which a kept kernel does not need.
NEEDS: Mapping[str, Needs] = MappingProxyType({
    HOPPER: Needs("cupy", 90, 90, interprets=False),
    SM80: Needs("cupy", 80, None, interprets=False),
    TRITON: Needs("triton", 80, None, interprets=True),
})  # fmt: skip
#: Compute capability of the GPUs that have wgmma, and how many times as fast as Triton's its kernels are
#: there: the least and the most of the cells of `forward_hopper_h200` and `backward_hopper_h200`.
_CAPABILITY, _FACTORS = 90, (1.1, 2.2)
#: Heads of f32 with at most so many columns: Triton's forward is faster than that of sm_80.
_NARROW = 64
#: wgmma and TMA need rows of a multiple of so many elements. The plan of a spec says how wide they may be.
_STEP = 8
#: Decoding by Triton: query rows of a tile.
TILE_ROWS = 16
#: Up to so many columns, Triton's addresses of pages take longer than the rows themselves.
NARROW_ROWS = 64
#: Beyond so many columns, Triton's tiles have room for 32 keys only.
SHORT_TILES = 128
#: With room for more keys than this, Hopper's kernel is as fast as Triton's, or up to 1.6 times as fast.
SHORT_KEYS = 2048
#: Up to so many queries of a sequence, programs share its keys: tiles of rows would leave most of a GPU idle.
FEW = 16
#: More queries on a Hopper GPU, measured on an H200: rows of a tile of the kernel whose programs share keys,
#: of all heads, and of the one whose tiles of one head walk over all keys; how much longer splits of the keys
#: of the former take than all multiprocessors need; and the keys that a tile of the latter walks over while
#: splits begin and are joined, in all and for each tile. The tables of `attnc.tuned` follow.
SHARED_ROWS, ROUNDED, BEGUN, JOINED = 128, 1.03, 800, 9
#: The same where more than half of the multiprocessors have a tile, so that splits come in several rounds,
#: for each tile; where tiles fill fewer rounds without splits, for each of these; and keys beside a query, at
#: least, of which all tiles of a head see about as many: then the last round lasts as long as the others.
CROWDED, STARTED, CHUNK = 26, 400, 4

#: Query heads for each head of keys, at least, and queries of a packed sequence, on average and at most, up
#: to which tiles have rows of several heads on Hopper: one head would fill at most five eighths of its tiles
#: of 128 rows, unless a long sequence has most of the work. Of narrow heads half.
#: Measured on an H200.
PACKED_GROUP, SHORT_QUERIES, SHORT_OF_NARROW, MOST_QUERIES = 4, 80, 64, 1024
#: What a call may ask for besides, with which such tiles were not timed.
_NOT_TIMED = {"softcap", "cap", "slopes", "left", "right", "rows", "lengths", "leftpad"}

#: Heads of 16 bits with at most so many columns: Triton's gradients are faster than those of sm_80. For wider
#: heads Triton multiplies 512 columns, however many there are, and is no faster even for 512.
_NARROW_GRADIENTS = 256
#: What the ranking depends on: elements of 16 bits; gradients of wide heads of 16 bits; elements of f32;
#: narrow heads of f32 without gradients; blocks that each query lists, which Triton gathers fastest.
Kind: TypeAlias = Literal["16 bits", "wide gradients", "f32", "narrow f32", "listed blocks"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_CHOSEN = [""]
_SAID: set[tuple[str, str]] = set()
_ABLE: dict[tuple[int, Kind, str], tuple[str, ...]] = {}


def run_on(target: str | None) -> None:
    """Chooses the kernels that calls run on from now on, in all functions that take no `target`.

    target: "triton", "cuda.sm_80" or "cuda.sm_90a", which is taken where it runs and has a kernel for the
    call; None for the fastest, the default. Raises ValueError for any other.
    """
    if target is not None and target not in NEEDS:
        raise ValueError(f"target: expected None or one of {', '.join(NEEDS)}, got {target!r}")
    _CHOSEN[0] = target or ""


def chosen_target() -> str:
    """Returns the target that `run_on` was given, "" for the fastest."""
    return _CHOSEN[0]


def rank_for_lists(targets: Sequence[str]) -> list[str]:
    """Returns targets, the fastest first, as they are ranked for an attention over lists: `cuda.sm_80` is the
    last of them, which takes 1.3 to 1.9 times as long as Triton over blocks of queries, and as long over
    those of each query (0.9 to 1.8 times, measured on an H200), unless `run_on` chose a target.
    """
    return [*targets] if chosen_target() else sorted(targets, key=SM80.__eq__)


def targets_of_call(
    function: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, *, gradients: bool = False
) -> tuple[str, ...]:
    """Returns the targets that a call may run on, the fastest first. All but the last may lack a kernel for
    it.

    function: its name in warnings; v: None if it is columns of k (latent attention); gradients: whether the
    call needs some.
    """
    index = index_of(q)
    if index < 0:
        return (TRITON,)
    width = q.shape[-1] if v is None else max(q.shape[-1], v.shape[-1])
    kind = kind_of(q.dtype is torch.float32, width, gradients)
    found = targets_on(function, index, kind, _CHOSEN[0])
    if found[0] != HOPPER:
        return found
    reason = misfit(q, k, v)
    if not reason:
        return found
    warn_of_loss(function, reason)
    return found[1:] or (TRITON,)


def target_of_order(function: str, q: torch.Tensor, *, on_hopper: bool) -> tuple[str, ...]:
    """Returns the one target of all calls whose sums have an absolute order: another target would give other
    bits. on_hopper: whether Hopper's kernels keep the order in all calls that have to agree with this one.
    """
    index = index_of(q)
    if index < 0 or not on_hopper:
        return (TRITON,)
    found = targets_on(function, index, "16 bits", _CHOSEN[0])
    return found[:1] if found[0] == HOPPER else (TRITON,)


def targets_of_few(
    function: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    sharing: int,
    keys: str = "dense",
    length: int = 0,
    is_packed: bool = False,
) -> tuple[str, ...]:
    """Returns the targets of a call whose sequences have at most `FEW` queries, and whose programs share the
    keys: the fastest first. All but the last may lack a kernel for the call.

    Triton's kernels read memory at its full speed, except in the calls for which `suits_tiles` chooses
    Hopper's. If each KV head has one query of 16 bits, and the keys are narrow rows of one tensor, the kernel
    of sm_80 is the fastest on a Hopper GPU, because its warps share a tile of keys.

    sharing: rows of a sequence that share the keys of a KV head; keys: "dense", "ragged" or "paged"; length:
    keys of a sequence that there is room for, 0 if it is not known; is_packed: the queries of sequences lie
    end to end, and only Triton's programs share their keys; other arguments as in `targets_of_call`.
    """
    if is_packed and not _CHOSEN[0]:
        return (TRITON,)
    width = max(q.shape[-1], v.shape[-1])
    if _CHOSEN[0] or width > SHORT_TILES or sharing > TILE_ROWS:
        return targets_of_call(function, q, k, v)
    if q.dtype is torch.float32 or k.dtype != q.dtype:
        return (TRITON,)
    if keys == "dense" and width <= NARROW_ROWS and sharing == 1:
        return _targets_of_one_row(function, index_of(q))
    suits = suits_tiles(width, sharing, keys, is_long=exceeds(length, SHORT_KEYS), is_known=length != 0)
    return targets_of_call(function, q, k, v) if suits and not misfit(q, k, v) else (TRITON,)


def share_keys(
    function: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, heads: tuple[int, int], keys: int
) -> bool:
    """Returns whether programs share the keys of queries [B, M, ...]: of few, and of more where their tiles
    of rows would leave most of a Hopper GPU idle beside many keys, as chunks of prompts and long drafts do,
    or would be half empty, as those of a single head are.

    function: what warnings call the caller; heads: of q, and of k and v; keys: of a sequence, at most, all of
    which some query sees; 0 where that is not known.
    """
    if are_few(q.shape[1]):
        return True
    index = index_of(q)
    if index < 0 or torch.compiler.is_exporting() or k.dtype != q.dtype or misfit(q, k, v):
        return False
    if targets_of_call(function, q, k, v)[0] != HOPPER:
        return False
    rows, processors = count_sharing(q.shape[1], *heads), _count_processors(index)
    shared, apart = (
        q.shape[0] * count * -(-queries // SHARED_ROWS)
        for count, queries in ((heads[1], rows), (heads[0], q.shape[1]))
    )
    return saves_rounds(shared, apart, processors, queries=q.shape[1], keys=keys)


def saves_rounds(shared: int, apart: int, processors: int, *, queries: int, keys: int) -> bool:
    """Returns whether `shared` tiles of rows of all heads, whose programs share keys, take clearly less time
    than `apart` tiles of one head.
    """
    are_even = keys >= CHUNK * queries
    places = processors * -(-apart // processors) if are_even else max(processors, apart)
    spared = places // processors - -(-shared // processors)  # rounds, without splits
    if are_even and keys * spared > STARTED * -(-shared // processors):
        return True
    begun = CROWDED * shared if 2 * shared > processors else BEGUN + JOINED * shared
    return keys * (places - ROUNDED * shared) > processors * begun


def class_of_length(most: int | None) -> int:
    """Returns what kernels depend on of how many queries a packed sequence has at most: 1 and `MOST_QUERIES`
    for not more than those, 0 for more, and where the caller does not say.
    """
    if not isinstance(most, int) or not 0 < most <= MOST_QUERIES:
        return 0
    return 1 if most == 1 else MOST_QUERIES


def pack_heads(
    function: str, tensors: Mapping[str, torch.Tensor], form: Mapping[str, object], most: int | None
) -> bool:
    """Returns whether a tile has rows of all heads that share keys: of packed sequences [T, H, D] so short
    that queries of one head would leave much of it empty, beside the keys of the same tokens. form: how
    tensors lie, and what else the call asks for; most: as of `class_of_length`.
    """
    if not form.get("q") == form.get("kv") == "ragged" or form.keys() & _NOT_TIMED:
        return False
    q, k, v, starts = (tensors[name] for name in ("q", "k", "v", "cu_seqlens_q"))
    is_timed = q.shape[0] == k.shape[0] and q.shape[1] >= PACKED_GROUP * k.shape[1]
    mean = SHORT_OF_NARROW if q.shape[-1] <= NARROW_ROWS else SHORT_QUERIES
    is_short = class_of_length(most) > 0 and q.shape[0] <= mean * (starts.shape[0] - 1)
    if torch.compiler.is_compiling() or not (is_timed and is_short) or q.shape[-1] > SHORT_TILES:
        return False
    return targets_of_call(function, q, k, v)[0] == HOPPER


def suits_tiles(width: int, sharing: int, keys: str, *, is_long: bool, is_known: bool = True) -> bool:
    """Returns whether Hopper's kernel, of tiles of 64 rows, is the fastest for few queries: of more rows than
    Triton's tile has; of heads so wide that its tiles have few keys, or that it pads to a power of two; of
    pages whose rows are so short that its addresses take longer than they do; and of many keys.

    width: the larger of D and Dv; sharing, keys: as of `targets_of_few`; is_long: whether there is room for
    more than `SHORT_KEYS` keys; is_known: whether that is known.
    """
    if sharing > TILE_ROWS or width > SHORT_TILES:
        return True
    if keys == "ragged":
        return False
    has_narrow_pages = keys == "paged" and width <= NARROW_ROWS and not is_known
    is_padded = width > NARROW_ROWS and width & (width - 1) != 0
    return is_long or has_narrow_pages or is_padded


def are_few(queries: int) -> bool:
    """Returns whether queries of a sequence are known to be `FEW` at most."""
    return exceeds(FEW + 1, queries)


def exceeds(length: int, most: int) -> bool:
    """Returns whether a length is known to exceed the other: torch.export keeps open lengths open."""
    if torch.compiler.is_exporting():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return bool(statically_known_true(length > most))
    return any(known > most for known in (length,))  # a branch: graphs of open sizes guard it


def count_sharing(queries: int, heads: int, kv_heads: int) -> int:
    """Returns how many rows of a sequence share the keys of a KV head."""
    return queries * (heads // max(kv_heads, 1))


def current_index() -> int:
    """Returns the number of this process's GPU; -1 for the CPU."""
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


def index_of(x: torch.Tensor) -> int:
    """Returns the number of a tensor's GPU; -1 for the CPU."""
    index = x.device.index
    return index if x.is_cuda and index is not None else -1


def kind_of(is_f32: bool, width: int, gradients: bool, *, lists_blocks: bool = False) -> Kind:
    """Returns the kind by which the targets of an attention are ranked. width: the larger of D and Dv;
    lists_blocks: whether each query lists blocks of keys, in tensors that are not packed.
    """
    if lists_blocks:
        return "listed blocks"
    if not is_f32:
        return "wide gradients" if gradients and width > _NARROW_GRADIENTS else "16 bits"
    return "f32" if gradients or width > _NARROW else "narrow f32"


def targets_on(function: str, index: int, kind: Kind, chosen: str = "") -> tuple[str, ...]:
    """Returns the targets that run on the device of this number (-1: the CPU), the fastest first; Triton's
    where none does. function: what a warning calls the caller; chosen: which to prefer, "" for the fastest.
    """
    found = _ABLE.get((index, kind, chosen))
    if found is None:
        found = _ABLE[index, kind, chosen] = _targets_on(function, index, kind, chosen)
    return found


def _targets_of_one_row(function: str, index: int) -> tuple[str, ...]:
    if index < 0 or gpu_of(index).capability != divmod(_CAPABILITY, 10):
        return (TRITON,)
    found = targets_on(function, index, "16 bits", SM80)
    return tuple(target for target in found if target != HOPPER)


def _count_processors(index: int) -> int:
    return gpu_of(index).multiprocessors


# What torch.compiler.assume_constant_result does, without importing the compiler: tracing calls all three.
_count_processors._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes
_targets_of_one_row._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes
targets_on._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes


def _targets_on(function: str, index: int, kind: Kind, chosen: str) -> tuple[str, ...]:
    if index < 0:
        return (TRITON,)
    major, minor = gpu_of(index).capability
    ranked = ranking(10 * major + minor, kind)
    if chosen:
        ranked = (chosen, *(target for target in ranked if target != chosen))
    able = [target for target in ranked if runs(NEEDS[target], index)]
    if not chosen and 10 * major + minor == _CAPABILITY and able[:1] != [ranked[0]]:
        package = NEEDS[ranked[0]].package
        how = install_of_cupy() if package == "cupy" else f"pip install {package}"
        warn_of_loss(function, f"{package}, which is not installed: {how}", ranked[0])
    last = able.index(TRITON) + 1 if TRITON in able else len(able)  # it has a kernel for every call
    return tuple(able[:last]) or (TRITON,)


def ranking(capability: int, kind: Kind) -> tuple[str, ...]:
    """Returns targets by their speed on a GPU of this compute capability (90 for 9.0), the fastest first."""
    others = (SM80, TRITON) if kind in ("f32", "wide gradients") else (TRITON, SM80)
    is_wgmmas = kind in ("16 bits", "wide gradients")
    return (HOPPER, *others) if capability == _CAPABILITY and is_wgmmas else others


def misfit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> str:
    """Returns the property that wgmma and TMA need and that tensors of 16 bits, or k and v of 8, do not have;
    "" if they have all.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is None:
            continue
        if x.shape[-1] % _STEP:
            return f"rows of a multiple of {_STEP} elements, which those of {name} are not"
        size = x.element_size()
        for axis, stride in enumerate(x.stride()[:-1]):
            if stride * size % (2 * _STEP) and x.shape[axis] != 1:
                return f"strides of a multiple of {2 * _STEP} bytes, which {name} has not: it may be copied"
    return ""


def install_of_cupy() -> str:
    """Returns the command that installs CuPy for the CUDA of this PyTorch."""
    return f"pip install cupy-cuda{(torch.version.cuda or '13').partition('.')[0]}x"


def warn_of_loss(function: str, needs: str, target: str = HOPPER) -> None:
    """Warns the caller of a function, once in a process for each reason, that slower kernels than those of a
    target run. needs: what those need.
    """
    if (target, needs) in _SAID:
        return
    _SAID.add((target, needs))
    factor = f", {_FACTORS[0]}x to {_FACTORS[1]}x as fast here," if target == HOPPER else ""
    warnings.warn(
        f"{function}: kernels of {target}{factor} need {needs}. Others run", stacklevel=caller_level()
    )


warn_of_loss._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions take attributes


def caller_level() -> int:
    """Returns how far above the function that asks the first frame is that is neither of this package nor
    torch's.
    """
    packages = {__name__.partition(".")[0], "torch", "contextlib"}
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in packages:
        frame, level = frame.f_back, level + 1
    return level
