"""Cases that are run again every time: failures once found stay.

Beside a spec, `cases/NAME.json` keeps them under version control, by attention:

    {"ATTENTION": [{"why": "what it showed", "case": {...}}]}

What `attnc fuzz` finds lies in a folder of failures until it is moved there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from attnc.model.attention import Variant
from attnc.verify.case import Case, Fit


def corpus(variant: Variant, fit: Fit, failures: Path) -> tuple[Case, ...]:
    """The cases of this variant, each once; those of a spec that has changed since are left out. Raises
    ValueError for a file that is none.
    """
    found = {case.to_json(): case for case in (*_beside(variant), *_found(variant, failures))}
    return tuple(case for case in found.values() if fit.misfit(case) is None)


def file_of(variant: Variant) -> Path:
    """Where the cases of a spec are kept."""
    spec = Path(variant.source.path)
    return spec.parent / "cases" / f"{spec.stem}.json"


def _beside(variant: Variant) -> Iterator[Case]:
    path = file_of(variant)
    if not path.is_file():
        return
    try:
        for entry in json.loads(path.read_text(encoding="utf-8")).get(variant.attention.name, ()):
            yield Case.from_json(json.dumps(entry["case"]))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not a file of cases: {error}") from None


def _found(variant: Variant, failures: Path) -> Iterator[Case]:
    for path in sorted(failures.glob(f"{variant.attention.name}-{variant.name}-*.json")):
        try:
            yield Case.from_json(path.read_text(encoding="utf-8"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a case: {error}") from None
