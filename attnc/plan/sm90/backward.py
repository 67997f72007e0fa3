"""The backward of the Hopper target by wgmma: who has it, and how its kernel lies on the machine.

One kernel makes dk and dv, and with `accumulate.dq = atomic` dq. A block keeps 128 keys, 64 for each of two
warpgroups that multiply; a third copies K and V once, and tiles of Q and dO. S^T = K Q^T and dP^T = V dO^T
are accumulators in registers, which rounded to 16 bits are left operands of dV += P^T dO and dK += dS^T Q.
dQ = dS K sums over the keys of both warpgroups: dS goes through shared memory, and dQ is added to f32 sums.

Accumulators of dK, dV, S^T, dP^T and dQ decide the queries of a tile: 128 up to a head dimension of 64, 64 up
to one of 128. What the kernel does not make (dq in two passes, other gradients, wider heads, packed
sequences) the kernels of `cuda.sm_80` make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attnc.expr.nodes import Dim, Index, walk
from attnc.model.attention import Variant
from attnc.model.configs import configs
from attnc.model.schedule import Config, Schedule, knobs_of
from attnc.model.tensors import Dense
from attnc.plan.columns import feature
from attnc.plan.device import DEVICES
from attnc.plan.estimate import Buffer, Estimate
from attnc.plan.fitting import SIZES, nothing_fits
from attnc.plan.gradients import wanted_loads
from attnc.plan.layout import KernelName
from attnc.plan.signature import kv_heads, normalise
from attnc.plan.sm80.backward_layout import CudaBackward, over_rows
from attnc.plan.sm80.layout import CudaLayout
from attnc.plan.sm90.layout import PIECE, WGMMA_ROWS, entry_registers

#: Warpgroups that multiply; keys of a tile; tiles of K, and of dS, in shared memory.
CONSUMERS = 2
KEYS = CONSUMERS * WGMMA_ROWS
K_TILES, DS_TILES = 2, 2
#: Registers of a thread that copies, and of one that multiplies: all that the launch holds, exactly.
COPY_REGISTERS, MULTIPLY_REGISTERS = 24, 240
assert entry_registers(CONSUMERS) * (CONSUMERS + 1) == COPY_REGISTERS + CONSUMERS * MULTIPLY_REGISTERS
#: Warps of a block; bytes that a warp stages results in; columns of dQ that a warpgroup makes.
WARPS = 4 * (CONSUMERS + 1)
STAGED, DQ_COLUMNS = 4096, 64
#: Bytes that may be skipped so that tiles lie right; of barriers and the number of the tile at hand.
_ALIGNMENT, _BARRIERS = 1024, 256
#: Columns of q, or of v, at most.
_WIDEST = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90Backward(CudaBackward):
    """As for `CudaBackward`, for the kernel of wgmma; those for the rows, before and after, are the same."""

    @property
    def qk_pieces(self) -> int:
        return -(-self.layout.d // PIECE)

    @property
    def v_pieces(self) -> int:
        return -(-self.layout.dv // PIECE)

    @property
    def queries(self) -> int:
        """Of a tile: what registers leave for S^T and dP^T beside dK and dV."""
        return 128 if self.qk_pieces == 1 else 64

    def shared_memory(self, config: Config, kernel: KernelName) -> dict[str, int]:
        if over_rows(kernel):
            return CudaBackward.shared_memory(self, config, kernel)
        stages, row = config.number("stages"), 2 * PIECE
        return {
            "k": K_TILES * KEYS * self.qk_pieces * row,
            "v": KEYS * self.v_pieces * row,
            "q": stages * self.queries * self.qk_pieces * row,
            "do": stages * self.queries * self.v_pieces * row,
            **({"ds": DS_TILES * self.queries * KEYS * 2} if self.adds_dq else {}),
            "staged": 4 * CONSUMERS * STAGED,
            "rows": stages * 2 * self.queries * 4,
            "barriers": _ALIGNMENT + _BARRIERS,
        }

    def registers(self, config: Config, kernel: KernelName) -> dict[str, int]:
        if over_rows(kernel):
            return CudaBackward.registers(self, config, kernel)
        scores = self.queries // 2
        return {
            "dk": self.layout.d // 2,
            "dv": self.layout.dv // 2,
            "s": scores,
            "dp": scores,
            **({"dq": DQ_COLUMNS // 2} if self.adds_dq else {}),
        }


def plan_sm90_backward(variant: Variant, schedule: Schedule, layout: CudaLayout) -> Sm90Backward | None:
    """How the kernels of a schedule lie; None where wgmma does not make dk and dv as they are asked for."""
    attention = normalise(variant.attention)
    accumulate = (
        configs(schedule, "backward", variant)[0]["accumulate.dq"] if "q" in attention.grads else None
    )
    adds_dq = accumulate == "atomic"
    others = set(attention.grads) - {"q", "k", "v"}
    # a kernel over queries makes other gradients, but for those of what is loaded of each key
    apart = accumulate == "two_pass" and all(x.along != ("kv",) for x in wanted_loads(attention))
    d, dv = feature(attention.q), feature(attention.v)
    if dv > PIECE if d <= PIECE else max(d, dv) > _WIDEST:
        return None
    if not all(isinstance(t.storage, Dense) for t in (attention.q, attention.k, attention.v)):
        return None
    if attention.lengths or (kv_heads(attention) != Dim("H") and Index("h") in walk(attention.mask)):
        return None
    if not {"k", "v"} & set(attention.grads) and not adds_dq:
        return None
    if (others and not apart) or accumulate == "sequential":
        return None
    return Sm90Backward(layout=layout, exchange=False, adds_dq=adds_dq, sums=bool(others))


def sm90_backward_configs(
    plan: Sm90Backward, variant: Variant, schedule: Schedule, kernel: KernelName
) -> tuple[Config, ...]:
    """The configs that can run, in their order. Raises DiagnosticError (E0601) when there is none."""
    knobs = knobs_of(schedule, "dkdv")
    sizes = {"tile.q": plan.queries, "tile.kv": KEYS, "warps": WARPS, "stages": 2}
    left_open = {key: value for key, value in sizes.items() if key not in knobs}
    found = tuple(config.changed(left_open) for config in configs(schedule, "dkdv", variant))
    candidates = tuple(dict.fromkeys(found))
    reasons = [_misfit(config, plan, kernel) for config in candidates]
    kept = tuple(config for config, reason in zip(candidates, reasons, strict=True) if reason is None)
    if not kept:
        hint = f"write '{', '.join(f'{key} = {sizes[key]}' for key in SIZES)}', or remove them"
        raise nothing_fits(schedule, kernel, reasons[0] or "", where=schedule.target, hints=(hint,))
    return kept


def _misfit(config: Config, plan: Sm90Backward, kernel: KernelName) -> str | None:
    """Why the config cannot run; None if it can."""
    for key, size, why in (
        ("tile.q", plan.queries, f"what the registers of a head dimension of {plan.layout.d} leave room for"),
        ("tile.kv", KEYS, f"{WGMMA_ROWS} for each of {CONSUMERS} warpgroups"),
        ("warps", WARPS, f"4 for each of {CONSUMERS} warpgroups that multiply, and 4 that copy"),
    ):
        if config.number(key) != size:
            return f"{key} = {config.number(key)} is not {size}: {why}"
    if config.number("stages") < 2:
        return "stages = 1 leaves nothing to copy ahead: two at least"
    if config["maxnreg"] != "none":
        return "maxnreg is not for warpgroups, which share registers as they need them"
    shared = plan.shared_memory(config, kernel)
    room = DEVICES["sm_90"].shared_per_block
    if sum(shared.values()) > room:
        parts = " + ".join(f"{name} {size}" for name, size in shared.items())
        return f"needs {sum(shared.values())} B of shared memory ({parts}); the limit is {room} B"
    return None


def sm90_backward_estimate(plan: Sm90Backward, config: Config, kernel: KernelName) -> Estimate:
    """What a block takes: shared memory exactly, registers as far as the plan knows."""
    d, dv, stages = plan.qk_pieces * PIECE, plan.v_pieces * PIECE, config["stages"]
    shapes: Mapping[str, str] = {
        "k": f"{K_TILES} x {KEYS}x{d}",
        "v": f"{KEYS}x{dv}",
        "q": f"{stages} x {plan.queries}x{d}",
        "do": f"{stages} x {plan.queries}x{dv}",
        "ds": f"{DS_TILES} x {plan.queries}x{KEYS}",
        "staged": f"{4 * CONSUMERS} warps",
        "rows": f"{stages} x 2x{plan.queries}",
        "barriers": "and the number of the tile at hand",
    }
    return Estimate(
        buffers=tuple(
            Buffer(name=name, shape=shapes[name], bytes=size)
            for name, size in plan.shared_memory(config, kernel).items()
        ),
        registers=plan.registers(config, kernel),
    )
