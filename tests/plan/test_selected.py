"""Plans of gradients where every query selects keys by a list of its own."""

from __future__ import annotations

import pytest

from attnc.expr.nodes import Const, Dim
from attnc.plan.ir import Module
from attnc.verify.subject import atomic_inputs
from tests.verify.judging import modules_of

TEXT = """attention a {
  input q: bf16[B, M, HEADS, 64]
  input k, v: bf16[B, N, KV, 64]
  input idx: i32[B, M, S]
  score = dot(q, k) / 8
  mask = listed(idx, rows = 1, keys = KEYS) and causal
  normalize = softmax
  output o: bf16[B, M, HEADS, 64]
  grad GRADS
}

schedule a for triton {
  loops = [kv], pack = gqa
  backward { WAYS tile.q = 16, tile.kv = 64 }
}
"""


def planned(
    heads: str = "Hkv * G", kv: str = "Hkv", keys: int = 1, grads: str = "q, k, v", ways: str = ""
) -> Module:
    text = TEXT.replace("HEADS", heads).replace("KEYS", str(keys)).replace("KV", kv)
    (module,) = modules_of(text.replace("GRADS", grads).replace("WAYS ", f"{ways} " if ways else ""))
    return module


@pytest.mark.parametrize(
    ("keys", "written", "forward", "dkdv"),
    [
        (64, "tile.q = 64,", (64, 64, 4, 2), (32, 64, 4, 2)),
        (64, "", (16, 64, 4, 3), (32, 64, 4, 2)),
        (48, "", (16, 16, 4, 3), (32, 16, 4, 2)),
        (16, "", (16, 16, 4, 3), (32, 16, 4, 2)),
        (1, "", (16, 64, 4, 3), (32, 64, 4, 2)),
    ],
)
def test_tiles_are_of_few_heads_where_a_schedule_names_none(
    keys: int, written: str, forward: tuple[int, ...], dkdv: tuple[int, ...]
) -> None:
    """Tiles divide blocks whose keys they own; dq gathers the keys of its query from several."""
    schedule = f"loops = [kv], pack = gqa, {written}"
    text = TEXT[: TEXT.index("  loops")] + schedule.rstrip(" ,") + "\n}\n"
    text = text.replace("HEADS", "Hkv * G").replace("KEYS", str(keys)).replace("KV", "Hkv")
    (module,) = modules_of(text.replace("GRADS", "q, k, v"))
    firsts = (module.kernel.configs[0], *(x.configs[0] for x in module.backward_kernels.values()))
    found = [(x.tile_q, x.tile_kv, x.warps, x.stages) for x in firsts]
    assert found == [forward, (16, 64, 4, 2), dkdv]


def structures_of(module: Module) -> dict[str, str]:
    return {name: kernel.structure for name, kernel in module.backward_kernels.items()}


def test_a_kernel_owns_heads_of_a_query_and_another_the_keys_of_its_list() -> None:
    module = planned()
    assert structures_of(module) == {"dq": "selected_dq", "dkdv": "selected_turns"}
    dq, dkdv = module.backward_kernels["dq"], module.backward_kernels["dkdv"]
    assert [loop.listed is not None for loop in dq.regions.loops] == [True]
    assert dkdv.selected is not None
    assert (dkdv.selected.memory, dkdv.selected.gathers) == ("lists", True)
    (loop,) = dkdv.regions.loops
    assert (loop.start, loop.stop, loop.listed) == (Const(0), Dim("G"), None)  # the heads of the query


ATOMIC = "accumulate.dk = atomic, accumulate.dv = atomic,"


def test_a_kernel_takes_query_after_query_where_sums_are_atomic() -> None:
    module = planned(ways=ATOMIC)
    assert structures_of(module) == {"dq": "selected_tokens"}
    kernel = module.backward_kernels["dq"]
    (loop,) = kernel.regions.loops
    assert loop.listed is not None
    assert (loop.listed.memory, loop.listed.gathers) == ("lists", True)
    assert kernel.adds == ("dk", "dv")
    assert atomic_inputs(module) == {"k", "v"}
    assert atomic_inputs(planned()) == set()


@pytest.mark.parametrize(
    ("keys", "grads", "structure"), [(16, "q, k, v", "selected_dkdv"), (1, "q", "selected_dq")]
)
def test_atomic_sums_change_nothing_where_nothing_is_summed_in_memory(
    keys: int, grads: str, structure: str
) -> None:
    ways = ATOMIC if "k" in grads else ""
    assert list(structures_of(planned(keys=keys, grads=grads, ways=ways)).values())[-1] == structure


def test_a_kernel_owns_blocks_and_walks_over_the_queries_that_list_them() -> None:
    module = planned(keys=48)
    assert structures_of(module) == {"dq": "selected_dq", "dkdv": "selected_dkdv"}
    dkdv = module.backward_kernels["dkdv"]
    (loop,) = dkdv.regions.loops
    assert dkdv.selected is None
    assert loop.listed is not None
    assert (loop.listed.memory, loop.listed.block, loop.listed.gathers) == ("columns", 1, False)


@pytest.mark.parametrize(
    ("heads", "kv", "group"),
    [("Hkv * G", "Hkv", Dim("G")), ("G", "1", Dim("H")), ("H", "H", Const(1))],
)
def test_the_group_is_of_the_heads_that_share_keys(heads: str, kv: str, group: object) -> None:
    kernels = planned(heads, kv).backward_kernels.values()
    assert [kernel.pack and kernel.pack.group for kernel in kernels] == [group] * 2


@pytest.mark.parametrize("keys", [1, 4, 48])
def test_tiles_of_gradients_need_not_divide_blocks(keys: int) -> None:
    configs = planned(keys=keys).backward_kernels["dkdv"].configs
    assert {(config.tile_q, config.tile_kv) for config in configs} == {(16, 64)}


@pytest.mark.parametrize(
    ("grads", "kernels", "prepares"),
    [("q", ["dq"], False), ("k", ["dkdv"], True), ("q, v", ["dq", "dkdv"], False)],
)
def test_kernels_are_those_of_the_gradients_that_are_wanted(
    grads: str, kernels: list[str], prepares: bool
) -> None:
    module = planned(grads=grads)
    assert module.backward is not None
    assert list(module.backward_kernels) == kernels
    assert (module.backward.preprocess is not None) == prepares
    first = module.backward.kernels[0].prologue
    assert prepares or (first is not None and first.stored == (len(kernels) > 1))


@pytest.mark.parametrize(
    ("heads", "tiles"), [("G", (64, 32, 8, 2)), ("16", (16, 64, 4, 2)), ("128", (64, 32, 8, 2))]
)
def test_tiles_of_latents_whose_sums_are_atomic_fit_the_heads(heads: str, tiles: tuple[int, ...]) -> None:
    text = TEXT[: TEXT.index("  backward")] + "  backward { accumulate.dk = atomic }\n}\n"
    text = text.replace("HEADS, 64]", f"{heads}, 576]", 1).replace("HEADS, 64]", f"{heads}, 512]")
    text = text.replace(
        "input k, v: bf16[B, N, KV, 64]",
        "input k: bf16[B, N, 1, 576]\n  input v: bf16[B, N, 1, 512] via prefix(k)",
    )
    (module,) = modules_of(text.replace("KEYS", "1").replace("GRADS", "q, k"))
    config = module.backward_kernels["dq"].configs[0]
    assert (config.tile_q, config.tile_kv, config.warps, config.stages) == tiles
