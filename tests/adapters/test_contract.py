"""The reader of engines' signatures: what it finds in a wheel, and says of a class that does not fit."""

from __future__ import annotations

import zipfile
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import contract

BACKEND = """
class Backend(ABC):
    kind: str = "plain"
    size: int

    def __init__(self, heads, scale=1.0, *, window=None):
        self.heads = heads

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    def forward(self, q, k=None, **kwargs): ...

def register(name, path=None): ...
CHOICES = ["a"]
"""


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tiny-1.5-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as files:
        files.writestr("tiny/backend.py", BACKEND)
    wanted = {"tiny": {"tiny.backend": {"Backend": None, "register": None, "CHOICES": None}}}
    monkeypatch.setattr(contract, "WANTED", wanted)
    return path


def test_a_wheel_is_read_as_data(wheel: Path) -> None:
    read = contract.read_wheel("tiny", wheel)
    assert read["version"] == "1.5"
    names = read["modules"]["tiny.backend"]
    assert names["register"] == {"parameters": [["name", "", None], ["path", "", "None"]]}
    assert names["CHOICES"] == {"value": "['a']"}
    members = names["Backend"]["members"]
    assert members["kind"] == {"value": "'plain'"}
    assert members["get_name"] == {"parameters": [], "staticmethod": True, "abstractmethod": True}
    assert members["forward"]["parameters"][2:] == [["k", "", "None"], ["kwargs", "kwargs", None]]
    assert members["__init__"]["parameters"][-1] == ["window", "*", "None"]
    assert "heads" not in members


def test_what_is_gone_is_named(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "WANTED", {"tiny": {"tiny.backend": {"Backend": ("forward", "backward")}}})
    with pytest.raises(KeyError, match="Backend has no backward"):
        contract.read_wheel("tiny", wheel)


def test_differences_are_named(wheel: Path) -> None:
    old, new = contract.read_wheel("tiny", wheel), contract.read_wheel("tiny", wheel)
    assert contract.differences(old, new) == []
    new["modules"]["tiny.backend"]["register"]["parameters"][1][2] = "''"
    del new["modules"]["tiny.backend"]["Backend"]["members"]["forward"]
    first, second = contract.differences(old, new)
    assert first.startswith("modules.tiny.backend.Backend.members.forward: was {")
    assert second.startswith("modules.tiny.backend.register.parameters: was [")


class Fits:
    kind = "other"

    def __init__(self, heads: int, scale: float = 1.0, *, window: Any = None, more: int = 1) -> None: ...

    @staticmethod
    def get_name() -> str:
        return "fits"

    def forward(self, q: Any, k: Any = None, **kwargs: Any) -> None: ...


class Kind(Enum):
    LEFT = "left"


class Unfit:
    color = "red"

    def __init__(self, scale: float, heads: int) -> None: ...

    def forward(self, q: Any, rows: Any) -> None: ...


def test_a_class_that_fits_has_no_mismatch(wheel: Path) -> None:
    theirs = contract.read_wheel("tiny", wheel)["modules"]["tiny.backend"]["Backend"]
    assert contract.mismatches(Fits, theirs, "Backend") == []


def test_mismatches_are_named(wheel: Path) -> None:
    theirs = contract.read_wheel("tiny", wheel)["modules"]["tiny.backend"]["Backend"]
    assert contract.mismatches(Unfit, theirs, "Backend") == [
        "Unfit.get_name: Backend wants it",
        "Unfit.color: Backend has none",
        "Unfit.__init__: heads is at 2, not at 1",
        "Unfit.__init__: scale is at 1, not at 2",
        "Unfit.__init__: takes no window",
        "Unfit.forward: takes no k",
        "Unfit.forward: wants rows, which is not given",
    ]


def test_other_defaults_are_named(wheel: Path) -> None:
    theirs = contract.read_wheel("tiny", wheel)["modules"]["tiny.backend"]["Backend"]["members"]["__init__"]

    def ours(self: Any, heads: int, scale: float = 2.0, *, window: Any = Kind.LEFT) -> None: ...

    assert list(contract.unfit(ours, theirs["parameters"])) == [
        "scale is 2.0 where it is left out, theirs is 1.0",
        "window is Kind.LEFT where it is left out, theirs is None",
    ]


def test_stubs_behave_as_far_as_they_are_known(wheel: Path) -> None:
    made = contract.stubs(contract.read_wheel("tiny", wheel))["tiny.backend"]
    Backend: Any = made.Backend

    class Ours(Backend):  # type: ignore[misc]  # a class made of data
        @staticmethod
        def get_name() -> str:
            return "ours"

    with pytest.raises(TypeError, match="abstract"):
        Backend(3)
    ours: Any = Ours(3, window=4)
    assert (ours.heads, ours.scale, ours.window, ours.kind) == (3, 1.0, 4, "plain")
    with pytest.raises(TypeError, match="has no color"):
        Ours(3, color="red")
    with pytest.raises(RuntimeError, match=r"Backend\.forward is a stub"):
        ours.forward(1)


@pytest.mark.parametrize("engine", contract.WANTED)
def test_what_is_kept_is_what_is_wanted(engine: str) -> None:
    kept = contract.snapshot(engine)["modules"]
    assert {module: [*names] for module, names in kept.items()} == {
        module: [*names] for module, names in contract.WANTED[engine].items()
    }
    for module, names in contract.WANTED[engine].items():
        for name, members in names.items():
            assert members is None or {*members} <= kept[module][name].get("members", {}).keys()
