"""Attention over ranks that are threads: every kind of mask and input, forward and gradients, held to the
float64 reference of the whole by the bound that the plan of the ranks promises.
"""

import gc
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from attnc.diagnostics import DiagnosticError
from attnc.distributed import ContextParallel
from attnc.distributed.estimate import Strategy
from attnc.distributed.group import Alone
from attnc.distributed.plan import Plan
from attnc.distributed.verify import RanksCase, cases, run_case
from attnc.verify.case import Case
from attnc.verify.interpreter import ensure_interpreter
from attnc.verify.simt import available
from attnc.verify.verdict import Verdict
from tests.by_day import each_by_day
from tests.distributed.specs import SPECS, text
from tests.distributed.threads import Thread, on_ranks

ensure_interpreter()


def verdict_of(
    spec: str,
    dims: Mapping[str, int],
    ranks: int,
    strategy: Strategy | None = None,
    seed: int = 1,
    groups: int | None = None,
) -> Verdict:
    """What all ranks say of one case; they say the same. groups: parts of the heads, one after the other."""
    made = RanksCase(case=Case(dims=dims, seed=seed), strategy=strategy)

    def work(group: Thread) -> Verdict:
        cp = ContextParallel(spec, group, groups=groups)
        return run_case(cp, cp.spec.variants[0], made)

    found = on_ranks(ranks, work)
    assert len({verdict.worst for verdict in found}) == 1
    return found[0]


def dims_of(name: str) -> dict[str, int]:
    sizes = {"B": 1, "M": 45, "N": 45, "Hkv": 2, "G": 1, "H": 2, "R": 63}
    named = {
        "alibi": "B M N H", "bias": "B M N H", "distances": "B M N H R",
    }.get(name, "B M N Hkv G")  # fmt: skip
    return {key: sizes[key] for key in named.split()}


LABELLED = (
    text().partition("schedule")[0]
    + """
schedule small for triton as wide { tile.q = 32, tile.kv = 32 }
schedule small for triton as narrow { tile.q = 16, tile.kv = 16 }
"""
)


@pytest.mark.parametrize(("schedule", "rows"), [(None, 32), ("wide", 32), ("narrow", 16)])
def test_ranks_run_the_schedule_of_a_label(schedule: str | None, rows: int) -> None:
    cp = ContextParallel(LABELLED, Alone(), schedule=schedule)
    q = torch.empty(1, 40, 2, 16, device="meta")
    assert cp.kernels_for(q)[0].module.kernel.configs[0].tile_q == rows


def test_tensors_without_data_are_planned_with_and_not_computed_with() -> None:
    cp = ContextParallel(SPECS["causal"], Alone())
    q, k, v = torch.zeros(1, 32, 2, 16), *torch.zeros(2, 1, 32, 1, 16)
    plan = cp.plan(q.to("meta"), k.to("meta"))
    assert plan.sizes == cp.plan(q, k).sizes
    with pytest.raises(ValueError, match=r"^q: expected a tensor with data, got one on the device meta"):
        cp.shard(*(x.to("meta") for x in (q, k, v)))


def test_a_label_that_no_schedule_has_is_named() -> None:
    with pytest.raises(ValueError, match=r"schedule: expected one .* \(wide, narrow\), got 'tall'"):
        ContextParallel(LABELLED, Alone(), schedule="tall")


#: Seeds for which no packed sequence has more queries than keys.
SEEDS = {"packed": 26}


@pytest.mark.parametrize("name", each_by_day(sorted(SPECS), of=6))
def test_results_and_gradients_are_those_of_one_gpu(name: str) -> None:
    seed = SEEDS.get(name, 1)
    verdict = verdict_of(SPECS[name], dims_of(name), 3 if name in ("causal", "packed") else 2, seed=seed)
    assert verdict.ok, verdict.message


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "strategy", "ranks"),
    [
        ("causal", "gather", 3),
        ("causal", "heads", 2),
        ("by head", "heads", 2),
        ("sink", "heads", 2),
        ("documents", "need", 4),
        ("alibi", "mixed", 4),
    ],
)
def test_every_strategy(name: str, strategy: Strategy, ranks: int) -> None:
    verdict = verdict_of(SPECS[name], dims_of(name), ranks, strategy)
    assert verdict.ok, verdict.message


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "dims",
    [
        {"B": 1, "M": 5, "N": 64, "Hkv": 1, "G": 3},
        {"B": 1, "M": 1, "N": 1, "Hkv": 1, "G": 1},
        {"B": 2, "M": 40, "N": 17, "Hkv": 1, "G": 2},
    ],
)
def test_sizes_that_nothing_divides(dims: Mapping[str, int]) -> None:
    verdict = verdict_of(SPECS["causal"], dims, 3)
    assert verdict.ok, verdict.message


