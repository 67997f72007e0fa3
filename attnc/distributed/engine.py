"""`ContextParallel`: one attention over the ranks of a process group.

    cp = ContextParallel(causal_gqa, mesh["cp"])
    q, k, v = cp.shard(q, k, v)               # or shards that are there already, under `cp.plan(...)`
    o = cp(q, k, v)
    full = cp.unshard(o)

Rows of q, k, v, o and lse are spread over the ranks as the plan says; every other input is whole on all of
them. Where rows of DTensors lie is what their placements say, slices of one length. Along the axis of the
group's ranks q, k and v are sharded by their rows. Along other axes of the mesh they may be sharded by
sequences or heads, or be whole: every group of ranks computes its own.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch._compile import _disable_dynamo

from attnc.api.tensors import FLOATS, GivenTensors
from attnc.distributed.dtensors import is_dtensor, like, local, local_input, whole_shape
from attnc.distributed.estimate import STRATEGIES, Rates, Strategy, rates_of
from attnc.distributed.group import Group, Ranks
from attnc.distributed.kernels import RankKernels, RankSpec, name_inputs, spec_of
from attnc.distributed.moves import places
from attnc.distributed.plan import Plan, Planner, widths_of
from attnc.distributed.spans import CallSizes
from attnc.distributed.stages import Stages
from attnc.expr.evaluate import Env, evaluate
from attnc.expr.nodes import Dim, walk
from attnc.model.attention import Attention
from attnc.model.tensors import Role, Tensor

#: Plans whose tables are kept on the device, the latest; and kinds of calls that ranks know of each other.
_KEPT, _AGREED = 16, 1024


class ContextParallel:
    """An attention whose rows are spread over the ranks of a group.

    source: a generated function, the result of `attnc.compile`, or the path or text of a spec
    group: a DeviceMesh of one axis, a process group, or None for all ranks
    attention: the name of the one to compute, in a spec that declares several
    target: "triton", "cuda.sm_80" or "cuda.sm_90a"; by default that of a generated function, or "triton"
    schedule: the label of a schedule, if the target has several
    strategy: "need", "gather", "heads" or "mixed" (`estimate.Strategy`); None: the one that the estimate says
        is the fastest
    groups: how many parts the heads of a rank are computed in, so that one part's keys move while another is
        computed; None: as many as the estimate says
    rows: "planned": the plan decides which rows a rank has, so that all have as much work; "slices": each
        rank has the same number of consecutive rows, as DTensors do
    rates: speeds of the machine and of its kernels, for the estimate
    sums: whether gradients of inputs that every rank has whole are summed over the ranks; False if DDP or
        FSDP does so
    symmetric: whether keys move through symmetric memory, by copy engines instead of NCCL
    keep_keys: whether the keys that came in a forward are kept for its gradients, which fetch them again
        otherwise; None: where they take at most a third of the bytes of the rank's q, k, v and o
    params: values of the spec's params that do not follow from types and sizes, such as `cap = 30.0`

    All ranks construct it with the same arguments, and make the same calls in the same order.
    """

    def __init__(
        self,
        source: Any,
        group: Any = None,
        *,
        attention: str | None = None,
        target: str | None = None,
        schedule: str | None = None,
        strategy: Strategy | None = None,
        groups: int | None = None,
        rows: Literal["planned", "slices"] = "planned",
        rates: Rates | None = None,
        sums: bool = True,
        symmetric: bool = False,
        keep_keys: bool | None = None,
        **params: object,
    ) -> None:
        self.spec: RankSpec = spec_of(source, attention, target, schedule)
        known = [param.name for param in self.spec.attention.params]
        if unknown := [name for name in params if name not in known]:
            raise TypeError(f"{unknown[0]}: no param of the spec, which has {', '.join(known) or 'none'}")
        if strategy is not None and strategy not in STRATEGIES:
            raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
        self.group: Ranks = group if isinstance(group, Ranks) else Group(group, symmetric=symmetric)
        self.strategy, self.groups = strategy, groups
        self.rates = rates or rates_of(self.spec.target, symmetric=symmetric)
        if rows not in ("planned", "slices"):
            raise ValueError(f"rows: expected 'planned' or 'slices', got {rows!r}")
        self.in_slices, self.sums, self.params = rows == "slices", sums, params
        self.keep_keys = keep_keys
        self._kernels: dict[tuple[torch.dtype, int], tuple[RankKernels, Planner]] = {}
        self._stages: dict[tuple[Plan, RankKernels, torch.device], Stages] = {}
        self._plan: Plan | None = None
        #: Kinds of calls that all ranks have made, in an order that is the same on all.
        self._agreed: dict[object, None] = {}
        #: By the kind of a call that was checked and agreed, the names of its inputs, and what it follows.
        self._known_calls: dict[object, tuple[tuple[str, ...], Stages]] = {}

    # --- where rows are -----------------------------------------------------------------------------------

    def plan(self, q: torch.Tensor, k: torch.Tensor, **inputs: Any) -> Plan:
        """Plans calls for whole tensors like these, or for DTensors; later calls follow the plan.

        q, k: only their dtypes and shapes are read, so meta tensors will do
        inputs: what the mask reads, and lengths. Those on a GPU are copied to the host, which waits for them
        """
        _check_tensors(self.spec.attention, has_data=False, q=q, k=k)
        kernels, planner = self.kernels_for(q)
        attention, named = kernels.attention, self._name_inputs((), inputs)
        sizes = self._sizes(kernels, whole_shape(q, attention.q), whole_shape(k, attention.k), named)
        in_slices, strategy = self.in_slices or is_dtensor(q), self.strategy
        if attention.softmax.dropout is not None:  # drawn by the number of a row, and of a key
            if strategy not in (None, "heads"):
                raise ValueError(
                    f"strategy: dropout leaves rows and keys whole, 'heads', and not {strategy!r}"
                )
            strategy = "heads"
        self._plan = planner.plan(sizes, strategy, self.groups, in_slices=in_slices)
        return self._plan

    def shard(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None = None, *inputs: Any, **named: Any
    ) -> Any:
        """Plans for these tensors, and returns this rank's rows of q, k and v, and the other inputs
        unchanged, in the order given.

        Tensors are whole and the same on all ranks; DTensors are returned as they are. Raises what `plan`
        raises, also for a spec without a v of its own.
        """
        given = self._name_inputs(inputs, named)
        self.plan(q, k, **given)
        _check_tensors(self.spec.attention, has_data=True, q=q, k=k, v=v)
        assert v is not None
        if is_dtensor(q):
            return (q, k, v, *inputs, *named.values())
        shards = (self.own(x, name) for name, x in (("q", q), ("k", k), ("v", v)))
        return (*(x.contiguous() for x in shards), *inputs, *named.values())

    def rows(self, rank: int | None = None) -> torch.Tensor:
        """Returns the numbers of a rank's query rows, ascending: which tokens, labels and positions are its
        own.
        """
        return torch.from_numpy(self._current().owned_rows(self.group.rank if rank is None else rank).copy())

    def own(self, x: torch.Tensor, of: str = "o") -> torch.Tensor:
        """Takes this rank's rows of a whole tensor that is shaped like o, or like "lse", "q", "k" or "v"."""
        plan, tensor = self._current(), self._tensor(self._attention(), of)
        by_key = of in ("k", "v")
        rows = (plan.owned_keys if by_key else plan.owned_rows)(self.group.rank)
        axis = tensor.roles.index(Role.KEY if by_key else Role.QUERY)
        _check_axis(of, x, axis, plan.sizes.keys if by_key else plan.sizes.queries, "all ranks together")
        return places(rows, x.device).take(x, axis)

    def unshard(self, x: torch.Tensor, of: str = "o") -> torch.Tensor:
        """Gathers the whole of a tensor from every rank's rows: of o, or of "lse", "q", "k", "v" or one
        shaped alike.

        A collective; gradients do not flow through it.
        """
        plan = self._current()
        attention = self._attention()
        tensor = self._tensor(attention, of)
        x = local(x, tensor, self.group)
        role = Role.KEY if of in ("k", "v") else Role.QUERY
        axis = tensor.roles.index(role)
        owned = plan.owned_keys if of in ("k", "v") else plan.owned_rows
        counts = [len(owned(rank)) for rank in range(plan.ranks)]
        _check_axis(of, x, axis, counts[self.group.rank], f"rank {self.group.rank}")
        padded = list(x.shape)
        padded[axis] = max(counts)
        mine = x.new_zeros(padded)
        mine.narrow(axis, 0, x.shape[axis]).copy_(x.detach())
        padded[axis] = sum(counts)
        whole = x.new_empty(padded)
        for rank, part in enumerate(self.group.gather(mine)):
            places(owned(rank), x.device).put(whole, axis, part.narrow(axis, 0, counts[rank]))
        return whole

    # --- calls --------------------------------------------------------------------------------------------

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *inputs: Any,
        plan: Plan | None = None,
        **named: Any,
    ) -> Any:
        """Computes o of this rank's rows, or (o, lse) where the spec has both; DTensors that lie as q does,
        if it is one. Shapes, types and the other inputs are those of the spec, q, k and v and what comes of
        them with this rank's rows alone; lse is a natural logarithm. Differentiable. A collective. Under
        torch.compile it breaks the graph: exchanges run beside kernels, on streams of their own.

        plan: other than that of the last `shard` or `plan`. Raises an error on every rank where one of them
        has other rows than the plan says in the first call of a kind (plan, type, device, gradients); in
        later ones on that rank alone.
        """
        call = _uncompiled if "torch._dynamo" in sys.modules else ContextParallel._call
        return call(self, q, k, v, inputs, plan, named)

    def _call(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        inputs: tuple[Any, ...],
        plan: Plan | None,
        named: Mapping[str, Any],
    ) -> Any:
        if plan is not None:
            self._plan = plan
        stages, shards, extras = self._prepare_call(q, k, v, inputs, named)
        results = _ContextAttention.apply(self, stages, tuple(extras), *shards, *extras.values())  # type: ignore[no-untyped-call]  # torch is not typed here
        o, lse = results
        if is_dtensor(q):
            of_q, of_o = stages.attention.q, stages.attention.o
            o, lse = like(q, of_q, o, of_o), like(q, of_q, lse, stages.lse)
        return (o, lse) if self.spec.attention.lse is not None else o

    def _prepare_call(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        inputs: tuple[Any, ...],
        named: Mapping[str, Any],
    ) -> tuple[Stages, tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """Returns the stages of the call, this rank's q, k and v, and the other inputs. The first call of a
        kind asks all ranks whether they are about to make it. A problem of a later call is raised at once,
        without a word to the other ranks, which are exchanging rows by then.
        """
        plan = self._current()
        call = _kind_of_call(plan, (q, k, v, *inputs, *named.values()), tuple(named))
        if call is not None and call in self._known_calls:
            names, known = self._known_calls[call]
            return known, (q, k, v), dict(zip(names, (*inputs, *named.values()), strict=True))
        key = (plan.hash, q.dtype, q.device, q.requires_grad)
        problem: Exception | None = None
        stages, extras = None, {}
        try:
            kernels, _ = self.kernels_for(q)
            extras = self._tensors(kernels.attention, self._name_inputs(inputs, named), q.device)
            _check_inputs(kernels.attention, extras, _collect_sizes(kernels.attention, plan.sizes))
            if is_dtensor(q) and not plan.in_slices:
                raise ValueError(
                    "q: DTensors lie in slices, and the plan does not: call plan(q, k) with them"
                )
            q, k, v = (
                local(x, self._tensor(kernels.attention, name), self.group)
                for x, name in ((q, "q"), (k, "k"), (v, "v"))
            )
            self._check_rows(kernels.attention, plan, q, k, v)
            if not kernels.has_gradients and torch.is_grad_enabled():
                self._refuse_gradients(q, k, v)
            stages = self._stages.get((plan, kernels, q.device))
            if stages is None:
                while len(self._stages) >= _KEPT:
                    del self._stages[next(iter(self._stages))]
                    self._known_calls.clear()
                stages = Stages(plan, kernels, self.group, q.device, self.keep_keys)
                self._stages[plan, kernels, q.device] = stages
        except Exception as failure:  # whatever it is, the others must not wait for this rank
            problem = failure
        if key not in self._agreed:
            self._agree(plan, q, problem)
            if len(self._agreed) >= _AGREED:
                del self._agreed[next(iter(self._agreed))]
                self._known_calls.clear()
            self._agreed[key] = None
        elif problem is not None:
            raise problem
        assert stages is not None
        if call is not None:
            by_place = [tensor.name for tensor in stages.attention.extras][: len(inputs)]
            self._known_calls[call] = (*by_place, *named), stages
        return stages, (q, k, v), extras

    def _agree(self, plan: Plan, q: torch.Tensor, problem: Exception | None) -> None:
        means = f"{q.dtype};{self.keep_keys}".encode()
        state = hashlib.sha256(plan.hash + self._exchange_digest(q) + means).digest()
        mine = torch.tensor([problem is not None, *state], dtype=torch.uint8, device=q.device)
        every = [x.tolist() for x in self.group.gather(mine)] if self.group.size > 1 else [mine.tolist()]
        if problem is not None:
            raise problem
        failed = [rank for rank, x in enumerate(every) if x[0]]
        if failed:
            raise RuntimeError(f"rank {failed[0]} cannot call {self.spec.attention.name}: see its error")
        other = [rank for rank, x in enumerate(every) if x[1:] != every[0][1:]]
        if other:
            raise RuntimeError(
                f"rank {other[0]} is about to call {self.spec.attention.name} with another spec, plan, "
                "type or keep_keys than rank 0: make the plan from the same sizes and inputs on every rank"
            )

    def _exchange_digest(self, q: torch.Tensor) -> bytes:
        try:
            return self.kernels_for(q)[0].digest.encode()
        except Exception:  # the problem that `_prepare_call` has
            return b""

    # --- pieces -------------------------------------------------------------------------------------------

    def kernels_for(self, q: torch.Tensor) -> tuple[RankKernels, Planner]:
        key = (q.dtype, q.shape[-1])
        found = self._kernels.get(key)
        if found is None:
            variant = self.spec.variant(*key, self.params)
            kernels = RankKernels(self.spec, variant, "rows")
            planner = Planner(kernels.visibility, widths_of(kernels.visibility), self.group.size, self.rates)
            found = self._kernels[key] = kernels, planner
        return found

    def _attention(self) -> Attention:
        return next(iter(self._kernels.values()))[0].attention

    def _current(self) -> Plan:
        if self._plan is None:
            raise RuntimeError("there is no plan yet: call shard() or plan() first")
        return self._plan

    def _name_inputs(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        found = name_inputs(self.spec.attention, inputs, named)
        return {name: local_input(x, name, self.group) for name, x in found.items()}

    def _sizes(
        self, kernels: RankKernels, q: torch.Size, k: torch.Size, named: Mapping[str, Any]
    ) -> CallSizes:
        attention, reads = kernels.attention, kernels.visibility.reads
        ends = []
        for tensor in (attention.q, attention.k):
            packed = tensor.storage.ends
            ends.append(self._host(packed, named) if packed else None)
        batch = len(ends[0]) - 1 if ends[0] is not None else q[attention.q.roles.index(Role.BATCH)]
        for which, shape in (("q", q), ("k", k)):
            if 0 in shape:
                raise ValueError(f"{which}: expected rows to share out, got shape {list(shape)}")
        dims = {}
        for tensor in attention.extras:
            for axis, size in zip(tensor.shape, getattr(named.get(tensor.name), "shape", ()), strict=False):
                name = getattr(axis, "name", None)
                if name and name not in ("B", "M", "N", "H", "Hkv", "G"):
                    dims[name] = int(size)
        sizes = CallSizes(
            batch=int(batch),
            queries=q[attention.q.roles.index(Role.QUERY)],
            keys=k[attention.k.roles.index(Role.KEY)],
            heads=q[attention.q.roles.index(Role.HEAD)],
            kv_heads=k[attention.k.roles.index(Role.HEAD)],
            ends_q=ends[0],
            ends_k=ends[1],
            tensors={},
            dims=dims,
        )
        _check_inputs(attention, named, _collect_sizes(attention, sizes))
        return replace(sizes, tensors={name: self._host(name, named) for name in reads})

    @staticmethod
    def _host(name: str, named: Mapping[str, Any]) -> Any:
        if name not in named:
            raise ValueError(f"{name}: the plan depends on it, pass it")
        x = named[name]
        if isinstance(x, torch.Tensor):
            x = x.detach().cpu()
            x = (x.float() if x.dtype is torch.bfloat16 else x).numpy()
        x = np.asarray(x)
        return x.astype(np.int64) if x.dtype.kind == "i" else x

    @staticmethod
    def _tensors(
        attention: Attention, named: Mapping[str, Any], device: torch.device
    ) -> dict[str, torch.Tensor]:
        from attnc.support.arguments import DTYPES

        found = {}
        for tensor in attention.extras:
            if tensor.name not in named:
                raise ValueError(f"{tensor.name}: expected an input, none was given")
            x = named[tensor.name]
            if not isinstance(x, torch.Tensor | int | float):
                raise TypeError(f"{tensor.name}: expected a tensor or a number, got {type(x).__name__}")
            if not isinstance(x, torch.Tensor):
                x = torch.full((), x, dtype=DTYPES[tensor.dtype], device=device)
            found[tensor.name] = x
        return found

    def _check_rows(
        self, attention: Attention, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        rank, sizes = self.group.rank, plan.sizes
        rows = {
            Role.QUERY: len(plan.owned_rows(rank)),
            Role.KEY: len(plan.owned_keys(rank)),
            Role.BATCH: sizes.batch,
        }
        for x, tensor in ((q, attention.q), (k, attention.k), (v, attention.v)):
            heads = sizes.heads if tensor is attention.q else sizes.kv_heads
            for axis, role in enumerate(tensor.roles):
                want = heads if role is Role.HEAD else rows.get(role)
                if x.dim() != len(tensor.roles) or (want is not None and x.shape[axis] != want):
                    raise ValueError(
                        f"{tensor.name}: expected {want} along axis {axis} on rank {rank}, as the plan says, "
                        f"got shape {list(x.shape)}"
                    )
            if x.dtype is not q.dtype or x.device != q.device:
                came = f"got {x.dtype} on {x.device}"
                raise ValueError(f"{tensor.name}: expected {q.dtype} on {q.device}, like q, {came}")

    def _refuse_gradients(self, *tensors: torch.Tensor) -> None:
        if any(x.requires_grad for x in tensors):
            raise RuntimeError(
                f"{self.spec.attention.name} has no gradients: the spec asks for none; call it under "
                "torch.no_grad(), or on detached tensors"
            )

    @staticmethod
    def _tensor(attention: Attention, name: str) -> Tensor:
        if name == "lse" and attention.lse is None:
            raise ValueError("of: the spec has no output lse")
        if name not in ("o", "lse", "q", "k", "v"):
            raise ValueError(f"of: expected o, lse, q, k or v, got {name!r}")
        return attention.tensor(name)


def _kind_of_call(plan: Plan, given: tuple[Any, ...], names: tuple[str, ...]) -> object:
    """Returns all of a call that its checks depend on; None where it has more than plain tensors."""
    if not all(type(x) is torch.Tensor for x in given):
        return None
    kinds = tuple((x.shape, x.dtype, x.device, x.requires_grad) for x in given)
    return plan, names, torch.is_grad_enabled(), kinds


#: Types of keys and values that the spec is asked about.
_NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def _check_tensors(attention: Attention, *, has_data: bool, **given: Any) -> None:
    checked = GivenTensors()
    for name, x in given.items():
        roles, role = attention.tensor(name).roles, Role.QUERY if name == "q" else Role.KEY
        dtypes = FLOATS if name == "q" else (given["q"].dtype, *_NARROW)
        why = "" if name == "q" else "like q"
        part = x.to_local() if is_dtensor(x) else x
        checked.check(name, part, " ".join("_" for _ in roles), dtypes, why, has_data=has_data)
        if name == "v":
            k, (rows, heads) = given["k"], (roles.index(role), roles.index(Role.HEAD))
            wanted = [k.shape[attention.k.roles.index(axis)] for axis in (role, Role.HEAD)]
            if [x.shape[rows], x.shape[heads]] != wanted:
                raise ValueError(
                    f"v: expected {wanted[0]} rows and {wanted[1]} heads, like k, got shape {list(x.shape)}"
                )


def _collect_sizes(attention: Attention, sizes: CallSizes) -> dict[str, int]:
    known = {"B": sizes.batch, "H": sizes.heads, "Hkv": sizes.kv_heads, "G": sizes.heads // sizes.kv_heads}
    rows = (("M", attention.q, sizes.queries), ("N", attention.k, sizes.keys))
    return known | {name: count for name, tensor, count in rows if tensor.storage.is_plain}


def _check_inputs(attention: Attention, named: Mapping[str, Any], known: Mapping[str, int]) -> None:
    env = Env(dims=dict(known))
    for tensor in attention.extras:
        shape = getattr(named.get(tensor.name), "shape", None)
        if shape is None:
            continue
        names = [{node.name for node in walk(size) if isinstance(node, Dim)} for size in tensor.shape]
        wanted = [
            int(evaluate(size, env)) if of <= known.keys() else None
            for size, of in zip(tensor.shape, names, strict=True)
        ]
        fits = len(shape) == len(wanted) and all(
            want in (None, size) for want, size in zip(wanted, shape, strict=True)
        )
        if not fits:
            said = ", ".join("any" if want is None else str(want) for want in wanted)
            raise ValueError(f"{tensor.name}: expected shape [{said}], got {list(shape)}")


def _check_axis(name: str, x: torch.Tensor, axis: int, rows: int, whose: str) -> None:
    if x.dim() <= axis or x.shape[axis] != rows:
        raise ValueError(
            f"{name}: expected {rows} along axis {axis}, the rows of {whose}, got shape {list(x.shape)}"
        )


#: A call that torch.compile leaves alone, and all that it calls; torch.compiler.disable would import the
#: compiler, which takes as long as torch itself, for those who have no use for it.
_uncompiled = _disable_dynamo(ContextParallel._call)


class _ContextAttention(torch.autograd.Function):
    """The forward keeps o and lse of whole rows; the backward starts from them and fetches keys again."""

    @staticmethod
    def forward(
        ctx: Any,
        cp: ContextParallel,
        stages: Stages,
        names: tuple[str, ...],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *extras: torch.Tensor,
    ) -> Any:
        results, rectangles, windows = stages.forward(q, k, v, dict(zip(names, extras, strict=True)))
        ctx.cp, ctx.stages, ctx.names, ctx.parts = cp, stages, names, len(rectangles)
        kept = (x for pair in (*rectangles, *windows) for x in pair)
        ctx.save_for_backward(q, k, v, *extras, *results, *kept)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("context parallelism has no second derivative")
        q, k, v, *rest = ctx.saved_tensors
        count = len(ctx.names)
        extras, (o, lse), pairs = rest[:count], rest[count : count + 2], rest[count + 2 :]
        kept = list(zip(pairs[::2], pairs[1::2], strict=True))
        do = torch.zeros_like(o) if do is None else do
        given = dict(zip(ctx.names, extras, strict=True))
        results, windows = (o, lse), kept[ctx.parts :]
        made = ctx.stages.backward((do, dlse), q, k, v, given, results, kept[: ctx.parts], windows)
        totals = {}
        for name, partial in made.extras.items():
            total = partial
            if ctx.cp.sums and ctx.cp.group.size > 1:
                total = torch.zeros_like(partial)
                for part in ctx.cp.group.gather(partial):
                    total += part
            totals[name] = total.to(given[name].dtype)
        others = (totals.get(name) for name in ctx.names)
        return None, None, None, made.dq, made.dk, made.dv, *others
