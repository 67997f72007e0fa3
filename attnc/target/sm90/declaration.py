"""The declaration of a Hopper module's call, as `attnc.support.hopper_call.HopperAttention` takes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attnc.plan.ir import Decode, Forward, Module
from attnc.plan.ir.backward import BackwardKernel
from attnc.plan.sm90.backward import (
    FINISH_WARPS,
    JOIN_BLOCKS,
    JOIN_WARPS,
    STORED_ROWS,
    TURNS,
    Sm90Backward,
)
from attnc.plan.sm90.costs import costs_of
from attnc.plan.sm90.layout import hopper
from attnc.target.declaration import (
    CallText,
    Items,
    Value,
    add_scratch,
    attention_fields,
    copies_of,
    declare_allocation,
    in_words,
    show_size,
    size_of_sums,
)
from attnc.target.sm80.backward import finish_name
from attnc.target.sm80.declaration import (
    CudaBackward,
    count_tiles,
    cuda_files,
    decode_kernels,
    fixed_split_size,
)
from attnc.target.sm80.launches import PLACES, cuda_kernel, cuda_kernels
from attnc.target.sm80.lists import CudaListsText
from attnc.target.sm90.backward import join_name
from attnc.target.sm90.backward_tiles import Sm90Arguments
from attnc.target.sm90.decode import Sm90DecodeText
from attnc.target.sm90.kernel import Sm90Text


def hopper_declaration(
    module: Module,
    kernel: Forward | Decode,
    text: Sm90Text | Sm90DecodeText,
    back: CudaBackward | None,
    operator: str,
) -> CallText:
    """Returns the value of `CALL`: `HopperAttention(...)`."""
    fields: dict[str, Value] = {**cuda_files(module), **attention_fields(module, kernel, operator)}
    passed, names = text.arguments, text.arguments.names
    if isinstance(text, Sm90DecodeText):
        shares = f" * ({text.layout.dv} // config.BLOCK_D)" if text.layout.shares else ""
        kernels, of_splits, parts = decode_kernels(module, text, text.layout.join_bytes, shares)
        fields |= of_splits
        names += parts
        strides, boxes = list(passed.strides), dict.fromkeys(passed.maps, text.wgmma.box_rows)
        more = fixed_split_size(passed.sizes)
    else:
        configs = [hopper(config) for config in kernel.configs]
        if costs := costs_of(module.variant.attention, text.layout, configs):
            fields["costs"] = Items(list(map(in_words, costs)))
        sizes = {"q": "BLOCK_M", "o": str(STORED_ROWS)}
        sizes |= {pair.load.tensor: "BLOCK_M"} if (pair := text.roles.softmax.pair) else {}
        if (staged := text.finish.staged) is not None and staged.rows_axis is not None:
            sizes[staged.fetch.load.tensor] = f"{STORED_ROWS} along {staged.rows_axis}"
        rows = "BLOCK_N // CLUSTER" if text.layout.clusters else text.wgmma.box_rows
        boxes = {name: sizes.get(name, rows) for name in passed.maps}
        kernels, strides = [cuda_kernel(kernel.name, _blocks(text))], list(passed.strides)
        more = {"CLUSTER": "config.CLUSTER"} if text.layout.clusters else {}
    if (converts := text.conversion) is not None:
        fields["made"] = Items([part.declared for part in converts.parts])
        kernels = [converts.launch, *kernels]
        names += (name for part in converts.parts for name in (part.name, part.made))
        strides += (part.declared_strides for part in converts.parts)
        copies = copies_of(module)
        boxes = {copies.get(name, name): rows for name, rows in boxes.items()}
    if text.sums_in_memory:
        blocks = _blocks(text) if isinstance(text, Sm90Text) else PLACES
        add_scratch(fields, "_sums", size_of_sums(module, blocks, text.layout.dv_multiplied))
        names = [*names, "_sums"]
    if (lists := text.lists) is not None:
        add_scratch(fields, lists.result, lists.memory)
        kernels, names = [lists.launch, *kernels], [*names, lists.result]
    decodes, waits = isinstance(kernel, Decode), module.conversion is not None
    launch = cuda_kernels(kernels, names, strides, passed.sizes, more, boxes, decodes=decodes, waits=waits)
    fields["launches"] = Items([launch])
    if back is not None:
        fields["backward"] = back.declared
    return CallText("HopperAttention", fields=fields)


def _blocks(text: Sm90Text) -> str:
    if text.layout.clusters:  # whole ones, and one at least: the driver says where there is no room for it
        return "CLUSTER * min(cdiv(M, CLUSTER * BLOCK_M) * B * H, max(multiprocessors() // CLUSTER, 1))"
    blocks = "config.BLOCKS * " if text.layout.shares else ""
    return f"min({count_tiles(text.kernel)}, {blocks}multiprocessors())"


#: Whether walks over queries are cut into parts, as sizes say it.
_WHOLE, _CUT = "WALK_PARTS == 1", "WALK_PARTS > 1"


class HopperBackward(CudaBackward):
    """As for `cuda.sm_80`, for kernels that copy by TMA."""

    def __init__(
        self,
        module: Module,
        arguments: Sm90Arguments,
        files: Mapping[str, str],
        lists: CudaListsText | None,
    ) -> None:
        super().__init__(module, arguments, files, lists)
        assert module.backward is not None
        plan = module.backward.layout
        assert isinstance(plan, Sm90Backward)
        self._plan, self.joined_section = plan, plan.joined_section
        self.sum_bytes = plan.layout.d_multiplied * 4 if arguments.adds_dq else 0
        self.spans_keys, self.spans = plan.spans_keys, "SPANS, " if plan.spans_keys else ""
        self._summed, self.cuts_walks = arguments.summed, plan.cuts_walks and bool(self._over_keys)
        if self.cuts_walks and self._over_keys[0].sums_heads:
            self.head_parts = "HEAD_PARTS"

    @property
    def maps(self) -> dict[str, str]:
        queries, keys = map(str, self._plan.boxes)
        rows = {"q": queries, "do": queries, "k": keys, "v": keys}
        return {name: rows.get(name, str(STORED_ROWS)) for name in self._arguments.maps}

    @property
    def clears_dq(self) -> bool:
        return self._backward.preprocess is None  # else that does so, or the first to have a turn stores

    @property
    def size_of_dq(self) -> str:
        turns = f" + {TURNS}" if self._plan.turns else ""
        return f"{self._plan.layout.d_multiplied} * {self.configs[-1]}.BLOCK_M{turns}"

    @property
    def sizes(self) -> dict[str, str]:
        sizes = super().sizes
        if not self.cuts_walks:
            return sizes
        planned = self._over_keys[0]
        walks = super().blocks(planned).replace("BLOCK_N", f"{planned.config}.BLOCK_N")
        queries = f"cdiv({f'{self.queries} // B' if self.packs_queries else 'M'}, {planned.config}.BLOCK_M)"
        heads = "G" if planned.sums_heads else "1"
        name = self.module.variant.attention.k.name
        keys = next(arg for arg in self.module.args if arg.tensor.name == name)
        rows = [show_size(bind) for bind in keys.axes[:-1]]
        kv_tiles = f"cdiv({self.keys}, {planned.config}.BLOCK_N)"
        cut = ("WALKS", heads, queries, kv_tiles)
        sum_bytes, chosen = f"M_padded * B * H * {self.sum_bytes}", f"{planned.config}.spans"
        spans = self._plan.count_spans(", ".join(cut), sum_bytes, chosen)
        return {
            **sizes,
            "WALKS": walks,
            **({"SPANS": spans} if self.spans_keys else {}),
            "WALK_PARTS": self._plan.count_parts(*cut, f"{planned.config}.parts"),
            **({self.head_parts: "min(WALK_PARTS, G)"} if self.head_parts else {}),
            "KEY_ROWS": " * ".join(rows),
        }

    @property
    def _over_keys(self) -> list[BackwardKernel]:
        return [planned for planned in self._backward.kernels if not planned.over_q]

    def list_sums(self) -> Iterator[CallText]:
        zero = self.leaves_rows
        for name in self._summed:
            columns = self._plan.layout.dv if name == "dv_sum" else self._plan.layout.d
            shape = f"f32[KEY_ROWS, WALK_PARTS * ({_CUT}), {columns}]"
            yield declare_allocation(name, shape, zero=zero)

    def kernels(self) -> Iterator[CallText]:
        by_name = {planned.name: planned for planned in self._over_keys if self.cuts_walks}
        for name in self.files:
            planned = by_name.get(name)
            if planned is None:
                yield self.kernel(name)
                continue
            for parts, work, when in (("1", self.walks, _WHOLE), ("2", f"{self.walks} * WALK_PARTS", _CUT)):
                blocks = f"min({work}, {self._resident(planned)}) * ({when})"
                yield cuda_kernel(name, blocks, config=planned.config, changes={"parts": parts})

    def kernel(self, name: str) -> CallText:
        if name == join_name(self.module):
            widest = max(self._plan.layout.d, self._plan.layout.dv)
            blocks = f"cdiv(KEY_ROWS * {widest // 8}, {32 * JOIN_WARPS})"
            own = {"WARPS": str(JOIN_WARPS), "STAGES": "1", "shared": "0"}
            most = f"min({blocks}, {JOIN_BLOCKS} * multiprocessors()) * ({_CUT})"
            return cuda_kernel(name, most, config=self.configs[-1], changes=own)
        if name != finish_name(self.module):
            return super().kernel(name)
        row_bytes = self._plan.finish_pitch * self._plan.layout.element.bytes
        own = {"WARPS": str(FINISH_WARPS), "STAGES": "1", "shared": f"{row_bytes} * config.BLOCK_M"}
        blocks = "M_padded // ROW_TILE * H" if self.packs_queries else "cdiv(M, BLOCK_M) * B * H"
        return cuda_kernel(name, blocks, config=self.configs[-1], changes=own)

    def blocks(self, planned: BackwardKernel) -> str:
        blocks = super().blocks(planned)
        is_persistent = planned.kind in self._plan.by_wgmma
        return f"min({blocks}, {self._resident(planned)})" if is_persistent else blocks

    def _resident(self, planned: BackwardKernel) -> str:
        blocks = self._plan.blocks(planned.kind)
        return f"{blocks} * multiprocessors()" if blocks > 1 else "multiprocessors()"
