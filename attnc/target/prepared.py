"""The pieces of a callable whose checks and decisions are made once for all calls alike, on every target."""

from __future__ import annotations

from collections.abc import Iterator

from attnc.target.call import CallText
from attnc.target.parameter import names
from attnc.target.triton.printer import torch_dtype


def described(name: str) -> str:
    """What preparing a call depends on of a tensor that is always given."""
    return f"{name}.shape, {name}.stride(), {name}.dtype, {name}.device"


class PreparedText(CallText):
    """Text of the callable; attribute by attribute what `templates/_prepared_call.py.jinja` and
    `templates/_prepare.py.jinja` print of it.
    """

    @property
    def key(self) -> Iterator[str]:
        """What `_key` says of the tensors, line by line: a loop would take longer, at every call."""
        for tensor in self.inputs:
            yield described(tensor.name)
        kept = [arg.tensor.name for arg in self.module.kept]
        kept += ["fallbacks"] if self.counts_fallbacks else []
        yield from (f"_described({name})" for name in kept)

    @property
    def prepared_parameters(self) -> list[str]:
        """Parameters of `_key` and `_prepare`."""
        return [x.bare for x in (*self.tensor_parameters, *self.keywords)]

    @property
    def prepared_for(self) -> str:
        """Their names."""
        return names((*self.tensor_parameters, *self.keywords))

    @property
    def contiguous(self) -> str:
        """Arguments of `_contiguous_rows`: what comes in and has rows."""
        return ", ".join(f"{name}={name}" for name in self._text.matrices if name != "o")

    @property
    def allocations(self) -> Iterator[str]:
        for i, tensor in enumerate(self.results):
            yield f"{tensor.name} = _empty(call.results[{i}], {torch_dtype(tensor)}, q)"

    @property
    def result_layouts(self) -> str:
        layouts = [f"_layout({tensor.name})" for tensor in self.results]
        return f"{layouts[0]}," if len(layouts) == 1 else ", ".join(layouts)
