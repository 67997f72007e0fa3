"""What TMA copies of a tensor, what of it has to be copied before, and launches with maps of it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnc.support import hopper_call
from attnc.support.arguments import Tensor
from attnc.support.devices import Gpu
from attnc.support.hopper_call import Box, HopperLaunch, box_of, copied, padded
from attnc.support.memory import Memory, memory_of
from attnc.support.place import Place

# --- boxes --------------------------------------------------------------------------------------------------


BF16 = torch.bfloat16


def box(x: torch.Tensor, type: str = "bf16[H, M, N]", axes: str = "") -> Box:
    return box_of(Tensor("x", type, axes), memory_of(x), 128)


def test_a_tensor_with_features_has_its_axes_by_their_letters() -> None:
    x = torch.empty(2, 5, 3, 64, dtype=BF16)
    assert box(x, "bf16[B, N, H, 64]", "bnh") == Box(BF16, (64, 5, 3, 2), (384, 128, 1920), 128)


@pytest.mark.parametrize(
    ("x", "sizes", "strides"),
    [
        (torch.empty(3, 5, 8, dtype=BF16), (8, 5, 3, 1), (16, 80, 16)),
        (torch.empty(5, 8), (8, 5, 1, 1), (32, 16, 16)),
        (torch.empty(2, 3, 5, 8, dtype=BF16), (8, 5, 3, 2), (16, 80, 240)),
        (torch.empty(1, 5, 8, dtype=BF16).expand(3, -1, -1), (8, 5, 3, 1), (16, 0, 16)),
    ],
)
def test_one_of_queries_and_keys_has_those_of_its_index(
    x: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    found = box(x)
    assert (found.sizes, found.strides) == (sizes, strides)
    assert found.is_taken


@pytest.mark.parametrize(
    "x",
    [
        torch.empty(3, 5, 7, dtype=BF16),  # rows of 14 bytes
        torch.empty(3, 8, 8, dtype=BF16).transpose(1, 2),  # columns one row apart
        torch.empty(3, 5, 16, dtype=BF16)[..., ::2],
    ],
)
def test_what_tma_does_not_take_it_takes_as_a_copy(x: torch.Tensor) -> None:
    x = x.copy_(torch.arange(x.numel()).view(x.shape))
    assert not box(x).is_taken
    copy = copied(x)
    assert torch.equal(copy, x)
    assert memory_of(copy) == padded(x.shape, x.dtype)
    assert box(copy).is_taken


def test_a_tensor_without_columns_has_rows_all_the_same() -> None:
    x = torch.empty(3, 5, 0, dtype=BF16)
    assert box(copied(x)).is_taken


@pytest.mark.parametrize(
    ("along", "sizes", "strides"), [(0, (8, 2, 5, 3), (240, 16, 80)), (1, (8, 3, 5, 2), (80, 16, 240))]
)
def test_any_axis_may_have_the_rows_of_a_box(
    along: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    memory = memory_of(torch.empty(2, 3, 5, 8, dtype=BF16))
    found = box_of(Tensor("gate", "bf16[B, M, H, 8]"), memory, 16, along)
    assert (found.sizes, found.strides, found.rows) == (sizes, strides, 16)


def test_a_stride_of_one_row_is_none_whatever_torch_says() -> None:
    """A pool of pages of one key and one head, made by as_strided: odd strides of axes of size 1, which no
    kernel steps along, and no reason for a copy of the pool.
    """
    pool = torch.empty(4096, dtype=BF16).as_strided((32, 1, 1, 64), (64, 7, 3, 1))
    declared = Tensor("k", "bf16[P, 1, H, 64]", "pnh")
    place = Place({}, {}, {"k": declared}, ("k",), (), pretended(), torch.device("cpu"))
    names = place.with_memories({"k": memory_of(pool)}).names
    assert names == {"stride_kp": 64, "stride_kn": 0, "stride_kh": 0}


# --- launches -----------------------------------------------------------------------------------------------


def pretended() -> Gpu:
    return Gpu(0, "none", (9, 0), 232448, 233472, 132, 1 << 25, 1 << 37)


class Driver:
    """In the place of libcuda: notes the configuration of each launch."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.seen: list[Any] = []

    def __call__(self, config: Any, *pointers: ctypes.c_void_p) -> int:
        function, arguments, extra = (pointer.value for pointer in pointers)
        assert extra is None
        made = config._obj
        attribute = made.attributes[0]
        sizes = (*made.grid, *made.block, made.shared)
        self.seen.append((function, sizes, made.stream, made.count, attribute.id, attribute.value, arguments))
        return self.error