def test_lse_is_for_the_gradients_where_the_spec_has_none() -> None:
    spec = SPECS["window"].replace("  output lse: f32[B, Hkv * G, M]\n", "")
    assert "lse" not in spec
    for strategy in ("need", "heads"):
        verdict = verdict_of(spec, dims_of("window"), 2, strategy)
        assert verdict.ok, verdict.message


@pytest.mark.one_in(2)
@pytest.mark.parametrize("v", ["B, Hkv, N, 8", "B, N, Hkv, 8"])
def test_layouts_and_widths(v: str) -> None:
    """Heads outside of the rows, values of other columns; a window of keys with a hole, in two parts."""
    spec = text("causal and (kv_idx < 3 or kv_idx >= q_pos - 19)")
    spec = spec.replace("k, v: f32[B, N, Hkv, 16]", f"k: f32[B, Hkv, N, 16]\n  input v: f32[{v}]")
    spec = spec.replace("o: f32[B, M, Hkv * G, 16]", "o: f32[B, M, Hkv * G, 8]")
    verdict = verdict_of(spec, {"B": 2, "M": 96, "N": 96, "Hkv": 2, "G": 1}, 2, "need", groups=2)
    assert verdict.ok, verdict.message


def whole(seed: int = 0, rows: int = 45) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, rows, 4, 16), (1, rows, 2, 16), (1, rows, 2, 16)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def gradients(group: Thread, spec: str = SPECS["causal"], **options: Any) -> tuple[torch.Tensor, ...]:
    q, k, v = whole()
    cp = ContextParallel(spec, group, **options)
    leaves = [x.requires_grad_() for x in cp.shard(q, k, v)]
    o, lse = cp(*leaves)
    do = cp.own(whole(1)[0], "o")
    found = torch.autograd.grad((o, lse), leaves, (do, torch.ones_like(lse)))
    return (cp.unshard(o), cp.unshard(lse, "lse"), *map(cp.unshard, found, "qkv"))


