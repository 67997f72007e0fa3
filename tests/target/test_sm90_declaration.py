"""The declaration of a Hopper call: its grids, and which kernels a size launches."""

from __future__ import annotations

import re

import pytest

from attnc.runtime.loader import load_module
from attnc.support.sizes import evaluate
from attnc.target.files import render_files
from tests.plan.hopper import planned
from tests.plan.test_sm90_backward import planned as planned_with_gradients
from tests.plans import module_of
from tests.verify.judging import modules_of


def test_a_grid_is_whole_clusters_of_the_multiprocessors_that_there_are() -> None:
    module = planned("cluster in {2, 1}, tile.kv = 64", d=64)
    text = render_files(module, path="a.attn", sha256="")["default.py"]
    (blocks,) = re.findall(r'"(CLUSTER \* .*)"', text)
    sizes = {"M": 300, "B": 1, "H": 40, "BLOCK_M": 128}

    def count(cluster: int, multiprocessors: int, **more: int) -> int:
        names = {**sizes, **more, "CLUSTER": cluster, "multiprocessors()": lambda: multiprocessors}
        found = evaluate(blocks, names)
        assert isinstance(found, int)
        return found

    assert [count(2, n) for n in (132, 131, 7, 1)] == [132, 130, 6, 2]
    assert [count(1, n) for n in (132, 131, 1)] == [120, 120, 1]
    assert [count(2, 132, H=1, M=m) for m in (0, 1, 256, 257)] == [0, 2, 2, 4]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("accumulate", ["atomic", "ordered", "two_pass"])
@pytest.mark.parametrize(
    ("sizes", "chosen", "parts"),
    [
        ({"B": 64, "H": 32, "N": 4096}, 0, 1),  # as many walks as a device wants
        # two tiles of queries each; a head is not divided where blocks take turns
        ({"B": 1, "H": 1, "N": 1024}, 0, {"atomic": 4, "ordered": 1, "two_pass": 4}),
        ({"B": 64, "H": 32, "N": 4096}, 3, 3),
        ({"B": 1, "H": 1, "N": 1024}, 1, 1),
    ],
)
def test_a_walk_has_one_block_or_parts_that_are_joined(
    accumulate: str, sizes: dict[str, int], chosen: int, parts: int | dict[str, int]
) -> None:
    call = load_module(planned_with_gradients(d=64, accumulate=accumulate)).CALL
    (config,) = call.backward.configs["dkdv"]
    names = {**sizes, "M": sizes["N"], "G": 1, "BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N}
    names |= {
        "multiprocessors()": lambda: 132,
        "dkdv_config": config._replace(parts=chosen),
        "dq_config": config,
    }
    for name, text in call.backward.sizes.items():
        names[name] = evaluate(text, names)
    wanted = parts if isinstance(parts, int) else parts[accumulate]
    assert names["WALK_PARTS"] == wanted
    blocks = {
        (kernel.name.rpartition("_")[2], kernel.choose_config(config).parts): evaluate(kernel.blocks, names)
        for launch in call.backward.launches
        for kernel in launch.kernels
        if "_dkdv" in kernel.name or "_join" in kernel.name
    }
    (whole, cut, joined) = blocks["dkdv", 1], blocks["dkdv", 2], blocks["join", 0]
    assert (whole > 0, cut > 0, joined > 0) == ((True, False, False) if wanted == 1 else (False, True, True))
    (made,) = (made for made in call.backward.made if made.name == "dk_sum")
    held = evaluate(made.type.partition("[")[2].rstrip("]").split(", ")[1], names)
    assert held == (0 if wanted == 1 else wanted)


@pytest.mark.parametrize(
    ("group", "walks", "parts"),
    [(4, 4, 1), (7, 4, 1), (8, 4, 2), (16, 4, 2), (8, 6, 1), (4, 2, 2), (16, 2, 3)],
)
def test_walks_over_many_heads_are_cut_up_to_more_of_them(group: int, walks: int, parts: int) -> None:
    """walks: for each multiprocessor."""
    call = load_module(module_of("causal_gqa", "cuda.sm_90a")).CALL
    (config,) = call.backward.configs["dkdv"]
    names = {"B": 1, "Hkv": 1, "H": group, "G": group, "N": 132 * walks * config.BLOCK_N, "M": 8192}
    names |= {"multiprocessors()": lambda: 132, "dkdv_config": config}
    for name in ("WALKS", "WALK_PARTS"):
        names[name] = evaluate(call.backward.sizes[name], names)
    assert names["WALKS"] == 132 * walks
    assert names["WALK_PARTS"] == parts


def test_rows_of_keys_are_counted_where_heads_are_numbers() -> None:
    """Four query heads on two: the declaration says `Hkv=2`, and a size is an expression."""
    (module,) = modules_of(
        """
        attention few {
          input q: f16[M, 4, B, 64]
          input k: f16[2, N, B, 64]
          input v: f16[2, N, B, 40]
          score = dot(q, k)
          normalize = softmax
          output o: f16[B, M, 4, 40]
          grad q, k, v
        }
        schedule few for cuda.sm_90a { consumers = 2 }
        """
    )
    text = render_files(module, path="a.attn", sha256="")["default.py"]
    (rows,) = re.findall(r'"KEY_ROWS": "(.*)"', text)
    assert evaluate(rows, {"Hkv": 2, "N": 7, "B": 3}) == 42
