"""How the modules of a family of targets run on a machine, with or without a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import ModuleType
from typing import ClassVar

import torch

from attnc.plan.targets import target_of
from attnc.verify import simt
from attnc.verify.interpreter import ensure_interpreter, is_interpreting
from attnc.verify.sanitize import TOOLS


class Runner(ABC):
    """without_gpu: where modules run then, for a reader; warps_matter: configs that differ in warps or stages
    alone are different programs there too; sanitizers: the tools of compute-sanitizer that understand their
    kernels.

    stages: the field of a generated config that has the stages of a pipeline; takes_tiles: programs of a
    module for prompts take one tile after the other, whatever its schedule says; runs_beside_gpu: modules run
    without a GPU in a process that runs others on one.
    """

    without_gpu: ClassVar[str]
    warps_matter: ClassVar[bool]
    sanitizers: ClassVar[tuple[str, ...]]
    stages: ClassVar[str]
    takes_tiles: ClassVar[bool] = False
    runs_beside_gpu: ClassVar[bool] = False

    def device(self, target: str) -> str:
        """Says where modules for the target run in this process: "cuda" or "cpu"."""
        if not torch.cuda.is_available():
            return "cpu"
        major, minor = torch.cuda.get_device_capability()
        return "cuda" if target_of(target).runs_on(10 * major + minor) else "cpu"

    @abstractmethod
    def is_available(self) -> bool:
        """Returns whether modules can run without a GPU."""

    @abstractmethod
    def prepare(self) -> None:
        """Does what has to be done before a module is imported to run on the CPU."""

    @abstractmethod
    def attach(self, module: ModuleType) -> None:
        """Does what has to be done to an imported module for that."""


class Interpreted(Runner):
    without_gpu = "Triton's interpreter"
    warps_matter = False
    sanitizers = ()
    stages = "num_stages"

    def device(self, target: str) -> str:
        return "cpu" if is_interpreting() else super().device(target)

    def is_available(self) -> bool:
        return True

    def prepare(self) -> None:
        ensure_interpreter()

    def attach(self, module: ModuleType) -> None:
        """Does nothing: the interpreter takes modules as they are."""


class ThreadByThread(Runner):
    """CUDA C++ that g++ compiles, on `simt.h`."""

    without_gpu = "the CPU, thread by thread"
    warps_matter = True
    sanitizers = TOOLS
    stages = "STAGES"
    runs_beside_gpu = True

    def is_available(self) -> bool:
        return simt.available()

    def prepare(self) -> None:
        """Does nothing: no library is needed."""

    def attach(self, module: ModuleType) -> None:
        simt.attach(module)


class ThreadByThreadHopper(ThreadByThread):
    """CUDA C++ with bulk copies and wgmma.

    Two tools do not follow them: initcheck does not see that a bulk copy writes a tensor, and racecheck not
    that what a bulk copy writes is read behind its mbarrier. The simulator's vector clocks do."""

    sanitizers = ("memcheck", "synccheck")
    takes_tiles = True


#: By the family of a target (`plan.target.Target.family`).
_RUNNERS: Mapping[str, Runner] = {
    "triton": Interpreted(),
    "sm80": ThreadByThread(),
    "sm90": ThreadByThreadHopper(),
}


def runner_of(target: str) -> Runner:
    """Returns how modules for a target of this name run."""
    return _RUNNERS[target_of(target).family]
