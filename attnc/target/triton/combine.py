"""The pieces of the text of the kernel that joins the splits of a sequence."""

from __future__ import annotations

from attnc.target.triton.kernel import KernelText


class CombineText(KernelText):
    """Attribute by attribute what `templates/triton/combine.py.jinja` prints."""

    @property
    def name(self) -> str:
        return f"{self.module.variant.attention.name}_combine"

    @property
    def parameter_lines(self) -> list[list[str]]:
        tensors = ["splits_ptr", "O", *(["lse_ptr"] if self.has_lse else [])]
        strides = [list(self.strides(arg)) for arg in self.module.outputs]
        return [tensors, *strides, self.sizes, ["BLOCK_S", "PDL"]]

    @property
    def sizes(self) -> list[str]:
        return ["H", "M", "SPLITS", "SPLIT_ROWS"]

    @property
    def split_mask(self) -> str:
        columns = "" if self.dv == self.block_dv else f" & (d[None, :] < {self.dv})"
        return f"(split < SPLITS)[:, None]{columns}"

    @property
    def o_offset(self) -> str:
        return self.offset("o")
