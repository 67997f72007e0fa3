"""Mistakes of calls that stand in for other libraries', planted one at a time: a place in `attnc.compat`, a
piece of its text that occurs there once, and what stands there instead.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One mistake. place: `module.function` or `module.Class.method`; call: of which cases show it; first:
    the number of one that did.
    """

    name: str
    place: str
    old: str
    new: str
    call: str = "cache"
    first: int = 0


BUGS = (
    Bug(
        name="queries that no mask tells apart are rotated one by one",
        place="kvcache.rotate_new",
        old="if is_turned else lengths[sequence]",
        new="",
        first=4,
    ),
    Bug(
        name="pairs of columns lie the other way",
        place="flash_attn.flash_attn_with_kvcache",
        old="interleaved=rotary_interleaved",
        new="interleaved=not rotary_interleaved",
    ),
    Bug(
        name="rotations go backwards",
        place="rotary.rotate",
        old="(first * c - second * s, first * s + second * c)",
        new="(first * c + second * s, second * c - first * s)",
    ),
    Bug(
        name="columns beyond the rotated ones are lost",
        place="rotary.rotate",
        old="rest), -1)",
        new="torch.zeros_like(rest)), -1)",
    ),
    Bug(
        name="angles are at the lengths of the cache",
        place="flash_attn.flash_attn_with_kvcache",
        old="begins = lengths if rotary_seqlens is None else rotary_seqlens",
        new="begins = lengths",
    ),
    Bug(
        name="new rows go to rows of the cache in order",
        place="kvcache.append",
        old="batch[sequences].long()",
        new="sequences",
    ),
    Bug(
        name="rows behind the last sequence are written",
        place="kvcache.append",
        old="kept = torch.arange(len(new), device=new.device).minimum((starts[-1] - 1).clamp(min=0))",
        new="kept = torch.arange(len(new), device=new.device)",
    ),
    Bug(
        name="a batch without new rows writes one",
        place="kvcache.append",
        old="torch.where(starts[-1] > 0, new, cache[where])",
        new="new",
        first=15,
    ),
    Bug(
        name="pages of chosen rows are those of the first",
        place="kvcache._choose_caches",
        old="batch.int()[:, None] * count",
        new="torch.arange(len(batch), dtype=torch.int32, device=batch.device)[:, None] * count",
    ),
    Bug(
        name="chosen rows have no padding on the left",
        place="flash_attn.flash_attn_with_kvcache",
        old="if cache_leftpad is not None:",
        new="if cache_leftpad is not None and cache_batch_idx is None:",
    ),
    Bug(
        name="new rows do not count",
        place="flash_attn.flash_attn_with_kvcache",
        old="lengths = (lengths + new).int()",
        new="lengths = lengths + 0 * new",
    ),
    Bug(
        name="packed queries see the window of the longest",
        place="form.Form._mask",
        old='yield "q_pos - window_left <= kv_idx"',
        new="yield f\"{'q_idx' if self.q == 'ragged' else 'q_pos'} - window_left <= kv_idx\"",
    ),
    Bug(
        name="padding on the left hides a key more",
        place="form.Form._mask",
        old="[b] <= kv_idx",
        new="[b] < kv_idx",
    ),
    Bug(
        name="slopes of sequences are those of the first",
        place="form.Form._score",
        old="alibi_slopes[b, h]",
        new="alibi_slopes[0, h]",
    ),
    Bug(
        name="used queries are all there are",
        place="form.Form._statements",
        old="if self.rows:",
        new="if self.rows and self.kv != 'ragged':",
        call="varlen",
    ),
    Bug(
        name="a used key of pages is one too many",
        place="flash_attn.flash_attn_varlen_func",
        old="_first(seqused_k, cu_seqlens_k)",
        new="_first(None if seqused_k is None else seqused_k + 1, cu_seqlens_k)",
        call="varlen",
        first=3,
    ),
    Bug(
        name="a window ends a key early on the right",
        place="form.Form._mask",
        old="kv_idx <= q_pos + window_right",
        new="kv_idx < q_pos + window_right",
        call="dense",
        first=10,
    ),
    Bug(
        name="softcap does not divide the scale",
        place="call.Call.score",
        old="/ cap",
        new="/ 1",
        call="dense",
    ),
    Bug(
        name="a softcap leaves the given scale out",
        place="call.Call.score",
        old='(self._form["size"] ** -0.5 if scale is None else scale) / cap',
        new='self._form["size"] ** -0.5 / cap',
        call="dense",
        first=2,
    ),
    Bug(
        name="a backward draws a mask of its own",
        place="sdpa._differentiate",
        old="rng_state.view(torch.int64)[0] if dropout_p else None",
        new="None",
        call="sdpa",
        first=2,
    ),
    Bug(
        name="a backward does not see the diagonal",
        place="sdpa._differentiate",
        old="call.mask(mask[0],",
        new="call.mask(False,",
        call="sdpa",
        first=2,
    ),
    Bug(
        name="used keys of ordinary tensors are all",
        place="sdpa._laid_out",
        old='call.length("seqused_k", seqused_k)\n        return',
        new="pass\n        return",
        call="flash",
        first=5,
    ),
    Bug(
        name="used keys of packed tensors are all",
        place="sdpa._laid_out",
        old='call.set_packed(cum_seq_k, name="cum_seq_k")\n        if seqused_k is not None:',
        new='call.set_packed(cum_seq_k, name="cum_seq_k")\n        if False:',
        call="varlen_attn",
    ),
)
