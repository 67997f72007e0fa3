"""Plans of projections: tiles, and which kernel is guessed for which size."""

from attnc.build import plan_program
from attnc.model.dtypes import DType
from attnc.model.schedule import ProductConfig
from attnc.plan.projection import DotBound, ProjectionModule
from tests.model.projections import LAYER, SCHEDULE, program


def modules(text: str) -> tuple[ProjectionModule, ...]:
    return plan_program(program(text)).projections


def test_tiles_are_ragged_where_the_size_says_so() -> None:
    first, second, *_ = modules(LAYER + SCHEDULE)
    assert first.ragged_n == {"gemv", "flat"}
    assert first.ragged_k == {"gemv"} == second.ragged_k
    assert not first.is_split


def test_a_bound_counts_the_roundings_of_the_longest_chain() -> None:
    """Higham, section 3.1: one for each addition of the chain, and those besides."""
    every = DotBound(steps=0, depth=3, per_addition=2.0, partial=0.25)
    assert every.relative(100) == 2.0 * (100 + 3) * 2.0**-24 + 0.25
    blocks = DotBound(steps=16, depth=3, per_addition=1.0, partial=0.0)
    assert [blocks.relative(K) * 2.0**24 for K in (16, 17, 100)] == [1 + 3, 2 + 3, 7 + 3]


def test_the_guess_is_in_the_order_of_m() -> None:
    assert modules(LAYER + "schedule layer for triton {\n}\n")[0].guess == (
        (1, "gemv"),
        (64, "flat"),
        (None, "conventional"),
    )
    assert modules(LAYER + "schedule layer for triton {\n impl = flat\n}\n")[0].guess == ((None, "flat"),)


def test_partial_sums_of_16_bits_alone_are_rounded_to_them() -> None:
    schedule = "schedule layer for triton {\n impl = conventional\n}\n"
    for types, partial in (("{bf16, f16}", DType.BF16.unit_roundoff), ("{f32, f16}", 0.0)):
        module = modules(LAYER.replace("{bf16, f16}", types) + schedule)[0]
        assert {module.state_bound(at).partial for at in range(len(module.configs))} == {partial}


def test_sums_of_a_split_are_bounded_by_its_parts() -> None:
    """Along a tree of a tile's columns, then of the splits; a library's and a dot product's one by one."""
    for text in (LAYER + SCHEDULE, LAYER + "schedule layer for triton {\n impl = conventional\n}\n"):
        for module in modules(text):
            for at, config in enumerate(module.configs):
                bound = module.state_bound(at)
                split = getattr(config, "split_k", 0)
                if isinstance(config, ProductConfig) and config.impl == "gemv":
                    halvings = next(n for n in range(20) if config.tile_k >> n == 1)
                    assert bound.steps == config.tile_k * split
                    assert (bound.depth, bound.per_addition) == (halvings + split + 3, 1.0)
                else:
                    assert (bound.steps, bound.depth, bound.per_addition) == (0, split + 3, 2.0)
