"""What all wrappers share: a plan, the tables that it keeps, and the call of its kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import torch

from attnc.adapters.flashinfer.arguments import (
    LOG2E,
    check_integer,
    check_layout,
    choose_scale,
    combine_scales,
    compute_alibi_slopes,
    write_mask,
    write_position_terms,
)
from attnc.adapters.flashinfer.masks import flatten_mask
from attnc.adapters.specs import Changes, Wanted, find_function, kernel_name, number_of, plan_of
from attnc.api.fastest import are_few
from attnc.api.repeats import Plan as CallPlan
from attnc.api.repeats import are_left_out, keep, repeat
from attnc.api.tensors import INTEGERS, GivenTensors, refuse_gradients

Result: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Found = TypeVar("Found")


def read_starts(name: str, indptr: torch.Tensor) -> list[int]:
    """Returns where requests begin and end, on the host. TypeError for what is no tensor of integers,
    ValueError for one that does not ascend from 0.
    """
    GivenTensors("plan").check(name, indptr, "requests+1", INTEGERS)
    found: list[int] = indptr.tolist()
    if found[0] or any(a > b for a, b in pairwise(found)):
        raise ValueError(f"plan: {name}: expected numbers that ascend from 0, got {found}")
    return found


def count_uniform(starts: list[int]) -> int:
    """Returns how many queries every request has, where all have as many, and few; else 0."""
    counts = {b - a for a, b in pairwise(starts)}
    return max(counts) if len(counts) == 1 and are_few(max(counts)) else 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `run` calls. wanted: what its kernel computes, without scales and sinks; made: the name of that
    kernel; mask: (causal, custom), beside which a window may be another one; tokens: queries of every
    request, 0 where `qo_indptr` says them; rows: queries in all, None where a graph's later plans may have
    others; keys: of all requests, None where the device alone knows; heads: of q, and of K and V.
    tables: by name, those that the kernel reads among them; one: the scale that is none.
    """

    wanted: Wanted
    made: str
    mask: tuple[bool, bool]
    window_left: int
    heads: tuple[int, int]
    sequences: int
    tokens: int = 0
    rows: int | None = None
    keys: int | None = None
    tables: Mapping[str, torch.Tensor]
    read: frozenset[str]
    one: torch.Tensor

    @cached_property
    def facts(self) -> tuple[Any, ...]:
        return self.made, self.mask, self.window_left, self.heads, self.sequences, self.tokens, self.rows

    @cached_property
    def inputs(self) -> dict[str, torch.Tensor]:
        return {name: x for name, x in self.tables.items() if name in self.read}

    def variant(self, window_left: int, scales: Mapping[str, Any], sinks: bool) -> str:
        """Returns the name of the kernel of a call: compiled once for each form that calls have."""
        changed: dict[str, Any] = {name: name for name in scales} | ({"sink": "sinks"} if sinks else {})
        if window_left != self.window_left:
            changed["mask"] = write_mask(*self.mask, window_left)
        return kernel_name(replace(self.wanted, **changed)) if changed else self.made


