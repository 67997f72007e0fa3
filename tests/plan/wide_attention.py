"""An attention of any width, and configs of its forward."""

from types import MappingProxyType

from attnc.expr.nodes import TRUE, Const, Dim, Dot
from attnc.model.attention import Attention, Softmax, Variant
from attnc.model.dtypes import DType
from attnc.model.knobs import keys_of
from attnc.model.schedule import ForwardConfig
from attnc.model.tensors import Role, Tensor
from attnc.plan.fitting import Tiles
from attnc.source import Source

SPEC = Source("specs/huge.attn", "schedule huge for triton {\n  tile.q = 128, tile.kv = 256, stages = 4\n}\n")

HEAD = (Role.BATCH, Role.HEAD)


def variant(d: int, dv: int | None = None, dtype: DType = DType.BF16) -> Variant:
    def tensor(name: str, role: Role, length: str, width: int) -> Tensor:
        shape = (Dim("B"), Dim("H"), Dim(length), Const(width))
        return Tensor(name=name, dtype=dtype, shape=shape, roles=(*HEAD, role, Role.FEATURE))

    attention = Attention(
        name="huge",
        params=(),
        inputs=(
            tensor("q", Role.QUERY, "M", d),
            tensor("k", Role.KEY, "N", d),
            tensor("v", Role.KEY, "N", dv or d),
        ),
        outputs=(tensor("o", Role.QUERY, "M", dv or d),),
        lengths=MappingProxyType({}),
        score=Dot(),
        mask=TRUE,
        softmax=Softmax(),
        grads=(),
    )
    return Variant(
        source=SPEC, attention=attention, params=MappingProxyType({}), name="default", kernels="default"
    )


def config(q: int, kv: int, stages: int, warps: int = 4) -> ForwardConfig:
    defaults = {key: of.default for key, of in keys_of("forward").items() if not of.target}
    return Tiles(q, kv, warps, stages).of(ForwardConfig.of(defaults))
