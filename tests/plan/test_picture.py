"""What the plan visits, compared with the mask evaluated element by element."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnc.expr.evaluate import Env, evaluate
from attnc.plan.picture import FULL, PARTIAL, SKIP, picture
from tests.plans import SPECS, module_of, plans_of

#: Specs whose masks read no tensor.
PURE = ("causal_gqa", "chunked", "full", "window", "local_sink", "fa1", "softcap")
SHAPES = [(128, 128, 64, 64), (100, 300, 64, 32), (200, 70, 32, 64), (1, 257, 64, 64), (65, 64, 64, 32)]


def test_only_what_the_loops_read_is_made_up() -> None:
    assert picture(module_of("local_sink").kernel, 64, 64, 64, 64).note == ""
    assert picture(module_of("padding").kernel, 64, 64, 64, 64).note == "kv_len = N / 4"


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_blocks_that_are_found_on_the_device_may_hide_some(kernel: str) -> None:
    """Which of them a mask of data keeps whole is seen at run time, and never said before."""
    module = module_of("unsorted_documents")
    kernels: dict[Any, Any] = {"forward": module.kernel, **module.backward_kernels}
    assert {kind for row in picture(kernels[kernel], 256, 256, 64, 64).rows for kind in row} == {PARTIAL}


@pytest.mark.parametrize("name", PURE)
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_are_what_the_mask_says(name: str, shape: tuple[int, int, int, int]) -> None:
    queries, keys, tile_q, tile_kv = shape
    module = module_of(name)
    found = picture(module.kernel, *shape)
    indices: dict[str, Any] = {
        "b": 0,
        "h": 0,
        "q_idx": np.arange(queries)[:, None],
        "kv_idx": np.arange(keys),
    }
    mask = evaluate(module.variant.attention.mask, Env(indices=indices, dims={"M": queries, "N": keys}))
    mask = np.broadcast_to(mask, (queries, keys))
    for i, row in enumerate(found.rows):
        for j, kind in enumerate(row):
            tile = mask[i * tile_q : (i + 1) * tile_q, j * tile_kv : (j + 1) * tile_kv]
            if kind == SKIP:
                assert not tile.any(), (i, j)
            if kind == FULL:
                assert tile.all(), (i, j)


def test_causal_square() -> None:
    found = picture(module_of("causal_gqa").kernel, 256, 256, 64, 64)
    assert found.rows == ("/...", "#/..", "##/.", "###/")
    assert (found.count(SKIP), found.count(PARTIAL), found.count(FULL)) == (6, 4, 6)
    assert (found.tiles, found.visited) == (16, 10)


def test_a_size_of_the_spec_is_as_large_as_there_are_keys(tmp_path: Path) -> None:
    spec = tmp_path / "reach.attn"
    spec.write_text((SPECS / "head_mask.attn").read_text().replace("i32[H]", "i32[P]"))
    found = picture(module_of(spec).kernel, 256, 256, 64, 64)
    assert found.note == "reach = N / 4"
    assert found.rows[-1] == "..//"


def test_forgotten_tiles() -> None:
    found = picture(module_of("forgetting").kernel, 512, 512, 64, 64)
    assert found.note == "c falls by the margin in N / 4 keys"
    assert found.rows[-1] == ".....##/"


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.attn")), ids=lambda path: path.stem)
def test_every_spec_has_a_picture(path: Path) -> None:
    for module in plans_of(path).modules[:1]:
        found = picture(module.kernel, 192, 192, 64, 64)
        assert {*"".join(found.rows)} <= {SKIP, PARTIAL, FULL}
        assert found.visited > 0


@pytest.mark.parametrize("keys", [4, 8, 256])
def test_sorted_numbers_are_of_four_equal_documents(keys: int) -> None:
    found = picture(module_of("document").kernel, keys, keys, keys // 4, keys // 4)
    assert found.note == "doc numbers 4 equal documents"
    for i, row in enumerate(found.rows):
        assert [kind != SKIP for kind in row] == [i == j for j in range(4)]
