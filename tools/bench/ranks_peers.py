"""Who shares attention out over GPUs besides attnc: torch's context parallelism (experimental), and what
people write by hand around cuDNN. Each makes launches by phase for a mask, or says why it cannot. Beside
them, what the links between the GPUs do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnc.bench.run import Unavailable
from attnc.distributed.group import all_gather
from attnc.runtime.timing import Launch, gpu_ms

Drawn: TypeAlias = tuple[list[torch.Tensor], dict[str, Any]]

#: What stays patched while a peer is measured.
_OPEN = ExitStack()


def _world() -> Any:
    return dist.group.WORLD


def _only_causal(mask: str) -> None:
    if mask != "causal":
        raise Unavailable("causal or full masks alone")


def _shards(drawn: Drawn, rows: Callable[[int, int], torch.Tensor]) -> list[torch.Tensor]:
    """Returns this rank's rows of q, k and v as [B, H, M, D], leaves."""
    (q, k, v), _ = drawn
    at = rows(dist.get_rank(), q.shape[1])
    return [x[:, at].transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]


def _zigzag(rank: int, length: int) -> torch.Tensor:
    ranks = dist.get_world_size()
    chunk = length // (2 * ranks)
    first, last = rank * chunk, (2 * ranks - 1 - rank) * chunk
    return torch.cat([torch.arange(start, start + chunk, device="cuda") for start in (first, last)])


def _contiguous(rank: int, length: int) -> torch.Tensor:
    count = length // dist.get_world_size()
    return torch.arange(rank * count, (rank + 1) * count, device="cuda")


def _phases(attend: Callable[..., torch.Tensor], leaves: list[torch.Tensor]) -> Mapping[str, Launch]:
    def forward() -> Any:
        with torch.no_grad():
            return attend(*leaves)

    o = forward()
    do = torch.randn_like(o)

    def both() -> Any:
        return torch.autograd.grad(attend(*leaves), leaves, do)

    both()
    torch.cuda.synchronize()
    return {"forward": forward, "forward + backward": both}


