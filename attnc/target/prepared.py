"""The pieces of a callable whose checks and decisions are made once for all calls alike, on every target."""

from __future__ import annotations

from collections.abc import Iterator

from attnc.target.call import CallText
from attnc.target.triton import torch_dtype


class PreparedText(CallText):
    """Text of the callable; attribute by attribute what `templates/_prepared_call.py.jinja` and
    `templates/_prepare.py.jinja` print of it.
    """

    @property
    def key(self) -> str:
        """The first arguments of `_key`: the tensors, and the outputs if they are given."""
        optional = [arg.tensor.name for arg in self.module.kept]
        optional += ["fallbacks"] if self.counts_fallbacks else []
        tensors = ", ".join([*(tensor.name for tensor in self.inputs), *optional])
        return f"({tensors}), {'out' if len(self.results) > 1 else 'None if out is None else (out,)'}"

    @property
    def contiguous(self) -> str:
        """Arguments of `_contiguous_rows`: what comes in and has rows."""
        return ", ".join(f"{name}={name}" for name in self._text.matrices if name != "o")

    @property
    def allocations(self) -> Iterator[str]:
        for i, tensor in enumerate(self.results):
            yield f"{tensor.name} = _empty(call.results[{i}], {torch_dtype(tensor)}, q)"

    @property
    def planned_outputs(self) -> Iterator[str]:
        """The results' shapes and strides, without memory if the caller gives none."""
        for line in self.outputs:
            yield line.replace("device=q.device", 'device="meta"')

    @property
    def result_layouts(self) -> str:
        layouts = [f"_layout({tensor.name})" for tensor in self.results]
        return f"{layouts[0]}," if len(layouts) == 1 else ", ".join(layouts)
