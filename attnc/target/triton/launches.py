"""Declarations of launches of Triton kernels, as `attnc.support.triton_call.Kernel` takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnc.target.declared import Record, Table, Value, Words, in_words, quoted


def triton_kernel(
    name: str,
    grid: str,
    *,
    tiles: Sequence[str] = (),
    pointers: Sequence[str] = (),
    config: str = "",
    sizes: Mapping[str, str] | None = None,
    warps: int = 0,
    joins: bool = False,
) -> Record:
    """A launch. tiles: tensors that come and go tile by tile; pointers: the others; config: of a backward,
    what declarations call it; the rest as `Kernel` has it.
    """
    fields: dict[str, Value] = {"function": name, "grid": quoted(grid)}
    if tiles:
        fields["tiles"] = Words(tiles)
    if pointers:
        fields["pointers"] = Words(pointers)
    if config:
        fields["config"] = quoted(config.removesuffix("_config"))
    if sizes:
        fields["sizes"] = Table({size: in_words(text) for size, text in sizes.items()})
    if warps:
        fields["warps"] = str(warps)
    if joins:
        fields["joins"] = "True"
    return Record("Kernel", fields=fields)
