"""What commands say about several GPUs: `attnc explain --ranks`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from attnc.cli.console import Mistake, say_lines
from attnc.diagnostics import did_you_mean

if TYPE_CHECKING:
    from attnc.distributed.estimate import Strategy
    from attnc.model.attention import Attention


def explain_ranks(
    path: Path,
    attention: str | None,
    variant: str | None,
    ranks: int,
    size: str,
    strategy: str | None,
    *,
    as_json: bool,
) -> None:
    """Prints the plan of one call on several ranks."""
    from attnc.distributed.explain import as_dict, as_text, example
    from attnc.distributed.plan import Planner, widths_of
    from attnc.distributed.spans import Visibility
    from attnc.distributed.uncovered import check_covered

    chosen = _attention(path, attention, variant)
    check_covered(chosen)
    visibility = Visibility(chosen)
    sizes, remarks = example(chosen, sizes_of(size))
    try:
        plan = Planner(visibility, widths_of(visibility), ranks).plan(sizes, strategy_of(strategy))
    except ValueError as failure:
        raise Mistake(str(failure), "leave --strategy out to have the shortest estimate") from None
    if as_json:
        say_lines(json.dumps(as_dict(plan, visibility, remarks), indent=2))
    else:
        say_lines(as_text(plan, visibility, remarks))


def _attention(path: Path, name: str | None, variant: str | None) -> Attention:
    """One variant of one attention of a spec: the first ones where nothing is said."""
    from attnc.build import front
    from attnc.cli.choose import only
    from attnc.model.variants import variants

    program = front(path)
    if not program.attentions:
        raise Mistake(f"'{path}' declares no attention", "projections are not shared out over ranks")
    found = only(program.attentions, "attention", name, lambda a: a.name)[0]
    return only(variants(program, found), "variant", variant, lambda v: v.name)[0].attention


def sizes_of(text: str) -> dict[str, int]:
    """`M=65536,N=65536` as numbers. Raises Mistake."""
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if not name.strip().isidentifier() or not value.strip().isdecimal() or int(value) < 1:
            raise Mistake(f"'{part}' is no size", "sizes are written M=65536,N=65536,H=32,Hkv=8")
        sizes[name.strip()] = int(value)
    return sizes


def strategy_of(name: str | None) -> Strategy | None:
    """The strategy of this name. Raises Mistake."""
    from attnc.distributed.estimate import STRATEGIES

    for strategy in STRATEGIES:
        if strategy == name:
            return strategy
    if name is None:
        return None
    hint = "".join(did_you_mean(name, STRATEGIES)) or f"strategies are {', '.join(STRATEGIES)}"
    raise Mistake(f"there is no strategy '{name}'", hint)
