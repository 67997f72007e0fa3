"""The declaration of kernels of a launch, as `attnc.support.cuda_call` has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attnc.target.declaration import CallText, Items, Table, Value, Words, in_words, quote_word

#: Places in memory of blocks that each have a multiprocessor to themselves.
PLACES = "multiprocessors()"


def cuda_kernels(
    kernels: list[CallText],
    addresses: list[str],
    strides: Iterable[Sequence[str]],
    numbers: Sequence[str],
    sizes: Mapping[str, str],
    maps: Mapping[str, str] | None = None,
    *,
    decodes: bool = False,
    waits: bool = False,
    rounds: str = "",
) -> CallText:
    """Returns kernels that take the same arguments. strides: of each tensor; maps: of TMA, as `TmaKernels`
    has them; waits: whether kernels wait for those before them, as `TmaKernels` do; decodes: the same, with
    maps or without, and no tile is claimed, but places are, if kernels know how many there are; rounds: as
    `Kernels` has them.
    """
    places = {"PLACES": PLACES} if "PLACES" in numbers else {}
    sizes = {**sizes, **places}
    fields: dict[str, Value] = {"kernels": Items(kernels)}
    if maps:
        fields["maps"] = Table({name: quote_word(rows) for name, rows in maps.items()})
    fields |= {"counts": "False"} if decodes and not places else {}
    fields |= {"waits": "True"} if decodes or waits else {}
    fields |= {"addresses": Words(addresses), "strides": Words(_by_axes(strides)), "numbers": Words(numbers)}
    if sizes:
        fields["sizes"] = Table({name: in_words(text) for name, text in sizes.items()})
    fields |= {"rounds": quote_word(rounds)} if rounds else {}
    return CallText("TmaKernels" if maps or decodes else "Kernels", fields=fields)


def _by_axes(strides: Iterable[Sequence[str]]) -> list[str]:
    """Returns `q:bmh` for stride_qb, stride_qm and stride_qh; `bias:01` for stride_bias_0 and
    stride_bias_1.
    """
    split = ([_tensor_and_axis(name) for name in names] for names in strides if names)
    return [f"{found[0][0]}:{''.join(axis for _, axis in found)}" for found in split]


def _tensor_and_axis(stride: str) -> tuple[str, str]:
    tensor, axis = stride.removeprefix("stride_")[:-1], stride[-1]
    return (tensor.removesuffix("_") if axis.isdigit() else tensor), axis


def cuda_kernel(
    name: str,
    blocks: str,
    *,
    config: str = "",
    changes: Mapping[str, str] | None = None,
    joins: bool = False,
) -> CallText:
    """Returns a kernel, as `Kernel` has it. config: of a backward, what declarations call it."""
    fields: dict[str, Value] = {}
    if config:
        fields["config"] = quote_word(config.removesuffix("_config"))
    if changes:
        fields["changes"] = Table({field: quote_word(text) for field, text in changes.items()})
    if joins:
        fields["joins"] = "True"
    return CallText("Kernel", [quote_word(name), quote_word(blocks)], fields)