def test_bits_are_those_of_one_rank_and_of_every_run() -> None:
    """Rows are complete where they are computed: o, lse and dq do not depend on how many ranks there are.
    Sums over ranks are taken in one order.
    """
    alone = on_ranks(1, gradients)[0]
    first, again = (on_ranks(2, gradients) for _ in range(2))
    for name, one, many, repeated in zip(
        ("o", "lse", "dq", "dk", "dv"), alone, first[0], again[0], strict=True
    ):
        assert torch.equal(many, repeated), f"{name} differs from run to run"
        if name in ("o", "lse", "dq"):
            assert torch.equal(one, many), f"{name} depends on the number of ranks"
        else:
            torch.testing.assert_close(one, many, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize(("name", "ranks", "groups"), [("causal", 3, 2), ("documents", 2, 1)])
def test_keys_may_be_copied_out_of_the_memory_of_others(name: str, ranks: int, groups: int) -> None:
    """Nothing is sent before the gradients, and the bits are the same."""

    def work(group: Thread, *, symmetric: bool) -> tuple[torch.Tensor, ...]:
        group.symmetric = symmetric
        cp = ContextParallel(SPECS[name], group, groups=groups, strategy="need")
        extras: dict[str, Any] = {"doc": torch.arange(45).int()[None] // 20} if name == "documents" else {}
        leaves = [x.requires_grad_() for x in cp.shard(*whole(), **extras)[:3]]
        o, lse = cp(*leaves, **extras)
        assert not (symmetric and group.bytes_sent)
        return (o, lse, *torch.autograd.grad(o.sum(), leaves))

    sent, copied = (on_ranks(ranks, partial(work, symmetric=symmetric)) for symmetric in (False, True))
    for mine, other in zip(sent, copied, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, other, strict=True))


def test_rows_may_lie_in_slices() -> None:
    """As DTensors are sharded: whatever the work."""

    def work(group: Thread) -> tuple[list[int], Verdict]:
        cp = ContextParallel(SPECS["causal"], group, rows="slices")
        made = RanksCase(case=Case(dims={"B": 1, "M": 96, "N": 96, "Hkv": 2, "G": 1}, seed=1))
        verdict = run_case(cp, cp.spec.variants[0], made)
        return cp.rows().tolist(), verdict

    found = on_ranks(3, work)
    assert [rows for rows, _ in found] == [list(range(first, first + 32)) for first in (0, 32, 64)]
    assert found[0][1].ok, found[0][1].message
    with pytest.raises(ValueError, match="rows: expected 'planned' or 'slices', got 'mine'"):
        ContextParallel(SPECS["causal"], Alone(), rows="mine")  # type: ignore[arg-type]  # wrong on purpose


def test_only_what_is_needed_is_sent() -> None:
    def work(group: Thread) -> tuple[int, int]:
        cp = ContextParallel(SPECS["window"], group)
        q, k, v = whole(rows=96)
        shards = cp.shard(q, k, v)
        with torch.no_grad():
            cp(*shards)
        plan = cp.plan(q, k)
        return group.bytes_sent, int(plan.bytes_moved[group.rank].sum())

    found = on_ranks(2, work)
    assert all(sent == planned for sent, planned in found)
    assert sum(sent for sent, _ in found) == 32 * 2 * 2 * 16 * 4  # 20 keys are two blocks


def test_a_rank_with_other_rows_is_an_error_on_all() -> None:
    def work(group: Thread) -> str:
        cp = ContextParallel(SPECS["causal"], group)
        q, k, v = cp.shard(*whole())
        if group.rank == 1:
            q = q[:, :-1]
        try:
            cp(q, k, v)
        except (ValueError, RuntimeError) as failure:
            return f"{type(failure).__name__}: {failure}"
        return "no error"

    found = on_ranks(3, work)
    assert "q: expected" in found[1]
    assert "on rank 1, as the plan says" in found[1]
    assert found[0] == found[2] == "RuntimeError: rank 1 cannot call small: see its error"


def test_any_failure_of_a_rank_is_an_error_on_all() -> None:
    """A disk that is full on one host, such as where kernels are kept."""

    def work(group: Thread) -> str:
        cp = ContextParallel(SPECS["causal"], group)
        q, k, v = cp.shard(*whole())
        if group.rank == 1:
            cp.kernels_for = Mock(side_effect=OSError("no space left on device"))  # type: ignore[method-assign]  # its own
        try:
            cp(q, k, v)
        except (OSError, RuntimeError) as failure:
            return f"{type(failure).__name__}: {failure}"
        return "no error"

    assert on_ranks(2, work) == [
        "RuntimeError: rank 1 cannot call small: see its error",
        "OSError: no space left on device",
    ]


def test_a_rank_that_fails_in_a_later_call_does_not_wait_for_the_others() -> None:
    """They exchange rows by then, and would answer with those."""

    def work(group: Thread) -> str:
        cp = ContextParallel(SPECS["causal"], group)
        q, k, v = cp.shard(*whole())
        cp(q, k, v)
        if group.rank == 0:
            return "no error"
        group.gather = lambda x: pytest.fail("a collective that nobody else is in")  # type: ignore[method-assign]  # of this rank
        try:
            cp(q[:, :-1], k, v)
        except ValueError as failure:
            return str(failure)
        return "no error"

    assert "as the plan says" in on_ranks(2, work)[1]


def test_ranks_ask_again_of_a_plan_that_was_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch of packed sequences may have its own: what ranks know of each other does not grow."""
    monkeypatch.setattr("attnc.distributed.engine._AGREED", 2)

    def work(group: Thread) -> list[int]:
        cp = ContextParallel(SPECS["causal"], group)
        asked = cp._agree = Mock(side_effect=cp._agree)  # type: ignore[method-assign]  # counted
        counts = []
        shards = {rows: cp.shard(*(x[:, :rows] for x in whole())) for rows in (2, 4, 6)}
        for rows in (2, 4, 2, 6, 2):
            cp.plan(*(x[:, :rows] for x in whole()[:2]))
            cp(*shards[rows])
            counts.append(asked.call_count)
        assert len(cp._agreed) == 2
        return counts

    assert on_ranks(2, work) == [[1, 2, 2, 3, 4]] * 2


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("inputs", "score", "mask"),
    [
        (("key_first: i32[]",), "dot(q, k)", "kv_idx >= key_first"),
        (("row_at: i32[M]",), "dot(q, k)", "kv_idx <= row_at[q_idx]"),
        (("t: f32[45]", "t_2: f32[45]"), "dot(q, k) + t[q_idx] + t[kv_idx] + t_2[kv_idx]", "causal"),
        (("t_2: f32[45]", "t: f32[45]"), "dot(q, k) + t_2[kv_idx] + t[q_idx] + t[kv_idx]", "causal"),
    ],
)
def test_inputs_may_be_called_like_what_ranks_add(inputs: tuple[str, ...], score: str, mask: str) -> None:
    """Tables of positions, and second views of an input."""
    dims = {"B": 1, "M": 45, "N": 45, "Hkv": 2, "G": 1}
    verdict = verdict_of(text(mask, score=score, inputs=inputs), dims, 2)
    assert verdict.ok, verdict.message


def test_packed_sequences_that_end_elsewhere_are_another_plan() -> None:
    def plan(cut: int) -> bytes:
        cp = ContextParallel(SPECS["packed"], Alone())
        q, k, _ = (x[0] for x in whole())
        ends = torch.tensor([0, cut, 45], dtype=torch.int32)
        return cp.plan(q, k, cu_q=ends, cu_k=ends).hash

    assert plan(10) != plan(11)


def test_one_plan_serves_tensors_of_several_types() -> None:
    spec = (
        SPECS["causal"]
        .replace(": f32[B, M", ": T[B, M")
        .replace("v: f32", "v: T")
        .replace("{", "{\n  param T in {f16, f32}", 1)
    )
    cp = ContextParallel(spec, Alone())
    q, k, v = cp.shard(*whole())
    o, _ = cp(q, k, v)
    half, _ = cp(q.half(), k.half(), v.half())
    assert half.dtype is torch.float16
    torch.testing.assert_close(half.float(), o, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("other", ["plan", "spec", "keep_keys"])
def test_a_rank_that_means_something_else_is_an_error_on_all(other: str) -> None:
    def work(group: Thread) -> str:
        spec = text("kv_idx < q_pos + 1" if other == "spec" and group.rank else "kv_idx <= q_pos")
        strategy: Any = "gather" if other == "plan" and group.rank else "need"
        cp = ContextParallel(
            spec, group, strategy=strategy, keep_keys=other == "keep_keys" and group.rank == 1
        )
        q, k, v = cp.shard(*whole())
        try:
            cp(q, k, v)
        except RuntimeError as failure:
            return str(failure)
        return "no error"

    for message in on_ranks(2, work):
        assert message.startswith("rank 1 is about to call small with another spec, plan, type or keep_keys")


def test_what_is_not_covered_is_said_before_anything_moves() -> None:
    spec = text(
        inputs=("p: f32[]", "seed: i64[]"), normalize="softmax(dropout = p, seed = seed)", packed=True
    )

    def work(group: Thread) -> str:
        cp = ContextParallel(spec, group)
        with pytest.raises(DiagnosticError) as refused:
            cp.shard(*(x[0] for x in whole()), 0.1, 1)
        assert not group.bytes_sent
        return refused.value.diagnostics[0].message

    assert on_ranks(2, work) == ["dropout of packed sequences is not shared out over ranks"] * 2


def test_dropout_shares_out_the_heads() -> None:
    """Counters are the numbers of rows and keys: the same bits are dropped as on one rank."""

    def work(group: Thread) -> torch.Tensor:
        cp = ContextParallel(SPECS["dropout"], group, groups=1)
        with torch.no_grad():
            o, _ = cp(*cp.shard(*whole(), 0.5, 7))
        assert cp.plan(*whole()[:2]).chosen.strategy == "heads"
        return cp.unshard(o)

    assert torch.equal(on_ranks(2, work)[0], on_ranks(1, work)[0])
    cp = ContextParallel(SPECS["dropout"], Alone(), strategy="need")
    with pytest.raises(
        ValueError, match="strategy: dropout leaves rows and keys whole, 'heads', and not 'need'"
    ):
        cp.plan(*whole()[:2])


def test_mistakes_are_named() -> None:
    def work(group: Thread) -> None:
        cp = ContextParallel(SPECS["documents"], group)
        q, k, v = whole()
        with pytest.raises(RuntimeError, match="there is no plan yet"):
            cp(q, k, v)
        with pytest.raises(ValueError, match="doc: the plan depends on it"):
            cp.shard(q, k, v)
        with pytest.raises(TypeError, match="dock: not an input; the spec has doc"):
            cp.shard(q, k, v, dock=1)
        with pytest.raises(ValueError, match=r"q: expected what a variant of .*, got torch\.float16"):
            cp.plan(q.half(), k.half())
        doc = torch.arange(45, dtype=torch.int32).expand(1, -1) // 20
        untyped: Any = cp.shard
        for given, error, message in (
            (([1], k, v, doc), TypeError, "q: expected a tensor, got list"),
            ((q[0], k, v, doc), ValueError, r"q: expected shape \[any, any, any, any\], got \[45, 4, 16\]"),
            ((q, k, v[:, :7], doc), ValueError, "v: expected 45 rows and 2 heads, like k, got shape"),
            ((q, k, v, doc[:, :7]), ValueError, r"doc: expected shape \[1, 45\], got \[1, 7\]"),
            ((q[:, :0], k, v, doc), ValueError, "q: expected rows to share out, got shape"),
            ((q, k[:, :0], v[:, :0], doc), ValueError, "k: expected rows to share out, got shape"),
        ):
            with pytest.raises(error, match=message):
                untyped(*given)
        cp.shard(q, k, v, doc=doc)
        with pytest.raises(ValueError, match="o: expected 45 along axis 1, the rows of all ranks together"):
            cp.own(q[:, :7])
        with pytest.raises(ValueError, match="o: expected 45 along axis 1, the rows of rank 0, got shape"):
            cp.unshard(q[:, :7])
        with pytest.raises(ValueError, match="of: expected o, lse, q, k or v, got 'x'"):
            cp.unshard(q, "x")
        biased = ContextParallel(SPECS["alibi"], group)
        rows = biased.shard(q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1))
        with pytest.raises(ValueError, match=r"slope: expected shape \[4\], got \[3\]"):
            biased(*rows, slope=torch.ones(3))
        with pytest.raises(TypeError, match="slope: expected a tensor or a number, got list"):
            biased(*rows, slope=[1.0] * 4)

    on_ranks(1, work)


def test_an_input_is_checked_though_one_before_it_is_not_given() -> None:
    """The mask reads neither, so a plan needs none of them."""
    cp = ContextParallel(SPECS["bias"], Alone())
    q, k, _ = (torch.zeros(1, 32, 2, 16) for _ in range(3))
    cp.plan(q, k, own=torch.zeros(1, 32))
    with pytest.raises(ValueError, match=r"own: expected shape \[1, 32\], got \[1, 31\]"):
        cp.plan(q, k, own=torch.zeros(1, 31))


def test_gradients_of_whole_inputs_are_summed_unless_others_do_so() -> None:
    """Without `sums` each rank has what its own rows add."""

    def work(group: Thread, *, sums: bool) -> torch.Tensor:
        cp = ContextParallel(SPECS["alibi"], group, strategy="need", sums=sums)
        q, k, v = whole()
        slope = torch.ones(4, requires_grad=True)
        shards = cp.shard(q, *(x.repeat(1, 1, 2, 1) for x in (k, v)))
        o, _ = cp(*shards, slope=slope)
        return torch.autograd.grad(o.square().sum(), slope)[0]

    summed, own = (on_ranks(2, partial(work, sums=sums)) for sums in (True, False))
    assert torch.equal(summed[0], summed[1])
    assert not torch.equal(own[0], own[1])
    torch.testing.assert_close(own[0] + own[1], summed[0])


def test_every_row_and_label_can_be_found() -> None:
    def work(group: Thread) -> tuple[torch.Tensor, torch.Tensor]:
        cp = ContextParallel(SPECS["causal"], group)
        q, k, v = whole()
        shard = cp.shard(q, k, v)[0]
        assert torch.equal(q[:, cp.rows()], shard)
        assert torch.equal(cp.unshard(shard, "q"), q)
        return cp.rows(), shard

    rows = torch.cat([rows for rows, _ in on_ranks(3, work)])
    assert torch.equal(rows.sort().values, torch.arange(45))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile looks at it
def test_compiled_programs_call_it_between_graphs() -> None:
    """The exchange is on streams of its own, which no graph of torch.compile knows; around it is one."""
    cp, graphs = ContextParallel(SPECS["causal"], Alone()), list[torch.fx.GraphModule]()
    shards = cp.shard(*whole())

    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o: torch.Tensor = cp(q * 2, k, v)[0]
        return o.sin()

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def gradients_of(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in shards]
        o = function(*leaves)
        return (o, *torch.autograd.grad(o.sum(), leaves))

    found = gradients_of(torch.compile(program, backend=backend))
    for x, y in zip(found, gradients_of(program), strict=True):
        assert torch.equal(x, y)
    assert len(graphs) == 2


#: What a target's kernels are told besides the mask.
_SCHEDULES = {
    "cuda.sm_80": "tile.q = 64, tile.kv = 64",
    "cuda.sm_90a": "backward { accumulate.dq = atomic }",
}


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="needs a C++ compiler")
@pytest.mark.parametrize("target", _SCHEDULES)
def test_another_target(target: str) -> None:
    """CUDA kernels, thread by thread, whose gradients of keys leave in f32 as Triton's do."""
    spec = text(dtype="bf16").replace("for triton", f"for {target}")
    spec = spec.replace("tile.q = 16, tile.kv = 16", _SCHEDULES[target])
    made = RanksCase(case=Case(dims={"B": 1, "M": 20, "N": 20, "Hkv": 1, "G": 1}, seed=1))

    def work(group: Thread) -> Verdict:
        cp = ContextParallel(spec, group, target=target)
        return run_case(cp, cp.spec.variants[0], made)

    verdict = on_ranks(2, work)[0]
    assert verdict.ok, verdict.message


def test_cases_are_of_every_strategy() -> None:
    cp = on_ranks(1, lambda group: ContextParallel(SPECS["causal"], group))[0]
    found = list(cases(cp.spec.variants[0].attention, 10))
    assert {made.strategy for made in found} == {None, "need", "gather", "heads", "mixed"}


@pytest.mark.parametrize("strategy", [None, "gather"])
def test_scales_of_keys_come_with_their_keys(strategy: Strategy | None) -> None:
    scaled = text(normalize="softmax(v_scale = vs[h, kv_idx])", inputs=("vs: f32[H, N]",))
    verdict = verdict_of(scaled.replace("grad q, k, v", ""), dims_of("causal"), 2, strategy)
    assert verdict.ok, verdict.message


@pytest.mark.one_in(2)
@pytest.mark.parametrize("strategy", [None, "gather", "heads"])
def test_a_scale_of_v_is_applied_once(strategy: Strategy | None) -> None:
    scaled = text(normalize="softmax(v_scale = vs[h] - q_idx)", inputs=("vs: f32[H]",))
    verdict = verdict_of(scaled.replace("grad q, k, v", ""), dims_of("causal"), 2, strategy)
    assert verdict.ok, verdict.message


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_ranks_choose_a_schedule_where_a_spec_has_none(name: str) -> None:
    """That of `attnc.compile`; others in the file may have none that could be made."""
    bare = SPECS[name].partition("\nschedule ")[0]
    verdict = verdict_of(bare, dims_of(name), 2)
    assert verdict.ok, verdict.message


def test_calls_that_were_checked_take_inputs_by_place_and_by_name() -> None:
    """And what another call has been checked for is checked again: another shape, gradients."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, heads, 16, generator=generator) for heads in (2, 2, 2))
    cp = ContextParallel(SPECS["bias"], Alone())
    pair, own = (torch.randn(shape, generator=generator) for shape in ((2, 40, 40), (1, 40)))
    cp.plan(q, k, pair=pair, own=own)
    expected = cp(q, k, v, pair, own)[0]
    for _ in range(2):
        assert torch.equal(cp(q, k, v, pair, own)[0], expected)
        assert torch.equal(cp(q, k, v, pair, own=own)[0], expected)
        assert torch.equal(cp(q, k, v, own=own, pair=pair)[0], expected)
    with pytest.raises(ValueError, match="q: expected"):
        cp(q[:, :39], k, v, own=own, pair=pair)
    leaf = own.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(cp(q, k, v, own=leaf, pair=pair)[0].sum(), leaf)
    assert gradient.shape == own.shape


def test_what_belongs_to_a_plan_goes_with_it() -> None:
    """Training packs other documents into every batch: neither tables nor plans may pile up."""
    cp, plans = ContextParallel(SPECS["documents"], Alone()), list[weakref.ref[Plan]]()
    q, k, v = torch.zeros(1, 40, 2, 16), *torch.zeros(2, 1, 40, 1, 16)
    for first in range(1, 31):
        doc = (torch.arange(40) >= first).int()[None]
        plans.append(weakref.ref(cp.plan(q, k, doc=doc)))
        cp._prepare_call(q, k, v, (doc,), {})
    cp.kernels_for(q)[1]._plans.clear()  # which keeps more of them, without tables
    gc.collect()
    assert [ref() is not None for ref in plans] == [False] * 14 + [True] * 16
