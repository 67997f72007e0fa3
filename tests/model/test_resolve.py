"""What specs mean: roles, types and expressions of the examples, and of small variations on one attention."""

from pathlib import Path

import pytest

from attnc.expr.nodes import Const
from tests.model.resolving import EXAMPLES, SPECS, resolve_path


@pytest.mark.parametrize("path", [*SPECS, *EXAMPLES], ids=lambda path: path.stem)
def test_specs_resolve_without_warnings(path: Path) -> None:
    program = resolve_path(path)
    assert not program.warnings
    assert program.attentions or program.projections
    for attention in program.attentions:
        assert attention.score.type == "float"
        assert attention.mask.type == "bool"
        assert all(node.span is not None for node in (attention.score, attention.mask) if node != Const(True))
