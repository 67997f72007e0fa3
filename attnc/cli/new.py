"""`attnc new`."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from attnc.cli.console import Mistake, note, say
from attnc.diagnostics import DiagnosticError, did_you_mean
from attnc.files import create_text
from attnc.resources import resource

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@cache
def starters() -> dict[str, Path]:
    """Returns the specs to start from, by name: templates/new/NAME.attn, each with one attention or
    projection.
    """
    return {path.stem: path for path in sorted(resource("templates", "new").glob("*.attn"))}


def examples() -> dict[str, Path]:
    """Returns the specs of attnc's own specs/, by name."""
    return {path.stem: path for path in sorted(resource("specs").glob("*.attn"))}


def _completions(incomplete: str) -> list[str]:
    return [name for name in starters() if name.startswith(incomplete)]


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the function will be called.")],
    like: Annotated[
        str,
        typer.Option(
            help="Start from: bias, causal, decode, document, paged, prefix, projection, varlen, window; or"
            " from one of attnc's own specs, such as local_sink.",
            autocompletion=_completions,
        ),
    ] = "causal",
    out: Annotated[Path, typer.Option(help="Folder to write to.", file_okay=False)] = Path("specs"),
) -> None:
    """Write a spec that compiles, with comments that say what can be changed.

    Example: attnc new my_window --like window
    """
    known = examples() | starters()
    if like not in known:
        hint = "".join(did_you_mean(like, known)) or f"known are {', '.join(starters())}"
        raise Mistake(f"there is nothing like '{like}' to start from", hint)
    text = _rename_starter(name, known[like])
    path = out / f"{name}.attn"
    try:
        create_text(path, text)
    except FileExistsError:
        raise Mistake(f"'{path}' is there already", "choose another name, or remove it first") from None
    say(f"wrote {path}")
    note(f"   = help: attnc compile {path}")
    note(f"   = help: attnc verify {path}")


def _rename_starter(name: str, starter: Path) -> str:
    from attnc.model.resolve import resolve
    from attnc.source import Source
    from attnc.syntax import ast
    from attnc.syntax.parser import load, parse, prelude

    if not _NAME.fullmatch(name):
        proposed = re.sub(r"\W", "_", Path(name).stem, flags=re.ASCII).strip("_")
        hint = f"for example '{proposed}'" if _NAME.fullmatch(proposed) else "for example 'my_attention'"
        raise Mistake(f"{name!r} is no name: letters, digits and underscores", hint)
    source = load(starter)
    places = [
        item.attention if isinstance(item, ast.Schedule) else item.name
        for item in parse(source).items
        if not isinstance(item, ast.Def)
    ]
    text = source.text
    declared = dict.fromkeys(place.id for place in places)
    if len(declared) > 1:
        if name == starter.stem:
            return text
        raise Mistake(
            f"'{starter.stem}' declares {', '.join(declared)}, and one name is given",
            f"'attnc new {starter.stem} --like {starter.stem}' writes all of them",
        )
    for place in sorted(places, key=lambda place: place.span.start, reverse=True):
        text = text[: place.span.start] + name + text[place.span.end :]
    try:
        resolve(parse(Source(f"{name}.attn", text)), prelude())
    except DiagnosticError as failure:
        first = failure.diagnostics[0]
        raise Mistake(f"a spec cannot be called so: {first.message}", "".join(first.hints[:1])) from None
    return text
