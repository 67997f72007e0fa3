"""A group of one process, for tests of what a process does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from attnc.distributed.group import Group


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Group]:
    """Over gloo."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield Group()
    dist.destroy_process_group()
