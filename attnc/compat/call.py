"""From arguments to a kernel's: the form that a call has, and its tensors in the order of the form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from attnc.compat.arguments import check, number, rows, window
from attnc.compat.compiled import target_for
from attnc.compat.form import Layout
from attnc.compat.prepared import FUNCTIONS, prepared

Window: TypeAlias = tuple[int | None, int | None]

#: Up to so many query rows of a sequence its keys are shared out among programs.
_FEW = 16


class Call:
    """A call being put together. Its methods raise TypeError and ValueError with the name of an argument."""

    def __init__(
        self, name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_inference: bool = False
    ) -> None:
        self._name = name
        dtype = check(name, q, **({"k_cache": k, "v_cache": v} if is_inference else {"k": k, "v": v}))
        q, k, v = map(rows, (q, k, v))
        self._tensors: dict[str, Any] = {"q": q, "k": k, "v": v}
        self._form: dict[str, Any] = {"dtype": dtype, "size": q.shape[-1], "size_v": v.shape[-1]}
        self._is_inference = is_inference
        needed = [x for x in (q, k, v) if self.wants_gradient(x)]
        if needed and is_inference:
            raise ValueError(f"{name}: caches have no gradients: call it under torch.no_grad()")
        self._grads = ["q", "k", "v"] if needed else []

    def wants_gradient(self, x: torch.Tensor | None) -> bool:
        return x is not None and x.requires_grad and torch.is_grad_enabled()

    def score(
        self,
        scale: float | None,
        softcap: float | None,
        slopes: torch.Tensor | None,
        sink: torch.Tensor | None,
    ) -> None:
        device = self._tensors["q"].device
        if softcap is not None and softcap > 0:
            inner = (self._form["size"] ** -0.5 if scale is None else float(scale)) / softcap
            self._tensors["cap"] = number(float(softcap), torch.float32, device)
            self._tensors["softmax_scale"] = number(inner, torch.float32, device)
            self._form["softcap"] = True
        elif scale is not None and float(scale) != self._form["size"] ** -0.5:
            self._tensors["softmax_scale"] = number(float(scale), torch.float32, device)
            self._form["scaled"] = True
        for name, x in (("alibi_slopes", slopes), ("s_aux", sink)):
            if x is None:
                continue
            self._tensors[name] = x.float()
            if self.wants_gradient(x):
                self._grads.append(name)
        if slopes is not None:
            if slopes.dim() not in (1, 2):
                raise ValueError(
                    f"{self._name}: alibi_slopes: expected shape [H] or [B, H], got {list(slopes.shape)}"
                )
            self._form["slopes"] = slopes.dim()
        if sink is not None:
            self._form["sink"] = True

    def mask(self, causal: bool, window_size: Window) -> None:
        device = self._tensors["q"].device
        is_causal, left, right = window(self._name, causal, window_size)
        if is_causal:
            self._form["causal"] = True
        for side, bound in (("left", left), ("right", right)):
            if bound is not None:
                self._tensors[f"window_{side}"] = number(bound, torch.int32, device)
                self._form[side] = True

    def drop(self, p: float, seed: torch.Tensor | None = None) -> None:
        """seed: of an earlier call; drawn from torch's generator if left out."""
        if not 0 <= p < 1:
            raise ValueError(f"{self._name}: dropout_p: expected at least 0 and less than 1, got {p}")
        if p:
            device = self._tensors["q"].device
            self._tensors["dropout_p"] = number(float(p), torch.float32, device)
            self._tensors["seed"] = torch.randint(1 << 62, (), device=device) if seed is None else seed
            self._form["dropout"] = True

    def ragged(self, starts: torch.Tensor, used: torch.Tensor | None) -> None:
        self._lay("q", "ragged", cu_seqlens_q=starts)
        if used is not None:
            self._tensors["seqused_q"] = used
            self._form["rows"] = "seqused_q"

    def packed(self, starts: torch.Tensor | None) -> None:
        self._lay("kv", "ragged", cu_seqlens_k=starts)

    def paged(self, table: torch.Tensor) -> None:
        self._lay("kv", "paged", block_table=table)
        self._form["page"] = self._tensors["k"].shape[1]

    def length(self, name: str, lengths: torch.Tensor) -> None:
        self._tensors[name] = lengths
        self._form["lengths"] = name

    def pad(self, rows: torch.Tensor) -> None:
        self._tensors["cache_leftpad"] = rows
        self._form["leftpad"] = "cache_leftpad"

    @property
    def seed(self) -> torch.Tensor | None:
        """Of the dropout; None without."""
        return self._tensors.get("seed")

    def run(self, splits: int = 0, out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(o, lse); o is `out` if there is one."""
        is_few = self._form.get("q", "dense") == "dense" and self._tensors["q"].shape[1] <= _FEW
        if is_few and self._form.get("kv") != "ragged" and not self._grads and "dropout" not in self._form:
            self._form["splits"] = max(0, splits)
        if "splits" not in self._form:
            self._choose()
        function, inputs = self._prepared()
        if out is None:
            o, lse = function(*inputs)
            return o, lse
        *rows, heads, _ = out.shape
        shape = (heads, *rows) if len(rows) == 1 else (rows[0], heads, rows[1])
        lse = torch.empty(shape, dtype=torch.float32, device=out.device)
        function(*inputs, out=(out, lse))
        return out, lse

    def gradients(
        self, do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) of what `run` gave for the same arguments."""
        self._grads = ["q", "k", "v"]
        self._choose()
        function, inputs = self._prepared("_gradients")
        dq, dk, dv = function(do, None, *inputs, rows(o), lse.contiguous(), None)
        return dq, dk, dv

    def _choose(self) -> None:
        """Whose kernels it runs on."""
        target = target_for(*(self._tensors[name] for name in "qkv"))
        if target:
            self._form["target"] = target

    def _prepared(self, which: str = "") -> tuple[Callable[..., Any], list[Any]]:
        """A function of the form, and its inputs."""
        if self._grads:
            self._form["grads"] = tuple(self._grads)
        function, *names = prepared(tuple(sorted(self._form.items())))
        return getattr(FUNCTIONS, function + which), [self._tensors[name] for name in names]

    def _lay(self, which: str, layout: Layout, **tensors: Any) -> None:
        self._form[which] = layout
        self._tensors |= tensors
