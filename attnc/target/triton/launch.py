"""The declaration of a launch of a Triton kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnc.target.declaration import CallText, Table, Value, Words, in_words, quote_word


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
    contracts: bool = True,
    rounds: str = "1",
) -> CallText:
    """Returns a launch. tiles: tensors that come and go tile by tile; pointers: the others; config: of a
    backward, what declarations call it; the rest as `Kernel` has it.
    """
    fields: dict[str, Value] = {"function": name, "grid": quote_word(grid)}
    if tiles:
        fields["tiles"] = Words(tiles)
    if pointers:
        fields["pointers"] = Words(pointers)
    if config:
        fields["config"] = quote_word(config.removesuffix("_config"))
    if sizes:
        fields["sizes"] = Table({size: in_words(text) for size, text in sizes.items()})
    if warps:
        fields["warps"] = str(warps)
    if joins:
        fields["joins"] = "True"
    if not contracts:
        fields["contracts"] = "False"
    if rounds != "1":
        fields["rounds"] = quote_word(rounds)
    return CallText("Kernel", fields=fields)
