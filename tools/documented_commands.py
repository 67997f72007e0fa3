"""The reference of the command, from the program's own help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.main import get_command

from attnc.cli.app import app
from tools.documentation import ROOT, table
from tools.documented import escaped


def group() -> Any:
    """The command with its subcommands, as click (inside of typer) sees them."""
    return get_command(app)


def commands() -> str:
    """A section for each subcommand, in the order of `attnc --help`."""
    return "\n".join(_command(name, command) for name, command in group().commands.items())


def _command(name: str, command: Any) -> str:
    text, _, example = command.help.partition("\n\nExample: ")
    paragraphs = "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
    arguments = [p for p in command.params if not p.opts[0].startswith("-")]
    options = [p for p in command.params if p.opts[0].startswith("-")]
    usage = " ".join([f"attnc {name}", *(["[OPTIONS]"] if options else []), *map(_argument, arguments)])
    rows = [("argument or option", "default", "meaning"), ("---", "---", "---")]
    rows += [(f"`{_argument(p)}`", _value(p), escaped(p.help)) for p in arguments]
    rows += [(f"`{_option(p)}`", _value(p), escaped(p.help)) for p in options]
    head = f"### attnc {name}\n\n    {usage}\n\n{escaped(paragraphs)}\n\n"
    parameters = f"{table(rows)}\n" if len(rows) > 2 else ""
    return f"{head}{parameters}```sh\n{example.strip()}\n```\n"


def _argument(param: Any) -> str:
    shown = param.metavar or param.name.upper()
    return shown if param.required else f"[{shown}]{'...' * (param.nargs == -1)}"


def _option(param: Any) -> str:
    names = "/".join((*param.opts, *param.secondary_opts))
    return names if param.is_flag else f"{names} {param.name.upper()}"


def _value(param: Any) -> str:
    if param.required:
        return "required"
    if param.default is None or param.default is False:
        return ""
    return f"`{param.opts[0]}`" if param.default is True else f"`{_text(param.default)}`"


def _text(value: Any) -> str:
    return value.as_posix() if isinstance(value, Path) else str(value)


def ranks_of_a_window() -> str:
    """What `attnc explain` says of a window on four ranks."""
    from attnc.build import front
    from attnc.distributed.explain import as_text, example
    from attnc.distributed.plan import Planner, widths_of
    from attnc.distributed.spans import Visibility
    from attnc.model.variants import variants

    program = front(ROOT / "specs" / "window.attn")
    visibility = Visibility(variants(program, program.attentions[0])[0].attention)
    sizes, remarks = example(visibility.attention, {"M": 65536})
    plan = Planner(visibility, widths_of(visibility), 4).plan(sizes)
    command = "$ attnc explain specs/window.attn --ranks 4 --size M=65536"
    return f"```text\n{command}\n{as_text(plan, visibility, remarks)}\n```\n"
