"""Mistakes of FlashInfer's wrappers, planted one at a time: a place in `attnc.adapters.flashinfer`, a piece
of its text that occurs there once, and what stands there instead.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One mistake. place: `module.function` or `module.Class.method`; call: of which cases show it."""

    name: str
    place: str
    old: str
    new: str
    call: str = "paged"


BUGS = (
    Bug(
        name="lse is in base e",
        place="wrapper._plan_call",
        old="shape[:-1]), LOG2E,",
        new="shape[:-1]), 1,",
    ),
    Bug(
        name="masks of all requests begin at the first",
        place="wrapper.write_mask",
        old="mask_start[b] + ",
        new="mask_start[0] + ",
    ),
    Bug(
        name="masks of requests are as long as the longest",
        place="ragged.BatchPrefillWithRaggedKVCacheWrapper._mask_tables",
        old="made = flatten_mask(rows, keys, custom, packed, self.device)",
        new="""made = flatten_mask(rows, keys, custom, packed, self.device)
    longest = max(m * n for m, n in zip(rows, keys))
    made["mask_start"] = longest * torch.arange(len(rows))""",
        call="ragged",
    ),
    Bug(
        name="bits of a mask go from the highest",
        place="wrapper.flatten_mask",
        old='ends, "little")',
        new='ends, "big")',
    ),
    Bug(
        name="bits of all requests follow each other",
        place="wrapper.flatten_mask",
        old="accumulate(widths)][:-1]",
        new="accumulate(size // 8 for size in sizes)][:-1]",
    ),
    Bug(
        name="a window stands beside no custom mask",
        place="wrapper.write_mask",
        old="if window_left >= 0 else []",
        new="if window_left >= 0 and not custom else []",
    ),
    Bug(
        name="slopes count from the last key",
        place="decode.write_position_terms",
        old="(kv_idx - q_idx)",
        new="(kv_idx - q_pos)",
        call="decode",
    ),
    Bug(
        name="slopes are those of the power of two above",
        place="wrapper.compute_alibi_slopes",
        old="2 ** (-8 * (i + 1) / n)",
        new="2 ** (-4 * (i + 1) / n)",
        call="ragged",
    ),
    Bug(
        name="a scale of queries is forgotten",
        place="wrapper.combine_scales",
        old="k if q_scale is None else k * q",
        new="k",
        call="decode",
    ),
    Bug(
        name="a window of a call is that of the plan",
        place="wrapper.Plan.variant",
        old="if window_left != self.window_left:",
        new="if window_left > self.window_left:",
    ),
    Bug(
        name="sinks are negated",
        place="paged.launch",
        old='named["sinks"] = sinks',
        new='named["sinks"] = -sinks',
        call="decode",
    ),
    Bug(
        name="queries of a request do not see their own",
        place="decode.BatchDecodeWithPagedKVCacheWrapper.plan",
        old="(is_causal is not False, False),",
        new="(False, False),",
        call="decode",
    ),
    Bug(
        name="a graph keeps the tables of its first plan",
        place="wrapper._write_kept",
        old="known.tables[name].copy_(x)",
        new="known.tables[name].copy_(known.tables[name])",
        call="decode",
    ),
    Bug(
        name="a last page is full",
        place="paged.make_tables",
        old="(counts - 1) * page + last_page_len",
        new="counts * page",
        call="decode",
    ),
    Bug(
        name="pages that are brought together keep their numbers",
        place="mla.BatchMLAPagedAttentionWrapper.run",
        old='named["block_table"] = tables["places"]',
        new="pass",
        call="latent",
    ),
    Bug(
        name="columns that lie apart are read as one",
        place="mla._side_by_side",
        old="if not is_next or",
        new="if",
        call="latent",
    ),
    Bug(
        name="latents see what comes later",
        place="mla.BatchMLAPagedAttentionWrapper.plan",
        old="(bool(causal), False)",
        new="(False, False)",
        call="latent",
    ),
    Bug(
        name="lse in base e is divided",
        place="mla.BatchMLAPagedAttentionWrapper.run",
        old="mul_(LN2)",
        new="div_(LN2)",
        call="latent",
    ),
    Bug(
        name="one request has no window beside a mask",
        place="prefill.attend_alone",
        old="write_mask(causal, bool(mask), window_left)",
        new="write_mask(causal, bool(mask), -1 if mask else window_left)",
        call="single",
    ),
)