def started(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Any:
    library = SimpleNamespace(cuLaunchKernelEx=driver)
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: library)
    return hopper_call.launcher_behind(7, 66, 384, 6144)


def test_structs_are_those_of_the_driver() -> None:
    """cuda.h: CUlaunchAttribute is an id, padding and a union of 64 bytes; CUlaunchConfig ends with a
    count.
    """
    config = hopper_call.LaunchConfig
    offsets = (config.stream.offset, config.attributes.offset, config.count.offset)
    assert ctypes.sizeof(hopper_call.LaunchAttribute) == 72
    assert (ctypes.sizeof(config), offsets) == (56, (32, 40, 48))


def test_every_stream_has_a_configuration_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    start = started(monkeypatch, driver)
    for stream in (0x10, 0x20, 0x10):
        start(stream, 0x1000, 0)
    sizes = (66, 1, 1, 384, 1, 1, 6144)
    assert driver.seen == [(7, sizes, stream, 1, 6, 1, 0x1000) for stream in (0x10, 0x20, 0x10)]


def test_an_error_of_the_driver_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    start = started(monkeypatch, Driver(error=701))
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx: error 701"):
        start(0, 0x1000, 0)


def test_a_tensor_without_elements_is_shown_as_bytes_that_are_there() -> None:
    """No map has a size of 0, and such a tensor has no address."""
    k = Tensor("k", "f16[S, H, 32]", "nh")
    box = hopper_call.box_of(k, Memory((0, 4, 32), (128, 32, 1), torch.float16), 64)
    assert (box.is_empty, box.is_taken, box.rows) == (True, True, 64)
    assert (box.sizes, box.strides) == ((8, 1, 1, 1), (16, 16, 16))
    assert hopper_call.counter_of(-1).nbytes >= 16 + 8 * 2


def test_tensors_at_one_address_have_maps_of_their_own() -> None:
    """As q and k of one memory, whose boxes have other rows."""
    made = list[Any]()
    launch: Any = object.__new__(HopperLaunch)
    launch.maps = {}

    def tensor_map(*given: Any) -> bytes:
        made.append(given)
        return b"map"

    launch.tma = SimpleNamespace(call=SimpleNamespace(tensor_map=tensor_map))
    x = box(torch.empty(3, 5, 8, dtype=BF16))
    for number, rows in ((0, 128), (1, 64), (0, 128), (1, 64)):
        launch.map(number, 4096, x._replace(rows=rows))
    assert [given[4][1] for given in made] == [128, 64]


class Doubling:
    """In the place of a launch on copies: writes twice what it is given first to the second."""

    def run(self, given: Sequence[torch.Tensor]) -> None:
        first, second = given
        assert (memory_of(first), memory_of(second)) == (padded((3, 5, 8), BF16),) * 2
        second.copy_(2 * first)


