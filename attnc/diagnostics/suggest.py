"""'did you mean': the known name that a misspelt one is closest to."""

from __future__ import annotations

from collections.abc import Iterable


def suggest(name: str, candidates: Iterable[str]) -> str | None:
    """The closest candidate, if it is close enough; among equals one that the name begins, then the first by
    name.

    Close is one edit for every three letters, and at least one for names of three letters or more. A
    transposition counts as one edit, a difference in case as none: 'kv_dix' finds 'kv_idx', 'd' finds 'D',
    'tile.k' finds 'tile.kv', 'x' does not find 'q'.
    """
    ranked = sorted(
        (_distance(name.lower(), candidate.lower()), not candidate.startswith(name), candidate)
        for candidate in set(candidates)
    )
    return next((candidate for distance, _, candidate in ranked if distance <= len(name) // 3), None)


def did_you_mean(name: str, candidates: Iterable[str]) -> tuple[str, ...]:
    """The hints of a diagnostic about an unknown name: none, or one."""
    found = suggest(name, candidates)
    return (f"did you mean '{found}'?",) if found is not None else ()


def _distance(a: str, b: str) -> int:
    """The edit distance with transpositions of neighbours (optimal string alignment)."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]