def ulysses(mask: str, length: int, drawn: Drawn) -> Mapping[str, Launch]:
    """Brings all rows of some heads to each rank, by all-to-all (DeepSpeed-Ulysses), and calls cuDNN."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    _only_causal(mask)
    ranks, group = dist.get_world_size(), _world()
    leaves = _shards(drawn, _contiguous)
    if leaves[1].shape[1] % ranks:
        raise Unavailable("K/V heads that the ranks do not divide")

    def to_heads(x: torch.Tensor) -> torch.Tensor:
        b, h, m, d = x.shape
        parts = x.reshape(b, ranks, h // ranks, m, d).transpose(0, 1).contiguous()
        found = all_to_all_single_autograd(parts.flatten(), None, None, group).view_as(parts)
        return found.permute(1, 2, 0, 3, 4).reshape(b, h // ranks, ranks * m, d)

    def to_rows(x: torch.Tensor) -> torch.Tensor:
        b, h, m, d = x.shape
        parts = x.reshape(b, h, ranks, m // ranks, d).permute(2, 0, 1, 3, 4).contiguous()
        found = all_to_all_single_autograd(parts.flatten(), None, None, group).view_as(parts)
        return found.permute(1, 0, 2, 3, 4).reshape(b, h * ranks, m // ranks, d)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            o = F.scaled_dot_product_attention(
                to_heads(q), to_heads(k), to_heads(v), is_causal=True, enable_gqa=True
            )
        return to_rows(o)

    return _phases(attend, leaves)


def gathered(mask: str, length: int, drawn: Drawn) -> Mapping[str, Launch]:
    """Brings all keys to all ranks, rows in zigzag: each of a rank's two chunks meets the keys before its
    end, which cuDNN's causal mask, aligned at the bottom right, is for.
    """
    from torch.distributed._functional_collectives import all_gather_tensor_autograd
    from torch.nn.attention.bias import causal_lower_right

    _only_causal(mask)
    ranks, rank, group = dist.get_world_size(), dist.get_rank(), _world()
    leaves = _shards(drawn, _zigzag)
    chunk = length // (2 * ranks)
    order = torch.cat([_zigzag(r, length) for r in range(ranks)]).argsort()
    ends = ((rank + 1) * chunk, (2 * ranks - rank) * chunk)

    def whole(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = all_gather_tensor_autograd(x, 2, group)
        return found.index_select(2, order)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = whole(k), whole(v)
        found = []
        for part, end in zip(q.chunk(2, 2), ends, strict=True):
            bias = causal_lower_right(chunk, end)
            found.append(
                F.scaled_dot_product_attention(
                    part, k[:, :, :end], v[:, :, :end], attn_mask=bias, enable_gqa=True
                )
            )
        return torch.cat(found, 2)

    return _phases(attend, leaves)


def torch_cp(rotate: str) -> Callable[[str, int, Drawn], Mapping[str, Launch]]:
    """Returns torch.distributed.tensor.experimental.context_parallel over SDPA with cuDNN."""

    def make(mask: str, length: int, drawn: Drawn) -> Mapping[str, Launch]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import experimental
        from torch.distributed.tensor.experimental import _attention

        _only_causal(mask)
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        leaves = _shards(drawn, _zigzag)
        own: Any = _attention
        own.set_rotate_method(rotate)
        parallel: Any = experimental.context_parallel
        group = leaves[0].shape[1] // leaves[1].shape[1]

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))  # its ring has no grouped heads
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        buffer = torch.zeros(1, 1, length, 1, device="cuda")  # there has to be one
        _OPEN.close()
        _OPEN.enter_context(parallel(mesh, buffers=[buffer], buffer_seq_dims=[2]))
        _OPEN.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))

        def forward() -> Any:
            with torch.no_grad():
                return attend(*leaves)

        do = torch.randn_like(leaves[0])

        def both() -> Any:
            return torch.autograd.grad(attend(*leaves), leaves, do)

        both()
        torch.cuda.synchronize()
        return {"forward": forward, "forward + backward": both}

    return make


def flex_cp(mask: str, length: int, drawn: Drawn) -> Mapping[str, Launch]:
    """Returns torch's FlexAttention over ranks: all keys gathered, a block mask of the rank's rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel import _attention
    from torch.nn.attention.flex_attention import flex_attention

    own: Any = _attention
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    extras = drawn[1]
    block_mask = own._create_cp_block_mask(_mask_mod(mask, extras), 1, 1, length, length, device_mesh=mesh)
    leaves = _shards(drawn, _zigzag)  # as its load balancer has them
    dynamo: Any = torch._dynamo
    dynamo.reset()  # each call is compiled for its own lengths: past eight of them it would run uncompiled
    compiled: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    group = _world()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        name = own.c10d._get_process_group_name(group)
        k, v = own.flex_cp_allgather(k, v, 2, name)
        found: torch.Tensor = compiled(q, k, v, block_mask=block_mask, enable_gqa=True)
        return found

    return _phases(attend, leaves)


def _mask_mod(mask: str, extras: Mapping[str, Any]) -> Any:
    match mask:
        case "causal":
            return lambda b, h, q, kv: q >= kv
        case "window":
            return lambda b, h, q, kv: (q >= kv) & (q - kv <= 4095)
        case "documents":
            doc = extras["doc"][0]
            return lambda b, h, q, kv: (q >= kv) & (doc[q] == doc[kv])
        case _:
            length = extras["length"]
            return lambda b, h, q, kv: (q >= kv) | (kv < length[b])


PEERS: Mapping[str, Callable[[str, int, Drawn], Mapping[str, Launch]]] = {
    "ulysses + cuDNN": ulysses,
    "all-gather + SDPA": gathered,
    "torch CP, all-gather": torch_cp("allgather"),
    "torch CP, all-to-all": torch_cp("alltoall"),
    "torch Flex CP": flex_cp,
}
#: Whose processes may be the same: what hangs costs those after it.
GROUPS = (
    ("ulysses + cuDNN", "all-gather + SDPA"),
    ("torch CP, all-gather", "torch CP, all-to-all"),
    ("torch Flex CP",),
)


