"""`attnc lsp`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from attnc.cli.console import Mistake
from attnc.cli.packages import install

if TYPE_CHECKING:
    from pygls.lsp.server import LanguageServer


def lsp(
    is_stdio: Annotated[
        bool,
        typer.Option(
            "--stdio", help="The only way that attnc serves; accepted because some editors pass it."
        ),
    ] = False,
) -> None:
    """Serve editors over standard input and output, in the language server protocol.

    Messages while a spec is written, hovers with the tiles that a mask visits, completion of names,
    formatting. Started by an editor; needs the package pygls.

    Example: attnc lsp
    """
    try:
        from attnc.cli.language_server import server
    except ImportError as failure:
        raise Mistake(
            f"attnc lsp needs the package pygls, which cannot be imported: {failure}",
            install("pygls"),
        ) from None
    made: LanguageServer = server()
    made.start_io()
