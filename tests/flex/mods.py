"""All mods of the table."""

from __future__ import annotations

from tests.flex import captures, masks, papers, scores
from tests.flex.cases import CASES, Case, Mod, Setting, causal

__all__ = ["CASES", "Case", "Setting", "captures", "causal", "masks", "papers", "scores"]


def _both(name: str, score_case: str, mask_case: str) -> None:
    def make(s: Setting) -> tuple[Mod | None, Mod | None]:
        made = {case.name: case.make for case in CASES}
        return made[score_case](s)[0], made[mask_case](s)[1]

    CASES.append(Case(name, make))


_both("alibi_and_causal", "alibi", "causal_mask")
_both("softcap_and_window", "softcap", "sliding_window")
_both("squared_and_causal", "squared", "causal_mask")
_both("learned_bias_and_documents", "learned_by_distance", "causal_inside_documents")
