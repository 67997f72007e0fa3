"""What is said of heads that are too wide for a schedule leads to one that compiles."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from operator import ne

import pytest

from attnc.build import plan_program
from attnc.diagnostics import Diagnostic, DiagnosticError
from attnc.model.resolve import resolve
from attnc.plan.fitting import Tiles, remedy
from attnc.source import Source
from attnc.syntax.parser import parse, prelude
from tests.plans import module_of


def spec(width: int, target: str, keys: str, grads: str) -> str:
    return (
        f"attention a {{\n  input q: bf16[B, M, H, {width}]\n  input k, v: bf16[B, N, H, {width}]\n"
        f"  score = dot(q, k) / sqrt(D)\n  mask = causal\n  normalize = softmax\n"
        f"  output o: bf16[B, M, H, {width}]\n  {grads}\n}}\nschedule a for {target} {{ {keys} }}\n"
    )


def first_error(text: str) -> Diagnostic | None:
    try:
        plan_program(resolve(parse(Source("a.attn", text)), prelude()))
    except DiagnosticError as failure:
        return failure.diagnostics[0]
    return None


@pytest.mark.one_in(2)
@pytest.mark.parametrize("grads", ["", "grad q, k, v"])
@pytest.mark.parametrize("target", ["triton", "cuda.sm_80", "cuda.sm_90a"])
@pytest.mark.parametrize("width", [320, 512, 1024])
def test_hints_lead_to_a_kernel(width: int, target: str, grads: str) -> None:
    """At most four hints, each followed as it is: keys of a phase, or another target."""
    keys: dict[str, list[str]] = {"": [], "dq": [], "dkdv": []}
    error: Diagnostic | None = None
    for _ in range(5):
        inner = "".join(f"{phase} {{ {', '.join(keys[phase])} }} " for phase in ("dq", "dkdv") if keys[phase])
        written = ", ".join(keys[""]) + (f"\n backward {{ {inner} }}" if inner else "")
        error = first_error(spec(width, target, written, grads))
        if error is None:
            return
        (hint,) = error.hints
        if (other := re.search(r"schedule (?:a )?for '?(\w+)", hint)) is not None:
            target, keys = other[1], {"": [], "dq": [], "dkdv": []}
            continue
        phase = re.search(r"' for (\w+) fits", error.message)
        said = re.search(r"'(.+)'", hint)
        assert said is not None, hint
        new = said[1].split(", ")
        names = {key.partition(" =")[0] for key in new}
        kept = [key for key in keys[phase[1] if phase else ""] if key.partition(" =")[0] not in names]
        keys[phase[1] if phase else ""] = [*kept, *new]
    pytest.fail(f"no kernel after five hints: {error}")


@pytest.mark.parametrize("seed", range(40))
def test_a_remedy_changes_as_few_keys_as_possible(seed: int) -> None:
    chance = random.Random(seed)
    config = module_of("causal_gqa", "cuda.sm_80").kernel.configs[0]
    changes = {"tile.kv": (16, 8), "tile.q": (32,), "warps": (2, 1)}
    own = {key: config.value(key) for key in changes}
    tried = list(product(*((own[key], *values) for key, values in changes.items())))
    fits = {values for values in tried if chance.random() < 0.1}
    found = remedy(config, changes, lambda c: None if tuple(map(c.value, changes)) in fits else "none")
    if not fits:
        assert found == ()
        return
    (hint,) = found
    said = dict(pair.split(" = ") for pair in hint.split("'")[1].split(", ") if pair)
    assert tuple(int(said[key]) if key in said else own[key] for key in changes) in fits
    assert len(said) == min(sum(map(ne, values, own.values())) for values in fits)


def _tiles_in(value: object) -> Iterator[Tiles]:
    match value:
        case Tiles():
            yield value
        case dict():
            for each in value.values():
                yield from _tiles_in(each)
        case tuple() | list():
            for each in value:
                yield from _tiles_in(each)


@pytest.mark.parametrize("name", ["sm80.forward", "sm80.backward", "sm90.configs", "triton.target"])
def test_tables_have_tiles_of_whole_fragments(name: str) -> None:
    """16 rows and keys, and warps that share them evenly."""
    found = [
        tiles for made in vars(import_module(f"attnc.plan.{name}")).values() for tiles in _tiles_in(made)
    ]
    assert found or name == "sm80.target"
    for tiles in found:
        sizes = tiles.list_given()
        assert all(size % 16 == 0 for key, size in sizes.items() if key.startswith("tile_"))
        assert sizes.get("warps", 4) in (1, 2, 4, 8, 12, 16)
        assert 1 <= sizes.get("stages", 1) <= 4
