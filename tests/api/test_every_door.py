"""Every way to a spec's kernels, over every committed spec: what `attnc.compile` computes, bit for bit, or a
mistake that is named. Some by day, all by night; the commands are in `tests/cli/test_every_spec.py`.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import attnc
from attnc.build import front, plan_program
from attnc.cli import main
from attnc.diagnostics import DiagnosticError
from attnc.distributed import ContextParallel
from attnc.runtime.trial import problem_for
from attnc.verify.interpreter import ensure_interpreter
from tests.by_day import some_by_day
from tests.distributed.threads import Thread, on_ranks

ensure_interpreter()

SPECS = Path(__file__).parents[2] / "specs"
#: Of the inputs; all lengths are LENGTH.
SIZES, LENGTH = {"B": 2, "H": 4, "Hkv": 2, "G": 2}, 24
_NUMBERS = count()


@dataclass(frozen=True, slots=True)
class Asked:
    """A spec's first attention: its file, the family that `attnc.compile` made of it, a call's inputs, those
    that want gradients, and where a door may write.
    """

    spec: Path
    family: Any
    inputs: Sequence[torch.Tensor]
    learned: Sequence[torch.Tensor]
    folder: Path

    def call(self, function: Callable[..., Any]) -> list[torch.Tensor]:
        """Returns outputs, and gradients of their sum where there are any."""
        outputs = _listed(function(*self.inputs))
        if not self.learned:
            return outputs
        total = torch.stack([o.float().square().sum() for o in outputs if o.requires_grad]).sum()
        return [*(o.detach() for o in outputs), *torch.autograd.grad(total, self.learned)]


def _listed(given: Any) -> list[torch.Tensor]:
    return list(given) if isinstance(given, tuple) else [given]


def ask(spec: Path, folder: Path) -> Asked:
    program = front(spec)
    name = program.attentions[0].name
    family = attnc.compile(spec, attention=name, target="triton", cache=folder / "cache")
    modules = plan_program(program).modules
    module = next(m for m in modules if m.variant.attention.name == name and m.target == "triton")
    torch.manual_seed(0)
    inputs = problem_for(module, LENGTH, device="cpu", tokens=2 * LENGTH, sizes=SIZES)
    grads = module.variant.attention.grads
    named = zip((arg.tensor.name for arg in module.args), inputs, strict=True)
    learned = [x.requires_grad_() for given, x in named if given in grads]
    return Asked(spec, family, inputs, learned, folder)


def module_of(asked: Asked, *options: str) -> Callable[..., Any]:
    """The function of the package that `attnc compile` writes, imported under a name of its own."""
    package = f"doors_{next(_NUMBERS)}"
    out = asked.folder / package
    assert main(["compile", *options, "--out", str(out), str(asked.spec)]) == 0
    sys.path.insert(0, str(asked.folder))
    importlib.invalidate_caches()
    try:
        made = importlib.import_module(f"{package}.{asked.family.name}.triton")
    finally:
        sys.path.remove(str(asked.folder))
    function: Callable[..., Any] = getattr(made, asked.family.name)
    return function


def imported(asked: Asked) -> list[torch.Tensor]:
    return asked.call(module_of(asked))


def standalone(asked: Asked) -> list[torch.Tensor]:
    return asked.call(module_of(asked, "--standalone"))


def text_of_it(asked: Asked) -> list[torch.Tensor]:
    text = asked.spec.read_text(encoding="utf-8")
    return asked.call(attnc.compile(text, attention=asked.family.name, target="triton", cache=False))


def pickled(asked: Asked) -> list[torch.Tensor]:
    return asked.call(pickle.loads(pickle.dumps(asked.family)))


def one_graph(asked: Asked) -> list[torch.Tensor]:
    """One operator of torch in a graph, forward and backward."""
    torch.compiler.reset()
    return asked.call(torch.compile(asked.family, fullgraph=True, backend="aot_eager"))


def exported(asked: Asked) -> list[torch.Tensor]:
    class Layer(torch.nn.Module):
        def forward(self, *inputs: torch.Tensor) -> Any:
            return asked.family(*inputs)

    with torch.no_grad():
        program = torch.export.export(Layer(), tuple(asked.inputs))
        return _listed(program.module()(*asked.inputs))


def ranks(asked: Asked) -> list[torch.Tensor]:
    """Two ranks that share the rows, put together."""

    def work(group: Thread) -> list[torch.Tensor]:
        cp = ContextParallel(asked.family, group)
        names = [arg for arg in cp.spec.variants[0].attention.inputs if not arg.storage.is_part]
        given = {t.name: x for t, x in zip(names, asked.inputs, strict=True)}
        q, k = given.pop("q"), given.pop("k")
        with torch.no_grad():
            shards = cp.shard(q, k, given.pop("v", None), **given)
            return [cp.unshard(x) for x in _listed(cp(*shards))[:1]]

    return on_ranks(2, work)[0]


@dataclass(frozen=True, slots=True)
class Door:
    """open: what it computes; gradients: whether that includes them; refuses: what is said where a spec
    cannot go through it.
    """

    open: Callable[[Asked], list[torch.Tensor]]
    gradients: bool = True
    refuses: tuple[str, ...] = ()


DOORS: Mapping[str, Door] = {
    "module": Door(imported),
    "standalone": Door(standalone),
    "text": Door(text_of_it),
    "pickle": Door(pickled),
    "torch.compile": Door(one_graph),
    "torch.export": Door(exported, gradients=False),
    "ranks": Door(ranks, gradients=False, refuses=("shared out over ranks",)),
}
#: The committed specs that have an attention, and kernels that the interpreter runs.
ATTENTIONS = sorted(
    path.stem
    for path in SPECS.glob("*.attn")
    if {"attention", "triton"} <= set(path.read_text(encoding="utf-8").split())
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("door", "name"), some_by_day(DOORS, ATTENTIONS, of=30))
def test_every_door_leads_to_the_same_numbers(door: str, name: str, tmp_path: Path) -> None:
    asked, tried = ask(SPECS / f"{name}.attn", tmp_path), DOORS[door]
    expected = asked.call(asked.family)
    try:
        found = tried.open(asked)
    except DiagnosticError as refused:
        if any(said in str(refused) for said in tried.refuses):
            return
        raise
    assert len(found) == len(expected) or not tried.gradients
    for mine, theirs in zip(found, expected, strict=False):
        torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=0, equal_nan=True)
