"""The declaration of a Hopper call: its grid."""

from __future__ import annotations

import re

from attnc.support.sizes import evaluate
from attnc.target.files import render_files
from tests.plan.hopper import planned


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
