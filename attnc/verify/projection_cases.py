"""Cases for projections: sizes, layouts, styles and a seed, as `case.Case` has them for attentions."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from hypothesis import strategies as st

from attnc.model.projection import ProjectionVariant
from attnc.runtime.dtypes import TORCH
from attnc.verify.boundaries import Boundary, Facts
from attnc.verify.case import Case, Fit, Layout

#: Numbers that have broken products: see `draw`.
STYLES = ("random", "cancelling", "one_hot", "growing", "ones", "small")
#: Which tensor gets a special value, and which.
SPECIALS: Mapping[str, tuple[str, float] | None] = {
    "none": None,
    "nan_x": ("x", float("nan")),
    "nan_w": ("w", float("nan")),
    "inf_x": ("x", float("inf")),
    "inf_w": ("w", float("inf")),
    "nan_bias": ("bias", float("nan")),
}
_ROWS = (1, 2, 3, 0, 4, 5, 8, 9, 16, 17, 33, 64, 65)
_COLUMNS = (64, 1, 3, 16, 61, 65, 131)
_DEPTHS = (512, 1, 7, 16, 61, 128, 131, 513, 1030)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What a case may cost: steps of a tile, for configs with these (BLOCK_N, BLOCK_K, rows), by number."""

    tiles: Mapping[int, tuple[int, int, int]]
    work: int

    def affordable(self, dims: Mapping[str, int], config: int) -> bool:
        """Whether a case takes as many steps at most."""
        block_n, block_k, rows = self.tiles[config]
        steps = -(-dims["N"] // block_n) * -(-max(dims["M"], 1) // rows) * -(-dims["K"] // block_k)
        return steps <= self.work


def fit_of(variant: ProjectionVariant, configs: int) -> Fit:
    """What a case of the projection may say, given how many configs there are."""
    ranks = {name: len(tensor.shape) for name, tensor in variant.projection.tensors.items()}
    styles = ("random",)
    return Fit(
        dims=("M", "N", "K"), ranks=ranks, configs=configs, logits=styles, values=STYLES, specials=SPECIALS
    )


def fixed_sizes(variant: ProjectionVariant) -> dict[str, int]:
    """N and K where the spec says them."""
    sizes = ((name, variant.projection.size(name)) for name in ("N", "K"))
    return {name: size for name, size in sizes if size is not None}


def fixed_cases(variant: ProjectionVariant, reach: Reach, count: int) -> Iterator[Case]:
    """The first `count` of a series that visits every config, size, style and special: always the same."""
    fixed = fixed_sizes(variant)
    series = zip(
        cycle(reach.tiles), cycle(_ROWS), cycle(_COLUMNS), cycle(_DEPTHS), cycle(STYLES), strict=False
    )
    for seed, (config, M, N, K, style) in enumerate(islice(series, count)):
        special = tuple(SPECIALS)[seed // 5 % len(SPECIALS)] if seed % 5 == 4 else "none"
        dims = {"M": M, "N": N, "K": K, **fixed}
        if not reach.affordable(dims, config):
            dims |= {name: least for name, least in (("M", 1), ("N", 17)) if name not in fixed}
        layouts = _layouts(seed)
        yield Case(dims=dims, seed=seed, values=style, special=special, layouts=layouts, config=config)


def boundary_cases(
    variant: ProjectionVariant, reach: Reach, boundaries: Iterable[Boundary], configs: Sequence[Any]
) -> Iterator[Case]:
    """A case for every point of the boundaries that is affordable under a config that puts it in force."""
    fixed, names = fixed_sizes(variant), {"rows": "M", "features": "N", "depth": "K"}
    seen = set()
    for boundary in boundaries:
        fitting = [n for n in reach.tiles if boundary.is_in_force({"forward": configs[n]})]
        shared = [n for n in fitting if boundary.reach == "thin" and configs[n].SPLIT_K > 1]
        for point in boundary.points:
            size = {"M": 2, "N": 17, "K": 70, names[boundary.quantity]: point, **fixed}
            config = next((n for n in shared or fitting if reach.affordable(size, n)), None)
            if config is not None and (config, *size.values()) not in seen:
                seen.add((config, *size.values()))
                yield Case(dims=size, seed=len(seen), config=config)


def facts(case: Case, configs: Sequence[Any]) -> Facts:
    """What a case is, as far as boundaries ask."""
    sizes = {"rows": case.dims["M"], "features": case.dims["N"], "depth": case.dims["K"]}
    return Facts(
        sizes={name: frozenset({size}) for name, size in sizes.items()},
        configs={"forward": configs[case.config]},
    )


def _layouts(seed: int) -> dict[str, Layout]:
    """Rows with gaps, of a tensor that does not begin with its buffer, or one row for all."""
    gapped = Layout(order=(0, 1), gaps=(0, 8), offset=8)
    odd = Layout(order=(0, 1), gaps=(0, 3), offset=1)
    expanded = Layout(order=(0, 1), gaps=(0, 0), expanded=(0,))
    chosen: tuple[dict[str, Layout], ...] = (
        {},
        {"x": gapped},
        {"w": odd, "y": gapped},
        {"x": expanded},
        {"x": odd, "w": gapped, "y": odd},
    )
    return dict(chosen[seed % len(chosen)])


@st.composite
def cases(draw: st.DrawFn, variant: ProjectionVariant, reach: Reach) -> Case:
    """Any case that costs little enough."""
    config = draw(st.sampled_from(tuple(reach.tiles)))
    dims = {
        "M": draw(st.one_of(st.sampled_from(_ROWS), st.integers(0, 70))),
        "N": draw(st.one_of(st.sampled_from(_COLUMNS), st.integers(1, 140))),
        "K": draw(st.one_of(st.sampled_from(_DEPTHS), st.integers(1, 1100))),
        **fixed_sizes(variant),
    }
    if not reach.affordable(dims, config):
        dims |= {name: least for name, least in (("M", 1), ("N", 17)) if name not in fixed_sizes(variant)}
    layouts = {
        name: draw(
            st.builds(
                Layout,
                order=st.just((0, 1)),
                gaps=st.tuples(st.just(0), st.sampled_from((0, 1, 8, 13))),
                expanded=st.sampled_from(((), (), (0,))) if name == "x" else st.just(()),
                offset=st.sampled_from((0, 1, 8)),
            )
        )
        for name in ("x", "w", "y")
        if draw(st.booleans())
    }
    return Case(
        dims=dims,
        seed=draw(st.integers(0, 2**16)),
        values=draw(st.sampled_from(STYLES)),
        special=draw(st.sampled_from((*(["none"] * 4), *SPECIALS))),
        layouts=layouts,
        config=config,
    )


def draw(variant: ProjectionVariant, case: Case, device: str) -> dict[str, torch.Tensor]:
    """x, w and bias in the case's style and the projection's type, on the device."""
    projection = variant.projection
    M, N, K = (case.dims[name] for name in "MNK")
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    x, w, bias = normal(M, K), normal(N, K), normal(N)
    at = torch.arange(K, device=device)
    match case.values:
        case "cancelling":  # neighbours nearly cancel: y is far smaller than its terms
            x, w = x / 16 + 8 * (1 - 2 * (at % 2)), w / 16 + 8
            x, w = x.to(torch.bfloat16).float(), w.to(torch.bfloat16).float()
        case "one_hot":  # y shows single weights
            x = (at == torch.arange(M, device=device)[:, None] * 7 % max(K, 1)).float()
        case "growing":  # the last columns outweigh the rest, so that each lost one shows
            x = x * 2.0 ** (8.0 * at / max(K, 1) - 4)
        case "ones":
            x, w = torch.ones_like(x), torch.ones_like(w) / 8
        case "small":
            x, w = x * 2.0**-7, w * 2.0**-7
        case _:
            pass
    dtype = TORCH[projection.dtype]
    made = {"x": x.to(dtype), "w": w.to(dtype)} | ({"bias": bias.to(dtype)} if projection.has_bias else {})
    special = SPECIALS[case.special]
    if special is not None and special[0] in made and made[special[0]].numel():
        tensor = made[special[0]].view(-1)
        tensor[case.seed % tensor.numel()] = special[1]
    return made


def repro(variant: ProjectionVariant, case: Case) -> str:
    """The command that runs this case again."""
    spec = shlex.quote(variant.source.path)
    return (
        f"attnc verify {spec} --attention {variant.projection.name} --variant {variant.name} "
        f"--case {shlex.quote(case.to_json())}"
    )
