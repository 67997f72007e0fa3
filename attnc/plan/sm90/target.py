"""The target `cuda.sm_90a`: kernels of wgmma and TMA for Hopper, laid out by the plan.

It means this architecture alone: wgmma and setmaxnreg are in no other. Gradients that no kernel of
wgmma makes (`sm90.backward`) are made by those of mma.sync, which run on it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from attnc.diagnostics import Diagnostic
from attnc.model.attention import Attention, Variant
from attnc.model.names import TAKING_TILES
from attnc.model.schedule import BackwardConfig, HopperConfig, Knob, Schedule, Summation, TileConfig
from attnc.plan.access import Section
from attnc.plan.device import DEVICES, Device
from attnc.plan.fitting import TileShape
from attnc.plan.ir import Forward, Module, OutputKernel
from attnc.plan.ir.backward import Backward, BackwardKernel
from attnc.plan.layout import BackwardLayout, Estimate, KernelName, Layout, Which
from attnc.plan.lists import listing_of, lists_blocks
from attnc.plan.signature import feature, normalise
from attnc.plan.sm80 import Sm80
from attnc.plan.sm80.forward import cuda_layout
from attnc.plan.sm80.layout import CudaBackwardLayout, CudaLayout
from attnc.plan.sm90.backward import (
    SECTIONS,
    SECTIONS_OF_TURNS,
    Sm90Backward,
    adds_dq,
    check_sums,
    check_turns,
    plan_sm90_backward,
    sum_of_dq,
)
from attnc.plan.sm90.backward_configs import sm90_backward_configs, sm90_backward_estimate
from attnc.plan.sm90.backward_roles import Sm90BackwardRoles, plan_backward_roles
from attnc.plan.sm90.configs import (
    TARGET,
    check_sm90,
    sm90_configs,
    sm90_estimate,
    sm90_layout,
)
from attnc.plan.sm90.conversion import converts_before
from attnc.plan.sm90.costs import WIDEST_OF_TWO
from attnc.plan.sm90.decode import (
    FEW_TILES,
    LATENT_IDLE_GAIN,
    LATENT_TRIPS,
    SHORT_WALK,
    UNION_SHARE,
    draws_decoded,
    sm90_decode_configs,
    sm90_decode_estimate,
    sm90_decode_layout,
    sm90_decode_roles,
    walks_segments,
)
from attnc.plan.sm90.decode_layout import Sm90DecodeLayout
from attnc.plan.sm90.kept import plan_rounds, take_ds
from attnc.plan.sm90.latent import (
    plan_latent_backward,
    plan_wide_backward,
    refuse_latent_gradients,
    refuse_wide_gradients,
    shares_wide_gradients,
)
from attnc.plan.sm90.layout import PIECE, TURN_THREADS, WGMMA_ROWS, WIDEST, Sm90Layout, hopper
from attnc.plan.sm90.narrow import (
    CONVERTING_WARPS,
    refuse_column_scale,
    refuse_joined_keys,
)
from attnc.plan.sm90.order import check_sm90_order
from attnc.plan.sm90.roles import Sm90Roles, plan_roles
from attnc.plan.sm90.softcap import TAIL
from attnc.plan.sm90.warps import (
    BLOCK_SHARE,
    Sm90WarpsLayout,
    has_keys_of_warps,
    sm90_warps_configs,
    sm90_warps_layout,
    warps_estimate,
    warps_roles,
)
from attnc.plan.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90a(Target):
    family: ClassVar = "sm90"
    cuts_edges: ClassVar = False
    always_fills: ClassVar = False
    has_backward: ClassVar = True
    breaks_order: ClassVar = ""
    product_keys: ClassVar = ("tile.kv",)
    products: ClassVar = "; wgmma.m64nNk16 adds 16 columns, or keys, at a time, in their order"
    joins: ClassVar = "from the last to the first"
    keeps_row_maxima: ClassVar = True
    has_lazy_maximum: ClassVar = True
    has_rows_kernel: ClassVar = True
    own_tensors: ClassVar = TAKING_TILES
    sections: ClassVar = SECTIONS
    splits_in_turn: ClassVar = True
    decodes_prompts: ClassVar = True
    packs_decoded_queries: ClassVar = True
    decodes_chunks: ClassVar = True
    lists_are_bits: ClassVar = True
    walks_for_groups: ClassVar = True
    takes_listed_rows: ClassVar = True
    lists_kept_blocks: ClassVar = True

    def section(self) -> None:
        return None  # blocks are at different tiles of a head, which so stays in the cache

    def backward_section(self, *, short_loops: bool, in_turns: bool) -> Section:
        return SECTIONS_OF_TURNS if in_turns else SECTIONS

    def reads_narrow(self, schedule: Schedule) -> bool:
        return True

    def refuse_column_scale(self, attention: Attention, schedule: Schedule, name: str) -> tuple[str, ...]:
        return refuse_column_scale(attention, schedule, name)

    def refuse_joined_keys(self, attention: Attention, schedule: Schedule) -> tuple[str, ...]:
        return refuse_joined_keys(attention, schedule)

    def converts_before(self, variant: Variant, schedule: Schedule) -> bool:
        return converts_before(variant.attention, schedule)

    def differentiates_narrow(self, attention: Attention, schedule: Schedule) -> bool:
        """Copies are made for kernels of gradients, as for the forward where it has some."""
        return converts_before(attention, schedule)

    def check(self, variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
        return check_sm90(variant, schedule)

    def check_order(self, variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
        return check_sm90_order(variant, schedule)

    def walks_segments(self, variant: Variant, schedule: Schedule) -> bool:
        return walks_segments(variant, schedule)

    def check_backward(self, knob: Knob) -> Iterator[Diagnostic]:
        return _OF_GRADIENTS.check_backward(knob)

    def check_turns(self, variant: Variant, schedule: Schedule, knob: Knob) -> Iterator[Diagnostic]:
        return check_turns(variant, schedule, knob)

    def adds_packed_dq(self, variant: Variant, way: str) -> bool:
        return adds_dq(variant, way)

    def refuse_latent_gradients(self, attention: Attention) -> str:
        return refuse_latent_gradients(attention)

    def refuse_wide_gradients(self, attention: Attention) -> str:
        return refuse_wide_gradients(attention)

    def check_speed(self, variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
        return check_sums(variant, schedule)

    def sum_of_dq(self, variant: Variant, *, deterministic: bool) -> Summation:
        return sum_of_dq(variant, deterministic=deterministic)

    def default_schedule(self, shape: TileShape) -> Iterator[str]:
        if shape.width > WIDEST and (shape.latent or not shape.gradients or shape.shares_sums):  # prompts too
            is_whole = shape.segment or (shape.packed and shape.listed is None) or _unites_packed(shape)
            yield "loops = [kv], pack = gqa" + ("" if is_whole else ", split.kv = auto")
            return
        if _lists_rows(shape):  # of which no schedule has gradients
            yield "loops = [kv], pack = gqa" + ("" if _unites_packed(shape) else ", split.kv = auto")
            return
        # tiles that see alike are as long as each other: there is no order to wait for, and a tile can be
        # claimed while the one before is copied
        keys = ["softmax = online(maximum = lazy(20))"] if shape.form == "softmax" else []
        keys += ["order = longest_first"] if shape.masked else []
        if keys:
            yield ", ".join(keys)
        # The plan has the other sizes, which depend on the mask and on dropout; warps follow from consumers.
        if sizes := shape.wanted.without(["warps"]).by_key():
            yield ", ".join(f"{key} = {value}" for key, value in sizes.items())
        # Of two configs of packed sequences the second is for short ones, which end within tiles.
        elif shape.packs_all and PIECE < shape.width <= WIDEST_OF_TWO:
            yield "overlap = true"
            yield "config consumers = 2, tile.kv = 128, stages = 2, blocks = 1, pingpong = true"
            yield "config consumers = 1, tile.kv = 64, stages = 2, blocks = 2, pingpong = false"
        elif shape.packs_all and shape.width <= PIECE:
            yield "config tile.kv = 128, stages = 4, blocks = 1"
            yield "config tile.kv = 64, stages = 2, blocks = 2"
        elif shape.width <= PIECE and not shape.masked and shape.form != "none":
            yield "blocks in {1, 2}"  # two for short sequences

    def default_labels(self, shape: TileShape) -> Mapping[str, Sequence[str]]:
        """As `Target.default_labels`: a cache of 8 bits is converted in tiles where calls are short, unless
        there are gradients; of an absolute order beside wide rows, segments are shared out where tiles of
        rows are few; queries of few heads that select keys share tiles in prompts; and where they select
        blocks, always, and their tiles share keys where packed ones are few.
        """
        if shape.unites and _lists_rows(shape):
            if shape.splits_unions:
                union = ("lists = union", "overlap = true")
                return {"union": union, "split": ("split.kv = auto", *union)} if shape.packed else {"": union}
            each = (*(["split.kv = auto"] if _unites_packed(shape) else []), "lists = each")
            return {"union": ("lists = union",), "each": each}
        if shape.segment and shape.is_one_segment and shape.width > WIDEST and not shape.gradients:
            if shape.packed:
                return Target.default_labels(self, shape)
            return {"whole": (), "segments": (f"split.kv = fixed({shape.segment})",)}
        has_tiles = shape.narrow_cache and not shape.gradients
        if not has_tiles or shape.width > WIDEST or shape.latent or shape.listed is not None:
            return Target.default_labels(self, shape)
        return {"tiles": ("convert = tiles",), "before": ("convert = before",)}

    def default_steps(self, shape: TileShape, splits: str = "auto") -> Iterator[str]:
        yield f"loops = [kv], pack = gqa, split.kv = {splits}"

    def default_chunks(self, shape: TileShape, splits: str = "auto") -> Iterator[str]:
        is_usual = shape.form == "softmax" and not shape.latent and not shape.segment  # others were not timed
        if is_usual and not shape.packed and shape.listed is None:
            yield from self.default_steps(shape, splits)
            # keys come in ascending order: where scores grow with them, all would be computed again and again
            lazy = "" if shape.drifts else ", softmax = online(maximum = lazy(20))"
            yield f"tile.q = {2 * WGMMA_ROWS}, overlap = true{lazy}"

    def configs(self, variant: Variant, schedule: Schedule) -> tuple[HopperConfig, ...]:
        if has_keys_of_warps(schedule):
            return sm90_warps_configs(variant, schedule)
        return (sm90_decode_configs if schedule.is_decode else sm90_configs)(variant, schedule)

    def backward_configs(
        self, variant: Variant, schedule: Schedule, kernel: KernelName, layout: BackwardLayout | None
    ) -> tuple[BackwardConfig, ...]:
        if isinstance(layout, Sm90Backward) and kernel in layout.by_wgmma:
            return sm90_backward_configs(layout, variant, schedule, kernel)
        return _OF_GRADIENTS.backward_configs(variant, schedule, kernel, layout)

    def layout(
        self, variant: Variant, schedule: Schedule, config: TileConfig
    ) -> Sm90Layout | Sm90DecodeLayout:
        if has_keys_of_warps(schedule):
            return sm90_warps_layout(variant, schedule)
        return (sm90_decode_layout if schedule.is_decode else sm90_layout)(variant, schedule)

    def roles_of(self, kernel: Forward, variant: Variant) -> Sm90Roles:
        return plan_roles(kernel, layout_of(kernel), variant)

    def backward_roles_of(
        self, kernel: BackwardKernel, layout: BackwardLayout | None, variant: Variant
    ) -> Sm90BackwardRoles | None:
        if not isinstance(layout, Sm90Backward) or kernel.kind not in layout.by_wgmma:
            return None
        return plan_backward_roles(kernel, layout, variant)

    def backward_layout(
        self, variant: Variant, schedule: Schedule, forward: Layout | None
    ) -> CudaBackwardLayout:
        default = self.configs(variant, schedule)[0]
        layout = replace(cuda_layout(variant, default, schedule), arch=DEVICES["sm_90"].arch)
        if variant.attention.v.storage.is_part:
            return plan_latent_backward(variant, schedule, layout)
        if schedule.is_decode and shares_wide_gradients(normalise(variant.attention)):
            return plan_wide_backward(variant, schedule, layout)
        return plan_sm90_backward(variant, schedule, layout)

    def follows_lists(self, kernel: KernelName, layout: BackwardLayout | None) -> bool:
        return isinstance(layout, Sm90Backward) and kernel in layout.by_wgmma

    def keeps_ds(self, layout: BackwardLayout | None) -> bool:
        return isinstance(layout, Sm90Backward) and layout.keeps_ds

    def in_rounds(self, backward: Backward, variant: Variant) -> Backward:
        layout, listing = backward.layout, listing_of(variant.attention)
        if not isinstance(layout, Sm90Backward) or not layout.keeps_ds or listing is None:
            return backward
        made = take_ds(backward.kernels[0])
        shared = sum(layout.shared_memory(made.configs[0], made.kind).values())
        last = replace(made, shared=(shared,), roles=plan_backward_roles(made, layout, variant))
        rounds = plan_rounds(backward, last, normalise(variant.attention), listing)
        return replace(backward, last=last, rounds=rounds)

    def splits_keys(self, layout: BackwardLayout | None, *, wide: bool) -> bool:
        return isinstance(layout, Sm90Backward) and "dk" in layout.by_wgmma

    def count_shared_bytes(
        self, variant: Variant, config: TileConfig, kernel: Which, layout: Layout | BackwardLayout | None
    ) -> int:
        if kernel == "forward":
            return sum(_any_layout(layout).shared_memory(config).values())
        return _OF_GRADIENTS.count_shared_bytes(variant, config, kernel, layout)

    def columns(self, configs: Iterable[TileConfig], layout: Layout | None) -> Mapping[str, Any]:
        if not isinstance(layout, Sm90Layout):
            return {}
        if layout.capped:
            return {"tail": TAIL}
        if not layout.columns:
            return {}
        keys = max(config.tile_kv for config in configs)
        return {"columns": keys, "columns_factor": min(layout.columns_factor, 1.0)}

    def idle_gain(self, attention: Attention) -> float:
        is_latent = attention.v.storage.is_part and feature(attention.v) > WIDEST
        return LATENT_IDLE_GAIN if is_latent else Target.idle_gain(self, attention)

    def instead_of_drawing(self, variant: Variant, schedule: Schedule) -> str:
        if not has_keys_of_warps(schedule) and draws_decoded(variant, schedule):
            return ""
        if feature(variant.attention.v) > WIDEST:
            listed = ", and lists with 'rows = 64'" if lists_blocks(variant.attention) else ""
            return f"write a schedule for the target 'triton'{listed}"
        return Target.instead_of_drawing(self, variant, schedule)

    def reads_words(self, layout: Layout | None) -> bool:
        return isinstance(layout, Sm90DecodeLayout) and not layout.by_warps

    def partial_trips(self, layout: Layout | None) -> int:
        is_latent = isinstance(layout, Sm90DecodeLayout) and layout.sharing > 1
        return LATENT_TRIPS if is_latent else Target.partial_trips(self, layout)

    def block_share(self, attention: Attention, layout: Layout | None) -> float:
        if isinstance(layout, Sm90WarpsLayout):
            return BLOCK_SHARE
        if isinstance(layout, Sm90DecodeLayout) and layout.unites and layout.consumers == 1:
            return UNION_SHARE
        return Target.block_share(self, attention, layout)

    def few_tiles(self, layout: Layout | None) -> int:
        return FEW_TILES if isinstance(layout, Sm90DecodeLayout) and layout.shares else 0

    def short_walk(self, configs: Iterable[TileConfig], layout: Layout | None) -> int:
        varies = len({config.stages for config in configs}) > 1
        return SHORT_WALK if varies and isinstance(layout, Sm90DecodeLayout) and layout.walks_again else 0

    def count_joined(self, configs: Iterable[TileConfig], layout: Layout | None) -> int:
        if isinstance(layout, Sm90WarpsLayout):
            return CONVERTING_WARPS
        return layout.sharing if isinstance(layout, Sm90DecodeLayout) and layout.sharing > 1 else 0

    def estimate(self, module: Module, config: TileConfig, kernel: Which, device: Device) -> Estimate:
        if kernel == "forward":
            layout = _any_layout(module.kernel.layout)
            if isinstance(layout, Sm90WarpsLayout):
                return warps_estimate(layout, config)
            if isinstance(layout, Sm90DecodeLayout):
                return sm90_decode_estimate(layout, config)
            return sm90_estimate(layout, config)
        plan = None if module.backward is None else module.backward.layout
        if isinstance(plan, Sm90Backward) and kernel in plan.by_wgmma:
            return sm90_backward_estimate(plan, config, kernel)
        return _OF_GRADIENTS.estimate(module, config, kernel, device)

    def roles(self, kernel: OutputKernel, config: TileConfig) -> Iterator[str]:
        if isinstance(kernel.layout, Sm90DecodeLayout):
            if isinstance(kernel.layout, Sm90WarpsLayout):
                yield from warps_roles(kernel.layout, config)
            else:
                yield from sm90_decode_roles(kernel.layout, config)
            yield from _multiplying(kernel.layout)
            return
        layout = layout_of(kernel)
        shape, barriers = layout.shape(config), layout.barriers(config)
        loading = ", loads what is asked of keys" if layout.vectors or layout.key_columns else ""
        yield f"roles: of {shape.threads} threads, which start with {shape.entry_registers} registers each"
        copying = (
            "finds tiles, copies rows of keys by cp.async"
            if layout.copies == "rows"
            else "finds and copies tiles"
        )
        yield f"  1 warpgroup   {shape.producer_registers:3} registers a thread: {copying}{loading}"
        rows = "64 rows each, q k^T beside the softmax" if shape.overlap else "64 rows each"
        rows += ", in turns" if shape.pingpong else ""
        if layout.narrow:
            what = f"copies and converts {' and '.join(layout.narrow.tensors)}, of 8 bits"
            yield f"  1 warpgroup   {shape.producer_registers:3} registers a thread: {what}"
        if layout.draws:
            yield f"  1 warpgroup   {shape.producer_registers:3} registers a thread: draws what dropout keeps"
        plural = "s" if shape.consumers > 1 else " "
        registers = f"{shape.consumer_registers:3} registers a thread"
        yield f"  {shape.consumers} warpgroup{plural}  {registers}: multiply {rows}"
        yield from _sharing(layout, config)
        listed = ", ".join(f"{name} {count}" for name, count in barriers.items())
        yield f"  {sum(barriers.values())} mbarriers: {listed}"
        if shape.pingpong:
            turns = f"the turn of a warpgroup each, {TURN_THREADS} threads"
            yield f"  {shape.consumers} named barriers: {turns}"
        yield from _multiplying(layout)


def _multiplying(layout: CudaLayout) -> Iterator[str]:
    if layout.is_padded:
        columns = f"{layout.d_multiplied} columns of q and k, of which {layout.d} are stored"
        yield f"  products have {columns}, and {layout.dv_multiplied} of v, of which {layout.dv} are"


def _sharing(layout: Sm90Layout, config: TileConfig) -> Iterator[str]:
    blocks = hopper(config).cluster
    if blocks == 1:
        return
    rows, keys = blocks * config.tile_q, config.tile_kv // blocks
    columns = (layout.qk.width + layout.v.width) * layout.element.bytes
    yield f"  clusters of {blocks} blocks, of {rows} queries of a head, walk over the keys that any sees"
    copied = f"{keys} of a tile's {config.tile_kv} keys, to all of them"
    asked = f"{keys * columns} B a tile, not {config.tile_kv * columns}"
    yield f"    a block copies {copied}: it reads {asked}"
    given = 4 * (config.tile_q // WGMMA_ROWS)
    yield f"    a stage is free when {blocks} x {given} warps have given it back"


#: What makes the kernels of a backward that wgmma does not.
_OF_GRADIENTS = Sm80(name=TARGET, devices=(DEVICES["sm_90"],))
SM90A = Sm90a(name=TARGET, devices=(DEVICES["sm_90"],))


def _lists_rows(shape: TileShape) -> bool:
    """Returns whether lists become rows of memory: of single keys, of blocks of each query, and of others
    that no tile of whole warpgroups has, where Triton, which is faster, takes no packed queries.
    """
    if shape.listed is None:
        return False
    rows, keys = shape.listed
    return 1 in (rows, keys) or (shape.packed and (rows == 0 or rows % WGMMA_ROWS != 0))


def _unites_packed(shape: TileShape) -> bool:
    """Returns whether packed queries walk over blocks together: their keys are not split."""
    return shape.unites and shape.packed and shape.listed != (1, 1)


def layout_of(kernel: OutputKernel) -> Sm90Layout:
    """Returns how a kernel of this target lies on the machine."""
    return _layout(kernel.layout)


def roles_of(kernel: Forward) -> Sm90Roles:
    """Returns what the warps of a forward kernel of this target do."""
    if not isinstance(kernel.roles, Sm90Roles):
        raise TypeError(f"no roles of wgmma: {kernel.roles!r}")
    return kernel.roles


def backward_roles_of(kernel: BackwardKernel) -> Sm90BackwardRoles:
    """Returns what the warps of a kernel of gradients of wgmma do."""
    if not isinstance(kernel.roles, Sm90BackwardRoles):
        raise TypeError(f"no roles of wgmma: {kernel.roles!r}")
    return kernel.roles


def decode_layout_of(kernel: OutputKernel) -> Sm90DecodeLayout:
    """Returns how a decode kernel of this target lies on the machine."""
    layout = _any_layout(kernel.layout)
    if isinstance(layout, Sm90DecodeLayout):
        return layout
    raise TypeError(f"not a layout of a decode kernel: {layout!r}")


def _any_layout(layout: object) -> Sm90Layout | Sm90DecodeLayout:
    return layout if isinstance(layout, Sm90DecodeLayout) else _layout(layout)


def _layout(layout: object) -> Sm90Layout:
    if not isinstance(layout, Sm90Layout):
        raise TypeError(f"not a layout of wgmma: {layout!r}")
    return layout
