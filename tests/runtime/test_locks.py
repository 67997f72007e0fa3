"""Every lock of attnc is free in a process that is forked while another thread holds it."""

import ast
import re
import signal
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from typing import Any

from attnc.verify.interpreter import ensure_interpreter
from tests.processes import forked

ROOT = Path(__file__).parents[2]
#: Locks of objects, not of modules, and the function whose closure holds the object.
OF_OBJECTS = {"attnc.verify.interpreter": "self.launching"}


def locks() -> Iterator[tuple[str, str]]:
    """Yields the module and the target of every assignment that makes a lock."""
    for path in sorted((ROOT / "attnc").glob("**/*.py")):
        text = path.read_text(encoding="utf-8")
        if not re.search(r"\b(Lock|RLock|Condition|Semaphore|BoundedSemaphore)\(", text):
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
                made = ast.unparse(node.value.func).rpartition(".")[2]
                if made in ("Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore"):
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    yield module, ast.unparse(target)


def test_every_lock_is_free_in_a_fork() -> None:
    ensure_interpreter()
    found = {where for where in locks() if where != ("attnc.runtime.locks", "names[name]")}
    assert len(found) == 5
    for module, name in sorted(found):
        owner = _patch() if OF_OBJECTS.get(module) == name else import_module(module)
        _hold_and_fork(owner, name.removeprefix("self."))


def _patch() -> Any:
    """The object that holds the lock of launches."""
    from triton.runtime import interpreter

    return interpreter._patch_lang.__self__


def _hold_and_fork(owner: Any, name: str) -> None:
    held, done = Event(), Event()

    def hold() -> None:
        with getattr(owner, name):
            held.set()
            done.wait()

    def take(number: int) -> None:
        signal.alarm(20)  # which ends a child that waits for nobody
        with getattr(owner, name):
            pass

    thread = Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert forked(1, take) == [0], (owner, name)
    finally:
        done.set()
        thread.join()


def test_a_fork_in_the_middle_of_a_launch_leaves_triton_as_it_was() -> None:
    ensure_interpreter()
    patch = _patch()

    class Scope:
        restored = False

        def restore(self) -> None:
            self.restored = True

    scope = Scope()

    def look(number: int) -> None:
        assert scope.restored
        assert not patch.scopes

    patch.scopes.append(scope)
    try:
        assert forked(1, look) == [0]
    finally:
        patch.scopes.remove(scope)
    assert not scope.restored
