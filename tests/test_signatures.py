"""Names and defaults of the public interface, as a person has read them: `pytest --update-golden` writes them
anew. What stands in for another library has its defaults too.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.nn.attention.flex_attention import flex_attention as torch_flex

from attnc.flex import flex_attention

GOLDEN = Path(__file__).parent / "golden" / "signatures"
MODULES = (
    "attnc",
    "attnc.adapters.flash_mla",
    "attnc.adapters.flashinfer",
    "attnc.adapters.latent_rows",
    "attnc.adapters.transformers",
    "attnc.adapters.vllm",
    "attnc.compat.flash_attn",
    "attnc.compat.sdpa",
    "attnc.distributed",
    "attnc.flex",
    "attnc.paging",
)


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Functions and classes of a module: those that it lists, or else its own without an underscore."""
    listed = getattr(module, "__all__", None)
    for name in sorted(listed or vars(module)):
        value = getattr(module, name)
        is_called = inspect.isclass(value) or inspect.isfunction(value)
        if not is_called or (listed is None and name.startswith("_")):
            continue
        if listed is not None or getattr(value, "__module__", "") == module.__name__:
            yield name, value


def lines_of(name: str, value: Any) -> Iterator[str]:
    """A function, or a class with its methods: a line for each, without types."""
    if not inspect.isclass(value):
        yield f"{name}{plain(value)}"
        return
    if issubclass(value, BaseException | tuple):
        return
    yield f"{name}{plain(value)}"
    for member, found in sorted(vars(value).items()):
        if not member.startswith("_") and inspect.isfunction(found):
            yield f"{name}.{member}{plain(found)}"


def plain(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


@pytest.mark.parametrize("name", MODULES)
def test_names_and_defaults_of_a_module(name: str, golden: Callable[[Path, str], None]) -> None:
    module = importlib.import_module(name)
    text = "".join(f"{line}\n" for each in public(module) for line in lines_of(*each))
    golden(GOLDEN / f"{name}.txt", text)


def test_flex_attention_has_the_defaults_of_torch() -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (flex_attention, torch_flex))
    assert [*ours][: len(theirs)] == [*theirs]
    for name, parameter in theirs.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind), name
