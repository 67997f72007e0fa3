"""What a kernel that computes o does with it in the end: its epilogue, and what a backward keeps."""

from __future__ import annotations

from attnc.model.dtypes import DType
from attnc.plan.ir import Decode, Forward, Module, Statement
from attnc.target.sm80.printer import scalar, statement


class Finish:
    """Of one kernel. if_wants_lse: a condition for lse to be stored, with `&&` behind it, "" for none;
    keeps_attention: whether a backward reads o before the epilogue; kept_columns: its columns as C++, where
    they are stored 16 bytes at a time, else "". paired: loads of an epilogue that read two columns at a time;
    staged: the one of which something is computed ahead, None for none.
    """

    paired: tuple[object, ...] = ()
    staged: object | None = None
    kept_columns = ""

    def __init__(self, module: Module, kernel: Forward | Decode, dtypes: dict[str, DType]) -> None:
        kept = {arg.tensor.name for arg in module.kept}
        self.if_wants_lse = "args.lse_ptr != nullptr && " if "lse" in kept else ""
        self.keeps_attention = "attention" in kept
        self._kernel, self._dtypes = kernel, dtypes

    @property
    def value(self) -> str:
        assert self._kernel.epilogue is not None
        return scalar(self._kernel.epilogue.value)

    def result(self, o: str, q: str, head: str, column: str) -> str:
        """Returns an element of o as it leaves: what `finish` makes of it where there is an epilogue."""
        return o if self._kernel.epilogue is None else f"finish({o}, {q}, {head}, {column})"

    def statement(self, item: Statement) -> str:
        return self.load(item)

    def load(self, item: Statement) -> str:
        return statement(item, self._dtypes, self._kernel.dims, scalar)
