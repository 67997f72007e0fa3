"""`attnc import-flex`."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import attnc
from attnc.cli.bench import check_target
from attnc.cli.console import Mistake, loading, note, say
from attnc.cli.writing import holds_nothing, there_already
from attnc.diagnostics import DiagnosticError, did_you_mean
from attnc.files import create_text, write_text

#: How many arguments each kind of mod takes.
_KINDS = {5: "score_mod", 4: "mask_mod"}


def import_flex(
    mods: Annotated[
        list[str],
        typer.Argument(metavar="FILE.py:MOD", help="A score_mod, a mask_mod, or one of each."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Write the spec to this file; to the terminal if left out.")
    ] = None,
    name: Annotated[str, typer.Option(help="Of the attention; made of the mods' names if left out.")] = "",
    dtype: Annotated[str, typer.Option(help="Of q, k and v: bf16, f16 or f32.")] = "bf16",
    head_dim: Annotated[
        int | None,
        typer.Option(help="Last axis of q and k; a param of 64 and 128 if left out.", min=1, max=1024),
    ] = None,
    is_grouped: Annotated[
        bool, typer.Option("--gqa", help="Groups of query heads share a K/V head.")
    ] = False,
    target: Annotated[str, typer.Option(help="What the schedule is for.")] = "triton",
    force: Annotated[bool, typer.Option("--force", help="Write over what --out names.")] = False,
) -> None:
    """Print the spec that mods of FlexAttention mean.

    The file is your own program: it is run as Python to define its mods. Tensors that a mod reads become
    inputs of the spec.

    Example: attnc import-flex examples/flex_mods.py:alibi examples/flex_mods.py:causal
    """
    found = [_mod(text) for text in mods]
    chosen: dict[str, Callable[..., Any]] = {}
    for text, mod in zip(mods, found, strict=True):
        kind = _KINDS.get(_arity(mod))
        if kind is None:
            taken = "a mod takes (score, b, h, q_idx, kv_idx) or (b, h, q_idx, kv_idx)"
            raise Mistake(
                f"'{text}' takes {_arity(mod)} arguments", f"{taken}; call what makes one in the file"
            )
        if kind in chosen:
            raise Mistake(f"'{text}' is a second {kind}", "name a score_mod and a mask_mod at most")
        chosen[kind] = mod
    check_target(target)
    with loading():
        from attnc.flex.conversion import SPELLED, to_spec
    if dtype not in SPELLED:
        raise Mistake(f"there is no dtype '{dtype}'", f"dtypes are {', '.join(SPELLED)}")
    try:
        spec = to_spec(
            chosen.get("score_mod"),
            chosen.get("mask_mod"),
            dtype=SPELLED[dtype],
            head_dim=head_dim,
            enable_gqa=is_grouped,
            target=target,
            name=name,
        )
    except DiagnosticError:
        raise
    except Exception as failure:
        if isinstance(failure, ValueError) and str(failure).startswith("name: "):
            raise Mistake(f"the spec cannot be called so: {failure}", "choose another --name") from None
        place = traceback.extract_tb(failure.__traceback__)[-1]
        if Path(place.filename).is_relative_to(Path(attnc.__file__).parent):
            raise
        where = f"{place.filename}:{place.lineno}"
        raise Mistake(f"a mod raised {type(failure).__name__}: {failure}", f"at {where}") from failure
    if out is None:
        for line in spec.splitlines():
            say(line)
        return
    try:
        if force or holds_nothing(out, spec.encode()):
            write_text(out, spec)
        else:
            create_text(out, spec)
    except FileExistsError:
        raise there_already(out) from None
    note(f"wrote {out}; 'attnc compile {out}' makes its kernels")


def _mod(text: str) -> Callable[..., Any]:
    file, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        raise Mistake(f"'{text}' names no mod", "write FILE.py:NAME")
    path = Path(file)
    if not path.is_file():
        raise Mistake(f"there is no file '{file}'", "write FILE.py:NAME")
    from attnc.runtime.loader import load_file

    try:
        module = load_file(path)
    except Exception as failure:  # the user's own program
        raise Mistake(f"'{file}' cannot be run: {type(failure).__name__}: {failure}") from failure
    mod = getattr(module, name, None)
    if not callable(mod):
        known = [each for each, value in vars(module).items() if callable(value) and each[0] != "_"]
        what = "there is no mod" if mod is None else "no function is"
        raise Mistake(f"{what} '{name}' in '{file}'", "".join(did_you_mean(name, known)))
    found: Callable[..., Any] = mod
    return found


def _arity(mod: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(mod).parameters.values()
    except ValueError as failure:  # a function of C's
        raise Mistake(f"that is no mod: {failure}", "name a function that is written in Python") from None
    return sum(each.kind in kinds and each.default is each.empty for each in parameters)