class Wrapper:
    """The device, the layout, the plan, and what a graph reads.

    capacity: names of tables, and how many numbers there are room for, with CUDA graphs; then tables stay
    where they are.
    """

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str, capacity: Mapping[str, int] | None
    ) -> None:
        self.device = float_workspace_buffer.device
        self._layout = check_layout(kv_layout)
        self._capacity = capacity
        self._planned: Plan | None = None
        #: What calls follow that ask for something else than the plan says, by what they ask for.
        self._derived: dict[tuple[object, ...], Plan] = {}

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._capacity is not None

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: Any) -> None:
        """Takes other workspaces, of which nothing is used."""

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer."""

    def _keep(
        self,
        wanted: Wanted,
        mask: tuple[bool, bool],
        window_left: int,
        heads: tuple[int, int],
        sequences: int,
        tables: dict[str, torch.Tensor],
        *,
        tokens: int = 0,
        rows: int | None = None,
        keys: int | None = None,
    ) -> None:
        """Plans the calls that follow; what a captured graph reads changes only if nothing is refused."""
        wanted = replace(wanted, mask=write_mask(*mask, window_left))
        made = kernel_name(wanted)
        if any("alibi_slopes" in term for term in wanted.terms):
            tables = tables | {"alibi_slopes": compute_alibi_slopes(heads[0], self.device)}
        known = self._planned
        if self._capacity is not None and known is not None:
            tables = _write_kept(known, tables, tokens)
        self._derived = {}
        self._planned = Plan(
            wanted=wanted,
            made=made,
            mask=mask,
            window_left=window_left,
            heads=heads,
            sequences=sequences,
            tokens=tokens,
            rows=None if self._capacity is not None else rows,
            keys=keys,
            tables=tables,
            read=frozenset(line.partition(":")[0] for line in wanted.inputs),
            one=_one(self.device) if known is None else known.one,
        )

    def _mask_tables(
        self,
        starts: list[int],
        keys: list[int],
        custom: torch.Tensor | None,
        packed: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        rows = [b - a for a, b in pairwise(starts)]
        made = flatten_mask(rows, keys, custom, packed, self.device)
        if made and self._capacity is not None:
            room, used = self._capacity["mask"], len(made["custom_mask"])
            if used > room:
                raise ValueError(f"custom_mask_buf: expected room for {used} bytes, got {room}")
            made["custom_mask"] = torch.nn.functional.pad(made["custom_mask"], (0, room - used))
        return made

    def _plan_of_run(self) -> Plan:
        if self._planned is None:
            raise RuntimeError("run: expected a call of plan() before")
        return self._planned

    def _derive(self, asked: tuple[object, ...], change: Callable[[Plan], Plan]) -> Plan:
        """Returns the plan as a call asks for it; made once for each plan. A new one compiles once."""
        if asked not in self._derived:
            self._derived[asked] = change(self._plan_of_run())
        return self._derived[asked]

    def _revise(
        self,
        *,
        scale: float | None = None,
        causal: bool | None = None,
        window_left: int | None = None,
        softcap: float | None = None,
    ) -> None:
        """Takes a scale of the score, whether the mask is causal, a window, or a softcap, in the place of the
        plan's, where a call is given it. In the place of a custom mask none is causal.
        """
        plan = self._plan_of_run()
        asked = (
            plan.wanted.scale if scale is None else scale,
            plan.mask[0] if causal is None or plan.mask[1] else causal,
            plan.window_left if window_left is None else window_left,
            plan.wanted.softcap if softcap is None else softcap,
        )
        if asked != (plan.wanted.scale, plan.mask[0], plan.window_left, plan.wanted.softcap):
            self._planned = self._derive(asked, lambda plan: _change(plan, *asked))

    def _run_revised(self, revise: Callable[[], None], run: Callable[[], Found]) -> Found:
        """Revises the plan and runs. A call that is refused leaves the plan as it was."""
        planned = self._planned
        try:
            revise()
            return run()
        except BaseException:
            self._planned = planned
            raise

    def _revise_all(
        self,
        *,
        causal: bool | None = None,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
    ) -> None:
        """Takes what `forward` says in the place of all that the plan says, in later calls of `run` too, as
        FlashInfer does. ValueError for other positions than the plan's.
        """
        plan = self._plan_of_run()
        softcap = number_of("forward: logits_soft_cap", logits_soft_cap, 0.0)
        rope = {"rope_scale": rope_scale, "rope_theta": rope_theta}
        if write_position_terms("forward", pos_encoding_mode, softcap, **rope) != plan.wanted.terms:
            planned = "ALIBI" if plan.wanted.terms else "NONE"
            came = f"got {pos_encoding_mode!r}"
            raise ValueError(f"forward: pos_encoding_mode: expected {planned!r}, as planned, {came}")
        self._revise(
            scale=choose_scale("forward", sm_scale, plan.wanted.head_dim),
            causal=causal,
            window_left=check_integer("forward: window_left", window_left, -1 << 31),
            softcap=softcap,
        )

    def _with_a_page(self, pool: Any) -> Any:
        """Returns a pool of pages; where it has none, and no request has a key, one of a page. Not for a
        graph, whose later plans may have keys.
        """
        is_tensor = isinstance(pool, torch.Tensor) and not pool.is_nested
        if not is_tensor or pool.shape[:1] != (0,) or self._plan_of_run().keys != 0 or self._capacity:
            return pool
        return pool.new_zeros(1, *pool.shape[1:])


def _change(plan: Plan, scale: float, causal: bool, window_left: int, softcap: float) -> Plan:
    mask = (causal, plan.mask[1])
    wanted = replace(plan.wanted, scale=scale, softcap=softcap, mask=write_mask(*mask, window_left))
    return replace(plan, wanted=wanted, mask=mask, window_left=window_left, made=kernel_name(wanted))


def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def check_call(
    plan: Plan, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, heads_at: int, name: str
) -> None:
    """Holds the tensors of a call to the plan. heads_at: the axis of heads of K and V; name: theirs."""
    checked, planned, (heads, shared) = GivenTensors("run", "as planned"), plan.wanted, plan.heads
    rows = "T" if plan.rows is None else str(plan.rows)
    checked.check("q", q, f"{rows} {heads} {planned.head_dim}", (planned.dtype,))
    axes = ["P", "page"]
    axes.insert(heads_at, str(shared))
    for x, width in ((keys, planned.head_dim), (values, planned.value_dim or planned.head_dim)):
        cached = planned.cache or planned.dtype
        checked.check(name, x, " ".join((*axes, str(width))), (cached,))
        checked.check_rows(**{name: x})
    checked.check_pages(name, q)
    refuse_gradients("run", **{"q": q, name: keys})
    refuse_gradients("run", **{name: values})


def launch(
    plan: Plan,
    tensors: dict[str, torch.Tensor],
    *,
    q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    window_left: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool,
    check: Callable[[], None] | None = None,
) -> Result:
    """Runs the kernel of a call and returns o: [T, Hq, Dv], and with return_lse lse: f32[T, Hq] in base 2.

    tensors: q: [T, Hq, D], k and v as the kernel takes them, by name; lse: where it is written in any case;
    check: holds them to the plan
    """
    named = plan.inputs | tensors
    key = None
    if plan.wanted.cache is None and are_left_out(q_scale, k_scale, v_scale, sinks):
        key, found = repeat(("FlashInfer", plan.facts, window_left, return_lse), (*named.values(), out, lse))
        if found is not None:
            known: Result = found[0]
            return known
    if check is not None:
        check()
    q, given = tensors["q"], GivenTensors("run")
    given.check("q", q, q.shape, (q.dtype,))  # on whose device the others have to be
    shape = (plan.sequences, plan.heads[1])
    scales = combine_scales(
        "run",
        shape,
        plan.one,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        always=plan.wanted.cache is not None,
    )
    named |= scales
    if sinks is not None:
        given.check("sinks", sinks, [plan.heads[0]], (torch.float32,))
        named["sinks"] = sinks
    left = plan.window_left if window_left is None else window_left
    o_shape = [*q.shape[:2], plan.wanted.value_dim or plan.wanted.head_dim]
    if out is not None:
        given.check("out", out, o_shape, (q.dtype,), "like q")
        given.check_rows(out=out)
        refuse_gradients("run", out=out)
    if lse is not None:
        given.check("lse", lse, q.shape[:2], (torch.float32,))
    made = plan.variant(left, scales, sinks is not None)
    call = _plan_call(plan, made, named, o_shape, has_out=out is not None, return_lse=return_lse)
    keep(key, call)
    result: Result = call.run([x for x in (*named.values(), out, lse) if x is not None])
    return result


def _plan_call(
    plan: Plan,
    made: str,
    named: Mapping[str, torch.Tensor],
    shape: list[int],
    *,
    has_out: bool,
    return_lse: bool,
) -> CallPlan:
    """Returns the plan of calls like one, of the tensors that its kernel reads, by name, and then where o and
    lse go, if they are given. shape: of o.
    """
    by_request = (plan.sequences, plan.tokens) if plan.tokens else tuple(shape[:1])
    whole, count = (*by_request, *shape[1:]), len(named)
    rows = (*by_request, *named["q"].shape[1:])
    changes: Changes = {"q": lambda q: q.view(rows)} if plan.tokens else {}
    call = plan_of(find_function(made, named["q"], named["k"], named.get("v")), [*named], changes)
    inputs_of = call.arrange

    def arrange(given: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        inputs, _ = inputs_of(given)
        if not has_out:
            return inputs, None
        lse = torch.empty(whole[:-1], dtype=torch.float32, device=given[0].device)
        return inputs, (given[count].view(whole), lse)

    def finish(found: Any, given: Sequence[Any]) -> Result:
        o: torch.Tensor = given[count] if has_out else found[0].view(shape)
        kept = given[-1] if len(given) > count + has_out else None
        if not return_lse and kept is None:
            return o
        lse = torch.mul(found[1].view(shape[:-1]), LOG2E, out=kept)
        return (o, lse) if return_lse else o

    return CallPlan(call.function, call.call, arrange, finish)


def _write_kept(known: Plan, tables: dict[str, torch.Tensor], tokens: int) -> dict[str, torch.Tensor]:
    """Writes tables to where a captured graph reads them. ValueError where it would need others."""
    if tokens != known.tokens:
        raise ValueError(
            f"plan: qo_indptr: expected {known.tokens or 'differing numbers of'} queries of each request, as"
            f" in the first plan, got {tokens or 'differing numbers'}"
        )
    if tables.keys() != known.tables.keys():
        raise ValueError("plan: custom_mask: expected one in every plan of a graph or in none")
    for name, x in tables.items():
        old = known.tables[name]
        if x.shape != old.shape:
            raise ValueError(
                f"plan: {name}: expected shape {list(old.shape)}, as in the first plan, got {list(x.shape)}"
            )
    for name, x in tables.items():
        known.tables[name].copy_(x)
    return dict(known.tables)
