"""Modules in the place of those that an engine imports and a test of attention never asks.

They import, and their classes can be derived from and called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

#: What vLLM imports and its attention does not ask.
VLLM = (
    "PIL", "gguf", "llguidance", "openai", "openai_harmony", "orjson", "sentencepiece", "tvm_ffi", "uvloop",
    "vllm.vllm_flash_attn", "xgrammar",
)  # fmt: skip


class _Anything(type):
    """A class of which every attribute is another."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return anything(name)

    def __iter__(cls) -> Any:
        return iter(())

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def anything(name: str) -> Any:
    """Returns a class that takes any arguments; called with one function, as a decorator, it returns that."""

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return object.__new__(cls)

    body: dict[str, Any] = {
        "__new__": __new__,
        "__init__": lambda self, *args, **kwargs: None,
        "__call__": lambda self, *args, **kwargs: args[0] if len(args) == 1 and callable(args[0]) else None,
        "__getattr__": lambda self, name: anything(name),
        "__class_getitem__": classmethod(lambda cls, item: cls),
        "__init_subclass__": classmethod(lambda cls, **keywords: None),
        "__get_pydantic_core_schema__": classmethod(lambda cls, source, handler: {"type": "any"}),
    }
    return _Anything(name, (), body)


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return anything(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(f"{fullname}.".startswith(f"{name}.") for name in self.names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        made = _Module(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: ModuleType) -> None:
        """A stand-in has nothing to run."""


def stand_in(names: Iterable[str]) -> list[str]:
    """Makes modules of these names importable where they are not, and returns which. One inside a package has
    a stand-in in any case: whether it can be imported is known only by importing it.
    """
    missing = [name for name in names if "." in name or importlib.util.find_spec(name) is None]
    sys.meta_path.insert(0, _Finder(missing))
    return missing


def register_models(*names: str) -> None:
    """Tells vLLM of its own classes of models, each `module.Class`: it would look at one in a process of its
    own, which has no stand-ins.
    """
    registry: Any = importlib.import_module("vllm").ModelRegistry
    for name in names:
        module, _, made = name.rpartition(".")
        found = importlib.import_module(f"vllm.model_executor.models.{module}")
        registry.register_model(made, getattr(found, made))
