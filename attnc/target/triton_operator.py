"""The pieces of the operator that torch.compile sees in place of the callable."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from attnc.expr.show import show
from attnc.plan.ir import Module
from attnc.target.triton import torch_dtype
from attnc.target.triton_host import corrections, kept_shape


class OperatorText:
    """Text of the operator; attribute by attribute what `templates/triton/_operator.py.jinja` prints.

    Its name has a digest of the kernels, so that two versions of one spec can be loaded side by side.
    """

    def __init__(self, module: Module, kernels: str) -> None:
        digest = hashlib.sha256(kernels.encode()).hexdigest()[:8]
        self.module = module
        self.function = module.variant.attention.name
        self.name = f"{self.function}_{module.variant.name}_{digest}"
        self._inputs = [arg.tensor for arg in module.args]
        self._outputs = [arg.tensor for arg in (*module.outputs, *module.kept)]
        self.arguments = ", ".join(tensor.name for tensor in self._inputs)
        self.parameters = ", ".join(f"{tensor.name}: torch.Tensor" for tensor in self._inputs)
        self.results = ", ".join(tensor.name for tensor in self._outputs)
        self.alias = "_function" if self.function in {tensor.name for tensor in self._inputs} else ""
        self._wanted = ", ".join(arg.tensor.name for arg in module.outputs)

    @property
    def return_type(self) -> str:
        many = f"tuple[{', '.join(['torch.Tensor'] * len(self._outputs))}]"
        return "torch.Tensor" if len(self._outputs) == 1 else many

    @property
    def dispatch(self) -> Iterator[str]:
        """The callable's first lines while it is being compiled."""
        for tensor in self._inputs:
            if not tensor.shape:
                name = tensor.name
                yield f'{name} = _scalar("{name}", {name}, {torch_dtype(tensor)}, q)'
        yield "_register()"
        call = f"torch.ops.attnc.{self.name}({self.arguments})"
        if self.module.kept:
            yield f"{self.results} = {call}"
            yield f"return {self._wanted}"
        else:
            yield f"return {call}"

    @property
    def made(self) -> Iterator[str]:
        for arg in self.module.kept:
            shape = kept_shape(self.module)
            yield f"{arg.tensor.name} = torch.empty(({shape}), dtype=torch.float32, device=q.device)"

    @property
    def call(self) -> str:
        kept = "".join(f", {arg.tensor.name}={arg.tensor.name}" for arg in self.module.kept)
        return f"{self._wanted} = {self.alias or self.function}({self.arguments}{kept})"

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
        return f"{self.pulled}, {self.arguments}, o, lse"
