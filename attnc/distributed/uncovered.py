"""What several ranks cannot compute: an error that names feature and place, before anything moves."""

from __future__ import annotations

from collections.abc import Iterator

from attnc.diagnostics import Diagnostic, DiagnosticError, error
from attnc.model.attention import Attention
from attnc.model.tensors import Dense, Paged, Prefix, Ragged
from attnc.source import Source, Span


def check_covered(attention: Attention) -> None:
    """Raises DiagnosticError (E0602) for what rows cannot be shared out of."""
    problems = list(_problems(attention))
    if problems:
        raise DiagnosticError(problems)


def _problems(attention: Attention) -> Iterator[Diagnostic]:
    softmax = attention.softmax
    if softmax.dropout is not None and attention.q.storage.is_packed:
        yield _problem(
            attention,
            "dropout of packed sequences is not shared out over ranks",
            softmax.dropout.span or softmax.span,
            "its counters are positions within a sequence",
            "leave dropout out, or share out the heads in the model (tensor parallelism)",
        )
    for tensor in (attention.q, attention.k, attention.v):
        match tensor.storage:
            case Paged(span=span):
                yield _problem(
                    attention,
                    f"the pages of {tensor.name} are not shared out over ranks by rows",
                    span,
                    "pages lie where a serving engine put them",
                    "for one new token against keys on many ranks use attnc.distributed.SpreadKeys",
                )
            case Prefix(span=span):
                yield _problem(
                    attention,
                    "v as a prefix of k is not shared out over ranks yet",
                    span,
                    "has no rows of its own to move",
                    "pass v as a tensor",
                )
    storages = {type(attention.q.storage), type(attention.k.storage)}
    if storages == {Dense, Ragged}:
        yield _problem(
            attention,
            "packed queries with keys that are not packed are not shared out over ranks",
            attention.q.storage.span if attention.q.storage.is_packed else attention.q.span,
            "rows of q and k lie in different ways",
            "pack both, or neither",
        )


def _problem(attention: Attention, message: str, span: Span | None, label: str, hint: str) -> Diagnostic:
    place = span or attention.span or Source("spec", " ").span(0, 0)
    return error("E0602", message, place, label, hints=(hint,))
