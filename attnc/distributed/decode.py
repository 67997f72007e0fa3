"""Decoding with the keys of each sequence spread over ranks: all have the queries, each has some of the
keys, and what they find is joined by lse.

    keys = SpreadKeys(decode, mesh["cp"], block=16)
    counts = keys.spread.counts(kv_len, rank)        # rows of this rank's cache, once a step for all layers
    o = keys(q, k_cache, v_cache, kv_len, counts=counts)

`Spread` says which rank has a position, and in which row. Pages hold rows of a rank as they do those of one
GPU; `attnc.paging.PagedCache` keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from attnc.diagnostics import DiagnosticError, error
from attnc.distributed.derive import View
from attnc.distributed.group import Group, Ranks
from attnc.distributed.kernels import RankKernels, RankSpec, name_inputs, spec_of
from attnc.expr.construct import number
from attnc.expr.nodes import Index, Load
from attnc.model.attention import Attention
from attnc.model.tensors import Role
from attnc.paging.spread import Spread
from attnc.support.arguments import DTYPES

#: Columns behind those of o that lse has in a message: 16 bytes keep rows aligned.
_PADDING = 4


class SpreadKeys:
    """An attention of a few queries, which all ranks have, to keys that are spread over the ranks.

    Blocks of `block` keys of a sequence are dealt to the ranks in turn (`attnc.paging.Spread`). Each rank
    computes o and lse over its own keys, and all ranks join these results, as the splits of Flash-Decoding
    are joined.

    source, group, attention, target, schedule, params: as of `ContextParallel`. The spec must have
    `length N = lengths[b]`, with an input that holds the length of each whole sequence on every rank. A sink
    is counted on rank 0 only.
    """

    def __init__(
        self,
        source: Any,
        group: Any = None,
        *,
        block: int = 16,
        attention: str | None = None,
        target: str | None = None,
        schedule: str | None = None,
        **params: object,
    ) -> None:
        self.spec: RankSpec = spec_of(source, attention, target, schedule)
        self.group: Ranks = group if isinstance(group, Ranks) else Group(group)
        self.spread, self.params = Spread(self.group.size, block), params
        self._lengths = _check(self.spec.attention)
        self._kernels: dict[tuple[torch.dtype, int], RankKernels] = {}
        self._tables: dict[tuple[int, torch.device], Mapping[str, torch.Tensor]] = {}

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *inputs: Any,
        counts: torch.Tensor | None = None,
        **named: Any,
    ) -> Any:
        """Computes o of all queries, the same bits on every rank, or (o, lse) where the spec has both. A
        collective.

        k, v: this rank's rows, or its pool of pages (then the block table is this rank's too); other inputs:
        those of the whole, lengths no longer than what all ranks have room for. counts: `spread.counts` of
        the lengths and this rank, if they are there already. No gradients.
        """
        kernels = self.kernels_for(q)
        given = name_inputs(self.spec.attention, inputs, named, whole=True)
        attention = kernels.attention
        if counts is None:
            counts = self.spread.counts(given[self._lengths], self.group.rank)
        tables = self._tables_for(self._rows(attention, k, given), q.device)
        arguments: list[Any] = []
        for item in kernels.derived.inputs:
            if isinstance(item, View):
                arguments.append(given[item.tensor])
            else:
                arguments.append(counts if item == "key_count" else tables[item])
        message, o, lse = self._message(attention, q)
        tensors = (q, k) if kernels.shares_columns else (q, k, v)
        with torch.no_grad():
            kernels.forward(*tensors, *arguments, out=(o, lse))
            return self._join_partial_results(attention, self.group.gather(message))

    def kernels_for(self, q: torch.Tensor) -> RankKernels:
        key = (q.dtype, q.shape[-1])
        if key not in self._kernels:
            variant = self.spec.variant(*key, self.params)
            self._kernels[key] = RankKernels(self.spec, variant, "keys")
        return self._kernels[key]

    def _message(
        self, attention: Attention, q: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        width = int(number(attention.v.shape[-1]) or 0)
        sizes = dict(zip(attention.q.roles, q.shape, strict=True))
        rows = attention.o.roles[:-1]
        message = torch.empty(
            [*(sizes[role] for role in rows), width + _PADDING], dtype=torch.float32, device=q.device
        )
        of_lse = attention.lse.roles if attention.lse is not None else rows
        lse = message[..., width].permute([rows.index(role) for role in of_lse])
        return message, message[..., :width], lse

    def _join_partial_results(self, attention: Attention, every: torch.Tensor) -> Any:
        from attnc.runtime.merge import join_ranks  # Triton, which is told first whether to interpret

        o, lse = join_ranks(every, every.shape[-1] - _PADDING, DTYPES[attention.o.dtype])
        if attention.lse is None:
            return o
        rows = attention.o.roles[:-1]
        return o, lse.permute([rows.index(role) for role in attention.lse.roles])

    def _rows(self, attention: Attention, k: torch.Tensor, given: Mapping[str, Any]) -> int:
        storage = attention.k.storage
        if storage.table:
            return int(given[storage.table].shape[1]) * storage.rows_of_page
        return k.shape[attention.k.roles.index(Role.KEY)]

    def _tables_for(self, rows: int, device: torch.device) -> Mapping[str, torch.Tensor]:
        key = (rows, device)
        if key not in self._tables:
            if len(self._tables) > 64:
                self._tables.clear()
            longest = self.spread.longest(rows, self.group.rank)
            most = math.inf if self.group.rank == 0 else -math.inf
            self._tables[key] = {
                "key_at": self.spread.positions(rows, self.group.rank, device),
                "keys_all": torch.full((), longest, dtype=torch.int32, device=device),
                "head_first": torch.zeros((), dtype=torch.int32, device=device),
                "sink_most": torch.full((), most, dtype=torch.float32, device=device),
            }
        return self._tables[key]


def _check(attention: Attention) -> str:
    place = attention.span
    assert place is not None
    length = attention.lengths.get("N")
    if attention.softmax.dropout is not None:
        raise DiagnosticError([error("E0602", "dropout is not shared out over ranks", place)])
    for tensor, message in (
        (attention.q, "packed queries against keys on many ranks are not compiled"),
        (attention.k, "packed keys are not spread over ranks"),
    ):
        if tensor.storage.is_packed:
            span = tensor.storage.span or place
            raise DiagnosticError([error("E0602", message, span, f"{tensor.name} is packed here")])
    if not isinstance(length, Load) or length.indices != (Index("b"),):
        message = "keys on many ranks need the length of each sequence as an input"
        hints = ("declare 'input kv_len: i32[B]' and write 'length N = kv_len[b]'",)
        raise DiagnosticError(
            [error("E0602", message, length.span or place if length else place, hints=hints)]
        )
    return length.tensor
