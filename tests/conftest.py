"""Hypothesis profiles, thread limits and what runs by day, for every test.

Profiles (choose with `--hypothesis-profile NAME` or `HYPOTHESIS_PROFILE=NAME`):

pr       the default: the same examples on every run, so that a red run is red for everybody
nightly  many fresh examples, and the tests marked `nightly`; failures are kept in `.hypothesis/`
repro    replays the failures kept there, printing every example
"""

import gc
import os
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.internal.conjecture import providers

from tests.by_day import is_listed, part_by_day
from tests.golden_files import golden, pytest_addoption
from tests.profiles import is_night

__all__ = [
    "golden",
    "pytest_addoption",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_configure_node",
    "pytest_generate_tests",
    "pytest_report_header",
    "pytest_sessionstart",
]

# Most of what imports and collection make lives to the end: the collector would walk over it again and again.
gc.disable()
# One thread per worker: two xdist workers that each use every core only slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Most simulated kernels run a few small cases: g++ without optimising takes less time than it loses.
os.environ.setdefault("ATTNC_SIMT_FLAGS", "-O0")

_SLOW = (HealthCheck.too_slow,)

settings.register_profile(
    "pr",
    max_examples=20,
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=_SLOW,
)
settings.register_profile(
    "nightly",
    derandomize=False,
    deadline=None,
    max_examples=2000,
    print_blob=True,
    suppress_health_check=_SLOW,
)
settings.register_profile(
    "repro",
    derandomize=False,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse),
    print_blob=True,
    suppress_health_check=_SLOW,
    verbosity=Verbosity.verbose,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "pr"))
if not is_night():
    # Hypothesis draws numbers that stand in the text of the modules that a process has loaded, kernels among
    # them: examples would depend on the tests before, and each text is parsed. No setting of Hypothesis turns
    # that off, hence the private function. The night draws them too.
    _local = vars(providers)
    assert {"_get_local_constants", "_local_constants"} <= _local.keys(), (
        "Hypothesis calls them otherwise now"
    )
    _local["_get_local_constants"] = lambda: _local["_local_constants"]


#: Text to plan to text, and what is printed: all tests here that are not slow are quick.
_QUICK = (
    "syntax",
    "model",
    "expr",
    "plan",
    "tuned",
    "explain",
    "target",
    "test_diagnostics.py",
    "test_source.py",
    "test_build.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests of the night by day, but for files that are named, and marks quick ones. Slow ones
    stay beside others of their file, which plan and load the same kernels.
    """
    if named := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"workers disagree about an address in the name of a case: {named[0]}")
    for item in items:
        if _is_quick(item.path) and item.get_closest_marker("slow") is None:
            item.add_marker("quick")
        if is_listed(item.nodeid) and not _is_named(config, item.path):
            item.add_marker("nightly")
    if not is_night():
        nightly = {item for item in items if item.get_closest_marker("nightly") is not None}
        config.hook.pytest_deselected(items=[*nightly])
        items[:] = [item for item in items if item not in nightly]


@cache
def _is_quick(path: Path) -> bool:
    return path.relative_to(Path(__file__).parent).parts[0] in _QUICK


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Parts the cases of a test by day and by night, once all that makes cases has run."""
    yield
    part_by_day(metafunc, is_night=is_night(), is_named=_is_named(metafunc.config, metafunc.definition.path))


def _is_named(config: pytest.Config, path: Path) -> bool:
    """Whether a test file, or a test of it, is named on the command line; cases of a mark are its share."""
    return not config.option.markexpr and path in _named_files(
        tuple(config.args), config.invocation_params.dir
    )


@cache
def _named_files(arguments: tuple[str, ...], folder: Path) -> frozenset[Path]:
    named = (folder / argument.partition("::")[0] for argument in arguments)
    return frozenset(path.resolve() for path in named if path.suffix == ".py")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a worker whether all of them are to compile what they import: none has imported anything yet."""
    node.workerinput["attnc_is_fresh"] = _is_fresh()


@cache
def _is_fresh() -> bool:
    """Whether PyTorch, or a test of every longer run, is not compiled where Python will look for it."""
    torch = find_spec("torch")
    if sys.dont_write_bytecode or sys.pycache_prefix or torch is None or torch.origin is None:
        return False
    for path in (Path(torch.origin), Path(__file__).parent / "kernels" / "test_one_of_each.py"):
        folder = path.parent / "__pycache__"
        is_kept = os.access(folder if folder.exists() else path.parent, os.W_OK)
        if is_kept and not any(folder.glob(f"{path.stem}.*.pyc")):
            return True
    return False


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Lets a worker report only what is read (`is_read`), and not that a test begins: reports take two
    thirds of the time of an empty test.
    """
    for plugin in config.pluginmanager.get_plugins():
        interactor: Any = type(plugin)
        if interactor.__name__ == "WorkerInteractor":  # of xdist, in a module that cannot be imported

            class Terse(interactor):  # type: ignore[misc]  # likewise
                pytest_runtest_logstart = None

                @pytest.hookimpl
                def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
                    if is_read(report):
                        super().pytest_runtest_logreport(report)

            config.pluginmanager.unregister(plugin)
            plugin.__class__ = Terse
            config.pluginmanager.register(plugin)


def is_read(report: pytest.TestReport) -> bool:
    """Returns whether a report changes what pytest prints. Those of setting up and tearing down do where
    these fail, skip, print, or take long enough for `--durations`.
    """
    is_silent = report.passed and not report.sections and report.duration < 0.005
    return report.when == "call" or not is_silent


def pytest_sessionstart(session: pytest.Session) -> None:
    """Lets the first worker of a fresh clone compile alone what all workers import, if there are only two
    cores: side by side, both would compile the same modules, while `mypy` waits.
    """
    of_worker = _of_worker(session.config)
    if of_worker.get("attnc_is_fresh") and of_worker["workerid"] != "gw0" and _count_cores() <= 2:
        deadline = time.monotonic() + 90
        while not _collected(session.config).exists() and time.monotonic() < deadline:
            time.sleep(0.1)


def _of_worker(config: pytest.Config) -> Mapping[str, Any]:
    """What xdist tells a worker; empty in other processes, those that a test of a worker starts included."""
    told: Mapping[str, Any] = getattr(config, "workerinput", {})
    return told


def _count_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _collected(config: pytest.Config) -> Path:
    """The file by which a worker says that it has imported all tests."""
    factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]  # has no public name
    return factory.getbasetemp().parent / "collected"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Takes what modules and tests are made of, which lives to the end, out of the garbage collector's sight:
    plans and texts are large, and each full collection walks over all of it.
    """
    if _of_worker(session.config).get("workerid") == "gw0":
        _collected(session.config).touch()
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_report_header(config: pytest.Config) -> str:
    """Says what is left out."""
    return "tests/gpu: runs alone, on a machine with a GPU ('pytest tests/gpu')"
