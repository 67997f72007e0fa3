"""What a table of dispatch picks, as the rule says it: the first row that admits the sizes decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnc.tuned.tables import TableRow


def deciding(rows: Sequence[TableRow], *sizes: int) -> TableRow:
    """Returns the first row within whose limits every size is."""
    return next(
        row
        for row in rows
        if all(limit is None or size <= limit for limit, size in zip(row.limits, sizes, strict=True))
    )


def choice(rows: Sequence[TableRow], *sizes: int) -> Mapping[str, str]:
    """Returns what is picked for the sizes."""
    return deciding(rows, *sizes).choice
