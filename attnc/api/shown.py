"""Text that a notebook or a prompt shows as it is."""

from __future__ import annotations

from html import escape


class Shown(str):
    """A string whose representation is itself: in a notebook the last expression of a cell is readable.

    language: what a notebook colours it as, "" for nothing.
    """

    language: str

    def __new__(cls, text: str, language: str = "") -> Shown:
        made = super().__new__(cls, text)
        made.language = language
        return made

    def __repr__(self) -> str:
        return str(self)

    def _repr_markdown_(self) -> str:
        return f"```{self.language}\n{self}\n```"


def preformatted(text: str) -> str:
    """HTML that shows the text with its spaces and line breaks."""
    return f'<pre style="line-height: 1.3">{escape(text)}</pre>'


def folded(title: str, text: str) -> str:
    """HTML that shows the text when its title is clicked."""
    return f"<details><summary>{escape(title)}</summary>{preformatted(text)}</details>"