#: Other views of a tensor, which begin where it does.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda x: x,
    "of one axis": lambda x: x.as_strided((230,), (1,)),
    "of other axes": lambda x: x.transpose(0, 1),
    "with a batch of its own": lambda x: x.unsqueeze(0),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_launch_on_copies_knows_tensors_whose_view_is_another(view: str) -> None:
    """A plan that is kept gives what has the same address: copies follow the layout that was prepared."""
    memory, other = (torch.arange(n, n + 240.0).bfloat16() for n in (7, 500))
    q, o = (x[9:].as_strided((3, 5, 8), (8, 40, 1)) for x in (memory, other))
    declared = {"q": Tensor("q", "bf16[M, H, 8]", "mh"), "o": Tensor("o", "bf16[M, H, 8]", "mh")}
    memories = {"q": memory_of(q), "o": memory_of(o)}
    place = Place({}, memories, declared, ("q", "o"), ("o",), pretended(), torch.device("cpu"))
    launch: Any = object.__new__(HopperLaunch)
    launch.tma, launch.on_copies = (
        ({"q": None, "o": None}, SimpleNamespace(copied=copied), None, place),
        [Doubling()],
    )
    given = VIEWS[view]
    expected, beside = 2 * q, other.clone()
    launch.run_on_copies([given(q), given(o)])
    assert torch.equal(o, expected)
    beside[9:].as_strided((3, 5, 8), (8, 40, 1)).copy_(expected)
    assert torch.equal(other, beside)


@pytest.mark.parametrize("offset", [0, 1])
def test_all_rounds_run_on_the_same_copies(offset: int) -> None:
    """Of what TMA cannot take, which is copied before the first and behind the last."""
    copies, seen = [0], list[tuple[int, int]]()

    class Noting(HopperLaunch):
        """Notes its round, and which matrix it runs on, in place of kernels."""

        def keep(self, addresses: tuple[int, ...], made: Any) -> Any:
            assert self.tma is not None
            seen.append((self.tma.place.names["ROUND"], addresses[0]))
            return int, 0, ctypes.c_char_p()

        def packed_behind_maps(self, addresses: Any, counter: Any) -> Any:
            return None

    def counted(x: torch.Tensor) -> torch.Tensor:
        copies[0] += 1
        return copied(x)

    x = torch.zeros(256, dtype=BF16)[offset : 128 + offset].view(4, 2, 16)
    declared = {"q": Tensor("q", "bf16[M, H, 16]", "mh")}
    place = Place({"ROUNDS": 3}, {}, declared, ("q",), (), pretended(), torch.device("cpu"))
    kernels = hopper_call.TmaKernels(
        kernels=(),
        addresses="q",
        strides="q:mh",
        numbers="ROUND",
        rounds="ROUNDS",
        maps={"q": "2"},
        counts=False,
    )
    call: Any = object.__new__(hopper_call.HopperAttention)
    call.launch_type, call.program, call.chunk, call.counter, call.copied = Noting, None, 8, None, counted
    launches = call.made_ready((kernels,), place.with_memories({"q": memory_of(x)}))
    for launch in launches:
        launch.run([x])
    assert [number for number, _ in seen] == [0, 1, 2]
    assert len({address for _, address in seen}) == 1
    assert (seen[0][1] == x.data_ptr(), copies[0]) == (offset == 0, offset)


def test_a_counter_that_stays_is_made_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Inductor runs a call before it captures it, memory is the graph's."""
    capturing, current, made_in = [False], [7], list[object]()
    own_zeros = torch.zeros

    def zeros(*size: int, **options: object) -> torch.Tensor:
        made_in.append(threading.current_thread() is threading.main_thread())
        return own_zeros(2)

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=int))
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: capturing[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[0], raising=False)
    monkeypatch.setattr(hopper_call, "_COUNTERS", {})
    first = hopper_call.counter_of(0)
    assert hopper_call.counter_of(0) is first
    current[0] = 9
    assert hopper_call.counter_of(0) is not first
    assert made_in == [False, False]
    capturing[0] = True  # a graph has its own, in its pool
    assert hopper_call.counter_of(0) is not hopper_call.counter_of(0)
    assert made_in == [False, False, True, True]


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
def test_rows_of_copies_begin_at_multiples_of_16_bytes(dtype: torch.dtype) -> None:
    """With the least room between them; rows without elements too."""
    chunk = 16 // dtype.itemsize
    for columns in range(2 * chunk + 2):
        memory = padded((3, 5, columns), dtype)
        room = next(size for size in range(chunk, 4 * chunk, chunk) if size >= columns)
        assert (memory.shape, memory.strides, memory.dtype) == ((3, 5, columns), (5 * room, room, 1), dtype)