# --- what the links do --------------------------------------------------------------------------------------


MEGABYTES = (8, 32, 128, 256)


def links() -> dict[str, Any]:
    """Measures GB/s by what was done; every rank calls it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    dist.barrier()  # what every process does first would slow the first pair down
    torch.cuda.synchronize()
    if rank == 0:
        found["copy of 256 MB, a pair at a time"] = _pairs(ranks)
    dist.barrier()
    for megabytes in MEGABYTES:
        size = megabytes << 20
        x = torch.empty(size, dtype=torch.uint8, device="cuda")
        y, whole = torch.empty_like(x), torch.empty(size * ranks, dtype=torch.uint8, device="cuda")

        def ring(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            operations = [
                dist.P2POp(dist.isend, x, (rank + 1) % ranks),
                dist.P2POp(dist.irecv, y, (rank - 1) % ranks),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        found[f"all_gather of {megabytes} MB a rank"] = _rate(
            size * (ranks - 1), partial(all_gather, whole, x)
        )
        found[f"all_to_all of {megabytes} MB a rank"] = _rate(
            size * (ranks - 1) // ranks, partial(dist.all_to_all_single, y, x)
        )
        found[f"send and receive of {megabytes} MB"] = _rate(size, ring)
        del x, y, whole
    try:
        found |= _symmetric(rank, ranks)
    except Exception as failure:  # not every machine has it
        found["symmetric memory"] = f"{type(failure).__name__}: {failure}"[:200]
    return found


def _pairs(ranks: int) -> dict[str, float]:
    found, size = {}, 256 << 20
    for source in range(ranks):
        x = torch.empty(size, dtype=torch.uint8, device=f"cuda:{source}")
        for target in range(ranks):
            if source != target:
                y = torch.empty(size, dtype=torch.uint8, device=f"cuda:{target}")
                with torch.cuda.device(source):
                    rate = size / _seconds(partial(y.copy_, x, non_blocking=True))
                    found[f"{source} to {target}"] = round(rate / 1e9, 1)
    torch.cuda.set_device(0)
    return found


def _symmetric(rank: int, ranks: int) -> dict[str, Any]:
    import torch.distributed._symmetric_memory as symmetric

    size = 256 << 20
    group: Any = dist.group.WORLD
    memory = symmetric.empty(size, dtype=torch.uint8, device=torch.device("cuda", rank))
    handle: Any = symmetric.rendezvous(memory, group.group_name)
    peer = handle.get_buffer((rank + 1) % ranks, (size,), torch.uint8)
    y = torch.empty(size, dtype=torch.uint8, device="cuda")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch is not typed here
    part = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    whole = torch.empty(part.numel() * ranks, dtype=torch.uint8, device="cuda")

    def beside(copy: Launch) -> Launch:
        def launch() -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                copy()
            torch.mm(a, b, out=c)
            torch.cuda.current_stream().wait_stream(side)

        return launch

    def pull() -> Any:
        return y.copy_(peer)

    def gather() -> Any:
        return all_gather(whole, part)

    microseconds = {
        "product of 8192, alone": lambda: torch.mm(a, b, out=c),
        "copy of 256 MB, alone": pull,
        "product beside the copy": beside(pull),
        "all_gather of 64 MB a rank, alone": gather,
        "product beside the all_gather": beside(gather),
    }
    return {
        "copy of 256 MB from the next rank, all at once": _rate(size, pull),
        "microseconds": {name: round(1e6 * _seconds(launch), 1) for name, launch in microseconds.items()},
    }


def _rate(size: int, launch: Launch) -> float:
    return round(size / _seconds(launch) / 1e9, 1)


def _seconds(launch: Launch, repeats: int = 10) -> float:
    for _ in range(3):
        launch()
    torch.cuda.synchronize()
    return 1e-3 * gpu_ms(launch, repeats)
