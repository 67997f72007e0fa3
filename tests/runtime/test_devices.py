"""Kernels of the runtime run on the device of their tensors, whichever is the current one."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attnc.verify.interpreter import ensure_interpreter

ensure_interpreter()

from attnc.runtime import merge, packed_rows, slots, units, units_kernel  # noqa: E402  # Triton's interpreter

PACKAGE = Path(merge.__file__).parent.parent


class Devices:
    """The current device, and those on which kernels were launched."""

    def __init__(self) -> None:
        self.current: Any = torch.device("cuda:0")
        self.launched: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given, **named: self.launched.append(self.current)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    """Stands for the current device of a machine with two GPUs, and for every kernel."""
    devices = Devices()

    class Guard:
        def __init__(self, device: Any) -> None:
            self.device = device

        def __enter__(self) -> None:
            self.before, devices.current = devices.current, self.device

        def __exit__(self, *failure: object) -> None:
            devices.current = self.before

    monkeypatch.setattr(torch.cuda, "device", Guard)
    for module, kernel in (
        (merge, "_join"),
        (packed_rows, "_unpack"),
        (slots, "_store"),
        (units_kernel, "_collect"),
    ):
        monkeypatch.setattr(module, kernel, devices)
    return devices


def call_merge(device: str) -> None:
    merge.join_ranks(torch.zeros(2, 3, 5, device=device), 4, torch.float16)


def call_packed_rows(device: str) -> None:
    cache = torch.zeros(2, 4, 1, 656, dtype=torch.uint8, device=device)
    listed = torch.zeros(1, 1, 3, dtype=torch.int32, device=device)
    made = torch.zeros(1, 3, 576, dtype=torch.bfloat16, device=device)
    packed_rows.unpack_listed(cache, (512, 128, 64, 656, 0, False), listed, made)


def call_slots(device: str) -> None:
    rows, pages = torch.zeros(3, 2, 8, device=device), torch.zeros(4, 2, 2, 8, device=device)
    slots.store(rows, rows, pages, pages, torch.zeros(3, dtype=torch.int32, device=device))


def call_units(device: str) -> None:
    at = torch.zeros(1, 3, dtype=torch.int64, device=device)
    recipe = units.Recipe(4, at, None, 4)
    units.collect(torch.zeros(12, device=device), recipe, torch.zeros(12, device=device))


@pytest.mark.parametrize("call", [call_merge, call_packed_rows, call_slots, call_units])
def test_a_launch_is_on_the_device_of_its_tensors(call: Callable[[str], None], devices: Devices) -> None:
    with FakeTensorMode():
        call("cuda:1")
    assert devices.launched == [torch.device("cuda:1")]
    assert devices.current == torch.device("cuda:0")


def launches(tree: ast.Module) -> Iterator[tuple[int, bool]]:
    """Yields, for each `kernel[grid](...)` of a module's kernels, its line and whether it stands below `with
    on_device_of(...)`.
    """
    kernels = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }

    def walk(node: ast.AST, guarded: bool) -> Iterator[tuple[int, bool]]:
        for child in ast.iter_child_nodes(node):
            inside = guarded
            if isinstance(child, ast.With):
                inside |= any("on_device_of(" in ast.unparse(item.context_expr) for item in child.items)
            called = child.func if isinstance(child, ast.Call) else None
            if isinstance(called, ast.Subscript) and ast.unparse(called.value) in kernels:
                yield called.lineno, inside
            yield from walk(child, inside)

    yield from walk(tree, False)


def test_every_launch_is() -> None:
    found = {
        (path.name, line): inside
        for path in PACKAGE.rglob("*.py")
        if "triton.jit" in (text := path.read_text(encoding="utf-8"))
        for line, inside in launches(ast.parse(text))
    }
    assert len(found) >= 4
    assert [place for place, inside in found.items() if not inside] == []
