"""ProjectionModule -> the text of its Triton module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from attnc.model.dtypes import DType
from attnc.model.program import Impl
from attnc.model.schedule import ProductConfig
from attnc.model.tensors import Tensor
from attnc.plan.projection import FEWEST_ROWS, MOST_ROWS, ProjectionModule, impl_of
from attnc.target.call_signature import signature
from attnc.target.header import origin, title_of
from attnc.target.quote import comment, literal
from attnc.target.templates import python_environment, tidy
from attnc.target.triton.printer import TL_DTYPES

#: device -> (largest M, position), and what to say about it.
Tuned = Mapping[str, tuple[tuple[int | None, int], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """How the host launches one kernel."""

    impl: Impl
    condition: str
    rows: str
    stages: str
    pipeline: str


@dataclass(frozen=True, slots=True)
class ProjectionText:
    """Every piece of text that the template asks for."""

    module: ProjectionModule
    measured: Tuned

    @property
    def name(self) -> str:
        return self.module.name

    @property
    def N(self) -> str:
        return self._size("N")

    @property
    def K(self) -> str:
        return self._size("K")

    @property
    def n_is_free(self) -> bool:
        return self.N == "N"

    @property
    def bound_k(self) -> str:
        return "K" if self.K == "K" else "_"

    @property
    def wanted_k(self) -> str:
        return "None" if self.K == "K" else self.K

    @property
    def dims(self) -> str:
        return ", ".join(("M", *(size for size in (self.N, self.K) if size.isidentifier())))

    @property
    def dims_of_join(self) -> str:
        return "M, N" if self.n_is_free else "M"

    @property
    def has_bias(self) -> bool:
        return self.module.variant.projection.has_bias

    @property
    def is_split(self) -> bool:
        return self.module.is_split

    @property
    def has_gemv(self) -> bool:
        return "gemv" in self._impls()

    @property
    def has_flat(self) -> bool:
        return "flat" in self._impls()

    @property
    def has_conventional(self) -> bool:
        return "conventional" in self._impls()

    @property
    def signature(self) -> list[str]:
        projection = self.module.variant.projection
        tensors = (*projection.inputs, projection.tensors["y"])
        return [f"{tensor.name}: {self._shape(tensor)}" for tensor in tensors]

    @property
    def equation(self) -> str:
        return "y = dot(x, w) + bias[n]" if self.has_bias else "y = dot(x, w)"

    @property
    def summary(self) -> str:
        plus = " + bias" if self.has_bias else ""
        return f"A linear layer, y = x w^T{plus}, summed in float32."

    @property
    def torch_dtype(self) -> str:
        return f"torch.{self.module.variant.projection.dtype.facts.torch}"

    @property
    def tl_dtype(self) -> str:
        return TL_DTYPES[self.module.variant.projection.dtype]

    @property
    def precision(self) -> str:
        return ', input_precision="ieee"' if self.module.variant.projection.dtype is DType.F32 else ""

    # --- loops and masks ------------------------------------------------------------------------------------

    @property
    def own_split(self) -> tuple[str, ...]:
        if not self.is_split:
            return ()
        return (
            f"split_size = tl.cdiv(tl.cdiv({self.K}, BLOCK_K), SPLIT_K) * BLOCK_K  # whole tiles",
            "k_first = tl.program_id(2) * split_size",
        )

    @property
    def k_range(self) -> str:
        return f"k_first, tl.minimum(k_first + split_size, {self.K})" if self.is_split else f"0, {self.K}"

    @property
    def gemv_w_mask(self) -> str:
        return _mask(self._n("gemv", "[None, :, None]"), self._k("gemv", "[None, None, :]"))

    @property
    def gemv_x_mask(self) -> str:
        return _both("m[:, None, None] < M", self._k("gemv", "[None, None, :]"))

    @property
    def gemv_exists(self) -> str:
        return _both("m[:, None] < M", self._n("gemv", "[None, :]"))

    @property
    def gemv_bias_mask(self) -> str:
        return _mask(self._n("gemv", ""))

    @property
    def flat_w_mask(self) -> str:
        return _mask(self._n("flat", "[:, None]"), self._k("flat", "[None, :]"))

    @property
    def flat_x_mask(self) -> str:
        return _both("m[None, :] < M", self._k("flat", "[:, None]"))

    @property
    def flat_exists(self) -> str:
        return _both("m[None, :] < M", self._n("flat", "[:, None]"))

    @property
    def flat_bias_mask(self) -> str:
        return _mask(self._n("flat", ""))

    def _n(self, impl: Impl, axes: str) -> str:
        return f"n{axes} < {self.N}" if impl in self.module.ragged_n else ""

    def _k(self, impl: Impl, axes: str) -> str:
        return f"k{axes} < {self.K} - k_lo" if impl in self.module.ragged_k else ""

    # --- tables ---------------------------------------------------------------------------------------------

    @property
    def configs(self) -> list[str]:
        return list(self._configs())

    def _configs(self) -> Iterator[str]:
        for config, shared in zip(self.module.configs, self.module.shared, strict=True):
            match config:
                case ProductConfig(tile_n=n, tile_k=k, split_k=split, warps=warps, stages=stages):
                    yield ", ".join((f'"{config.impl}"', *map(str, (n, k, split, warps, stages, shared))))
                case _:
                    yield f'"{config.impl}"'

    @property
    def guess(self) -> str:
        return repr(self.module.guess).replace("'", '"')

    @property
    def tuned(self) -> list[tuple[str, dict[str, str]]]:
        return [
            (literal(device), {"table": repr(rows), "comment": self._crossovers(rows)})
            for device, rows in sorted(self.measured.items())
        ]

    def _crossovers(self, rows: tuple[tuple[int | None, int], ...]) -> str:
        last: dict[str, int | None] = {}
        for limit, position in rows:
            last[impl_of(self.module.configs[position])] = limit
        parts = [f"{impl} up to M = {limit}" if limit else impl for impl, limit in last.items()]
        return ", ".join(parts[:-1]) + (", then " if parts[:-1] else "always ") + parts[-1]

    @property
    def kernels(self) -> list[KernelCall]:
        found = [impl for impl in ("gemv", "flat") if impl in self._impls()]
        calls = []
        for i, impl in enumerate(found):
            least, most = FEWEST_ROWS[impl], MOST_ROWS[impl]
            inner = f"min(triton.next_power_of_2(M), {most})"
            last = i == len(found) - 1
            calls.append(
                KernelCall(
                    impl=impl,
                    condition=f'if config.impl == "{impl}":' if not (last and i) else "else:",
                    rows=f"max({inner}, {least})" if least > 1 else inner,
                    stages="STAGES=config.num_stages, " if impl == "gemv" else "",
                    pipeline=" num_stages=config.num_stages," if impl == "flat" else "",
                )
            )
        return calls

    def _impls(self) -> set[Impl]:
        return set(map(impl_of, self.module.configs))

    def _size(self, name: str) -> str:
        size = self.module.variant.projection.size(name)
        return name if size is None else str(size)

    def _shape(self, tensor: Tensor) -> str:
        return signature(tensor)


def _both(*conditions: str) -> str:
    found = [condition for condition in conditions if condition]
    return " & ".join(f"({c})" for c in found) if len(found) > 1 else found[0]


def _mask(*conditions: str) -> str:
    found = [condition for condition in conditions if condition]
    return f", mask={_both(*found)}, other=0.0" if found else ""


def render_projection(
    module: ProjectionModule, *, path: str, sha256: str, tuned: Tuned | None = None
) -> dict[str, str]:
    """Returns the text of the module's file by its name. path: of the spec, as the header shows it; sha256:
    of its text.
    """
    projection, params = module.variant.projection, module.variant.params
    title = f"{title_of(projection.name, params)} for Triton: a linear layer, by three implementations."
    text = (
        python_environment()
        .get_template("triton/projection.py.jinja")
        .render(
            text=ProjectionText(module, tuned or {}),
            header={"title": comment(title), **origin(path, sha256)},
        )
    )
    return {f"{module.variant.name}.py": tidy(text)}
