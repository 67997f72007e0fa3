"""What a target decides about a plan: the one interface that the passes of this package ask.

A target has parts in four layers. This one comes first, and `plan.targets` lists it by name; the others are
listed by its family: `target.files` (how a plan is printed), `runtime.toolchains` (what compiles its kernels)
and `verify.runners` (how its modules run, with or without a GPU).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from attnc.diagnostics import Diagnostic
from attnc.model.attention import Attention, Variant
from attnc.model.schedule import BackwardConfig, ForwardConfig, Knob, Schedule, Summation, TileConfig
from attnc.plan.access import Section
from attnc.plan.device import DEVICES, Device
from attnc.plan.fitting import TileShape, unsupported
from attnc.plan.ir import Forward, Module, OutputKernel
from attnc.plan.ir.backward import Backward, BackwardKernel
from attnc.plan.ir.kernel import IDLE_GAIN, PAGED_IDLE_GAIN, PARTIAL_TRIPS
from attnc.plan.layout import (
    BackwardLayout,
    DeviceMemory,
    Estimate,
    KernelName,
    Layout,
    Roles,
    SharedBytes,
    Traffic,
    Which,
)
from attnc.plan.picture import Picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(ABC):
    """name: as schedules say it, "cuda.sm_80"; devices: those that its kernels run on.

    family: what targets with the same kernels share, and the name of their folders.
    cuts_edges: tiles that may hold keys which no query keeps get loops of their own (`regions.with_edges`).
    has_backward: there are kernels for gradients; decodes_prompts: kernels that decode serve all rows of an
    attention whose v is columns of k, so that it has gradients beside them; has_f32_dq: that of q can be f32
    where q is not, as those of k and v can be. has_lazy_maximum: for `online(maximum = lazy(...))`.
    always_fills: a decode kernel with short loops makes the rows of such keys zero in all of them.
    has_rows_kernel: what a backward needs of its rows is made by a kernel of its own.
    sections: of heads that are worked at beside each other; own_tensors: names of those that all kernels take
    besides inputs and outputs.
    splits_in_turn: splits of a sequence take its tiles in turn (`ir.Split`). decodes_chunks: decode kernels
    are fast for chunks of prompts, too (`tuned.tables.guess_rows`). lists_are_bits: blocks
    that a mask lists are bits, not numbers, that kernels walk over;
    walks_for_groups: warpgroups, or all heads that share keys, do so together; takes_listed_rows: those that
    decode take lists of keys, or of rows of memory, instead; lists_kept_blocks: blocks that a mask keeps are
    found before (`kept_blocks`); has_selected_gradients: there are kernels for gradients of queries that have
    lists of their own.
    cuts_summands: what keys of a tile sum to is summed on tensor cores, which take 16 bits at once.
    breaks_order: why kernels cannot sum in an absolute order, "" where they can; product_keys: keys of a
    schedule that decide how a product's sums are made; products: what else decides that; joins: in which
    order segments are joined; keeps_row_maxima: under such an order a lazy maximum of a row is its own.
    """

    name: str
    devices: tuple[Device, ...]
    family: ClassVar[str]
    cuts_edges: ClassVar[bool]
    always_fills: ClassVar[bool]
    has_backward: ClassVar[bool]
    decodes_prompts: ClassVar[bool] = False
    packs_decoded_queries: ClassVar[bool] = False
    decodes_packed_rows: ClassVar[bool] = False
    has_f32_dq: ClassVar[bool] = False
    has_lazy_maximum: ClassVar[bool] = False
    has_rows_kernel: ClassVar[bool]
    sections: ClassVar[Section]
    splits_in_turn: ClassVar[bool] = False
    decodes_chunks: ClassVar[bool] = False
    lists_are_bits: ClassVar[bool] = False
    walks_for_groups: ClassVar[bool] = False
    takes_listed_rows: ClassVar[bool] = False
    lists_kept_blocks: ClassVar[bool] = False
    has_selected_gradients: ClassVar[bool] = False
    cuts_summands: ClassVar[bool] = False
    own_tensors: ClassVar[frozenset[str]] = frozenset()
    breaks_order: ClassVar[str]
    product_keys: ClassVar[tuple[str, ...]] = ("tile.q", "tile.kv", "warps")
    products: ClassVar[str] = ""
    joins: ClassVar[str] = "from the first to the last"
    keeps_row_maxima: ClassVar[bool] = False

    @property
    def folder(self) -> str:
        return self.name.replace(".", "_")

    def runs_on(self, capability: int) -> bool:
        """Returns whether a GPU of this compute capability (90 for sm_90) runs the kernels: all from the
        oldest of the target's devices on where the newest known is among them, else its devices alone.
        """
        own = {device.capability for device in self.devices}
        is_open = max(device.capability for device in DEVICES.values()) in own
        return capability >= min(own) if is_open else capability in own

    # --- which schedules are compiled

    @abstractmethod
    def check(self, variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
        """Returns every reason why the target has no forward or decode kernel for the variant under this
        schedule. Reasons common to all targets are in `lower.check_lowerable`.
        """

    def check_order(self, variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
        """Yields the parts of a schedule that its kernels cannot do under `order = absolute(...)`, besides
        those that no target can (`plan.order`).
        """
        yield from ()

    def walks_segments(self, variant: Variant, schedule: Schedule) -> bool:
        """Returns whether a program of a decode kernel has all segments of its rows, and joins them."""
        return False

    def reads_narrow(self, schedule: Schedule) -> bool:
        """Returns whether kernels of the schedule take k and v of 8 bits, and a scale of v."""
        return False

    def differentiates_narrow(self, attention: Attention, schedule: Schedule) -> bool:
        """Returns whether kernels of gradients take k and v of 8 bits, which have none themselves."""
        return False

    def refuse_column_scale(self, attention: Attention, schedule: Schedule, name: str) -> tuple[str, ...]:
        """Returns why kernels of the schedule cannot multiply columns of "k" or "v" by a scale, and what to
        write instead; nothing if they can.
        """
        return "these kernels multiply it as it was copied", "write a schedule for 'triton'"

    def refuse_joined_keys(self, attention: Attention, schedule: Schedule) -> tuple[str, ...]:
        """Returns why kernels of the schedule cannot read keys whose last columns are of another input, and
        what to write instead; nothing if they can.
        """
        instead = "write a schedule for 'cuda.sm_90a' with 'loops = [kv], pack = gqa'"
        return "these kernels read keys of one input", instead, "or join the columns before the call"

    def converts_before(self, variant: Variant, schedule: Schedule) -> bool:
        """Returns whether k and v that are not as q is (`conversion.list_convertible`) are converted by a
        kernel of its own, before the one that multiplies them.
        """
        return False

    @abstractmethod
    def check_backward(self, knob: Knob) -> Iterator[Diagnostic]:
        """Yields a refusal if the kernels cannot honour this key of the backward's phases."""

    def check_turns(self, variant: Variant, schedule: Schedule, knob: Knob) -> Iterator[Diagnostic]:
        """Yields why blocks cannot take turns at adding to dq, as `accumulate.dq = ordered` asks for."""
        yield unsupported(
            f"blocks of {self.name} take no turns",
            knob.span,
            "cuda.sm_90a has it alone",
            "write 'accumulate.dq = two_pass', the same bits in every run as well",
        )

    def check_speed(self, variant: Variant, schedule: Schedule) -> Iterator[Diagnostic]:
        """Yields warnings of keys that give up the target's faster kernels."""
        return iter(())

    def sum_of_dq(self, variant: Variant, *, deterministic: bool) -> Summation:
        """Returns how a default schedule sums dq: in the fastest way, of those that give the same
        bits in every run where it is to be deterministic.
        """
        return "two_pass"

    def adds_packed_dq(self, variant: Variant, way: str) -> bool:
        """Returns whether kernels add dq of packed sequences in memory, in this way to sum it."""
        return False

    def refuse_latent_gradients(self, attention: Attention) -> str:
        """Returns why there are no kernels for gradients of a normalised attention whose v is columns of k;
        "" where there are.
        """
        return f"{self.name} has no kernel for the sum of both gradients"

    def refuse_wide_gradients(self, attention: Attention) -> str:
        """Returns why there are no kernels for gradients of a normalised attention beside a forward that
        decodes; "" where there are.
        """
        return "the decode kernel has no backward"

    @abstractmethod
    def default_schedule(self, shape: TileShape) -> Iterator[str]:
        """Returns the lines of a schedule for an attention that has none, without those of a backward."""

    def default_labels(self, shape: TileShape) -> Mapping[str, Sequence[str]]:
        """Returns the labels of the schedules that such an attention gets, each with lines of its own: calls
        choose among them by sizes (`tuned.tables.guess_rows`).
        """
        return {"": ()}

    def default_steps(self, shape: TileShape, splits: str = "auto") -> Iterator[str]:
        """Returns the lines of a schedule for calls of few queries (single tokens, drafts), beside those of
        `default_schedule`: Flash-Decoding. None: there is no other for them. splits: how many programs share
        the keys of a head.
        """
        return iter(())

    def splits_keys(self, layout: BackwardLayout | None, *, wide: bool) -> bool:
        """Returns whether dk and dv have a kernel each, where dq is not summed in memory; wide: their rows
        are, for one of them.
        """
        return False

    def default_chunks(self, shape: TileShape, splits: str = "auto") -> Iterator[str]:
        """Returns the lines of a schedule for calls of more queries than those of `default_steps`, beside so
        many keys that programs share these. None: those of `default_steps` do.
        """
        return iter(())

    # --- how programs are numbered

    def section(self) -> Section | None:
        """Returns which heads of a forward are worked at beside each other; None: one comes after
        the other.
        """
        return self.sections

    def backward_section(self, *, short_loops: bool, in_turns: bool) -> Section:
        """Returns which heads of a backward kernel are worked at beside each other. short_loops: it reads few
        tiles of a head; in_turns: its blocks take turns at adding to dq.
        """
        return self.sections

    # --- what a kernel takes

    @abstractmethod
    def configs(self, variant: Variant, schedule: Schedule) -> tuple[ForwardConfig, ...]:
        """Returns the configs of the forward or decode kernel that some device of the target can run, in
        their order. Raises DiagnosticError (E0601) when there is none.
        """

    @abstractmethod
    def backward_configs(
        self, variant: Variant, schedule: Schedule, kernel: KernelName, layout: BackwardLayout | None
    ) -> tuple[BackwardConfig, ...]:
        """Returns the configs of a kernel of a backward that lies so which some device can run. Raises
        DiagnosticError (E0601) when there is none.
        """

    def layout(self, variant: Variant, schedule: Schedule, config: TileConfig) -> Layout | None:
        """Returns how the forward or decode kernel lies on the machine; None where a compiler decides it."""
        return None

    def roles_of(self, kernel: Forward, variant: Variant) -> Roles | None:
        """Returns the planned work of each warp of a forward kernel; None if all warps do the same."""
        return None

    def backward_roles_of(
        self, kernel: BackwardKernel, layout: BackwardLayout | None, variant: Variant
    ) -> Roles | None:
        """Returns the planned work of each warp of a backward kernel; None if all warps do the same."""
        return None

    def backward_layout(
        self, variant: Variant, schedule: Schedule, forward: Layout | None
    ) -> BackwardLayout | None:
        """Returns how the kernels of a backward lie on the machine; None where a compiler decides it."""
        return None

    @abstractmethod
    def count_shared_bytes(
        self, variant: Variant, config: TileConfig, kernel: Which, layout: Layout | BackwardLayout | None
    ) -> SharedBytes:
        """Returns bytes of shared memory that a block must be allowed for a launcher to take the config."""

    def count_staged_bytes(self, variant: Variant, config: TileConfig) -> int:
        """Returns the bytes that it takes where tensor cores read tiles there, 0 if no more than
        elsewhere.
        """
        return 0

    def columns(self, configs: Iterable[TileConfig], layout: Layout | None) -> Mapping[str, Any]:
        """Returns the fields of an error bound that count the terms which tensor cores add to products."""
        return {}

    def idle_gain(self, attention: Attention) -> float:
        """Returns how much faster a multiprocessor reads keys while others idle."""
        return PAGED_IDLE_GAIN if attention.k.storage.is_paged else IDLE_GAIN

    def instead_of_drawing(self, variant: Variant, schedule: Schedule) -> str:
        """Returns the advice for a schedule whose decode kernel cannot draw the bits of dropout; "" if it
        can.
        """
        return "write 'loops = [q, kv]', without split.kv and pack"

    def follows_lists(self, kernel: KernelName, layout: BackwardLayout | None) -> bool:
        """Returns whether a kernel of a backward walks over listed blocks, where others do."""
        return True

    def keeps_ds(self, layout: BackwardLayout | None) -> bool:
        """Returns whether a kernel over keys leaves ds in memory, for one that makes dq of it."""
        return False

    def in_rounds(self, backward: Backward, variant: Variant) -> Backward:
        """Returns a backward with the kernel that makes dq of ds, if one keeps it, and with its rounds."""
        return backward

    def reads_words(self, layout: Layout | None) -> bool:
        """Returns whether kernels that decode load words of bits once for the keys of a tile."""
        return False

    def partial_trips(self, layout: Layout | None) -> int:
        """Returns the cost of a byte of a partial result, in bytes of keys."""
        return PARTIAL_TRIPS

    def block_share(self, attention: Attention, layout: Layout | None) -> float:
        """Returns the share of a multiprocessor's reading speed that one block alone reaches."""
        return 1.0

    def few_tiles(self, layout: Layout | None) -> int:
        """Returns the tiles of keys for each multiprocessor below which blocks that decode share the columns
        of o.
        """
        return 0

    def short_walk(self, configs: Iterable[TileConfig], layout: Layout | None) -> int:
        """Returns the tiles of keys that a block that decodes walks over, up to which it takes the config of
        the fewest stages.
        """
        return 0

    def count_joined(self, configs: Iterable[TileConfig], layout: Layout | None) -> int:
        """Returns the most results of parts of a row's keys that one program joins."""
        return 0

    @abstractmethod
    def estimate(self, module: Module, config: TileConfig, kernel: Which, device: Device) -> Estimate:
        """Returns the resources that a block of a kernel takes on the device."""

    def roles(self, kernel: OutputKernel, config: TileConfig) -> Iterator[str]:
        """Yields the work of each warp of a block, for a reader; nothing if all warps do the same."""
        return iter(())

    def traffic(
        self, kernel: OutputKernel, config: TileConfig, tiles: Picture, heads: int, device: Device
    ) -> tuple[Traffic, DeviceMemory] | None:
        """Returns the bytes that a launch moves for all heads; None if the plan does not know."""
        return None
