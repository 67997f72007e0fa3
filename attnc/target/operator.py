"""The pieces of the operators that torch.compile sees in place of a callable, the same for every target."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from attnc.expr.show import show
from attnc.plan.ir import Module
from attnc.target.call import CallText, corrections, kept_shape
from attnc.target.triton.printer import torch_dtype


class OperatorText:
    """Text of the operators; attribute by attribute what `templates/_operator.py.jinja` prints.

    Their names have a digest of the kernels without comments, so that two versions of one spec can be loaded
    side by side, and what only its words or its path differ in has the same names.
    """

    def __init__(self, module: Module, call: CallText, code: str) -> None:
        digest = hashlib.sha256(code.encode()).hexdigest()[:8]
        self.module, self._call = module, call
        self.name = f"{call.function}_{module.variant.name}_{digest}"
        self._inputs = [arg.tensor for arg in module.args]
        self._outputs = [arg.tensor for arg in (*module.outputs, *module.kept)]
        self.results = ", ".join(tensor.name for tensor in self._outputs)
        self.alias = "_callable" if call.function in {tensor.name for tensor in self._inputs} else ""
        self.kept = ", ".join(arg.tensor.name for arg in module.kept)
        self.quoted = ", ".join(f'"{tensor.name}"' for tensor in call.results)
        self._counters = ["fallbacks"] if call.counts_fallbacks else []
        self.arguments = ", ".join([*(tensor.name for tensor in self._inputs), *self._counters])
        self.bare_arguments = call.everything
        self.bare_parameters = call.bare_parameters
        self.configs = "config" if module.backward is None else "config, backward_config"

    @property
    def parameters(self) -> str:
        tensors = [f"{tensor.name}: torch.Tensor" for tensor in self._inputs]
        return ", ".join([*tensors, *(f"{name}: torch.Tensor | None" for name in self._counters)])

    @property
    def result_parameters(self) -> str:
        return ", ".join(f"{tensor.name}: torch.Tensor" for tensor in self._outputs)

    @property
    def return_type(self) -> str:
        many = f"tuple[{', '.join(['torch.Tensor'] * len(self._outputs))}]"
        return "torch.Tensor" if len(self._outputs) == 1 else many

    @property
    def scalars(self) -> Iterator[str]:
        """Numbers become tensors before an operator sees them."""
        return self._call.scalars

    @property
    def made(self) -> Iterator[str]:
        for arg in self.module.kept:
            shape = kept_shape(self.module)
            yield f"{arg.tensor.name} = torch.empty(({shape}), dtype=torch.float32, device=q.device)"

    @property
    def made_if_missing(self) -> Iterator[str]:
        for arg, line in zip(self.module.kept, self.made, strict=True):
            yield f"if {arg.tensor.name} is None:"
            yield f"    {line}"

    @property
    def call(self) -> str:
        return f"{self._call.result} = {self._applied('')}"

    @property
    def call_out(self) -> str:
        several = len(self._call.results) > 1
        return self._applied(f", out={self._call.returns if several else self._call.result}")

    def _applied(self, out: str) -> str:
        named = [*(arg.tensor.name for arg in self.module.kept), *self._counters]
        keywords = "".join(f", {name}={name}" for name in named)
        config = "_read(chosen)" if self.module.backward is None else "_read(chosen)[0]"
        tensors = ", ".join(tensor.name for tensor in self._inputs)
        return f"{self.alias or self._call.function}({tensors}{out}{keywords}, config={config})"

    @property
    def mutated(self) -> str:
        return _names(self._counters)

    @property
    def mutated_out(self) -> str:
        return _names([*self._counters, *(tensor.name for tensor in self._outputs)])

    @property
    def sizes(self) -> Iterator[str]:
        """Sizes of the results, from the shapes of the arguments."""
        for arg in self.module.args:
            binds = [bind.name or "_" for bind in arg.axes]
            if any(name != "_" for name in binds):
                yield f"{', '.join(binds)}{',' if len(binds) == 1 else ''} = {arg.tensor.name}.shape"
            yield from corrections(arg)

    @property
    def empty(self) -> Iterator[str]:
        for arg in (*self.module.outputs, *self.module.kept):
            shape = ", ".join(show(bind.expected) for bind in arg.axes if bind.expected is not None)
            dtype = torch_dtype(arg.tensor)
            yield f"{arg.tensor.name} = torch.empty(({shape}), dtype={dtype}, device=q.device)"

    @property
    def cotangents(self) -> str:
        return "do: torch.Tensor" if self.module.kept else "do: torch.Tensor, dlse: torch.Tensor"

    @property
    def pulled(self) -> str:
        return "do" if self.module.kept else "do, dlse"

    @property
    def gradient_arguments(self) -> str:
        tensors = ", ".join(tensor.name for tensor in self._inputs)
        return f"{self.pulled}, {tensors}, o, lse"


def _names(names: list[str]) -> str:
    """A tuple of strings."""
    quoted = ", ".join(f'"{name}"' for name in names)
    return f"({quoted},)" if len(names) == 1 else f"({quoted})"
