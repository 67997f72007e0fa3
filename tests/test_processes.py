"""What a test is told of processes that are forked for it."""

import os
from multiprocessing import Pipe, get_context
from pathlib import Path

import pytest

from tests import processes


def test_a_module_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = Pipe()
    server = get_context("fork").Process(target=processes._serve, args=(there, ["no_such_module"], {}))
    server.start()
    monkeypatch.setattr(processes, "_server", lambda modules: here)
    try:
        for _ in range(2):
            with pytest.raises(ImportError, match=r"Traceback[^$]*No module named 'no_such_module'"):
                processes.run_program("", has_attnc=True)
    finally:
        server.kill()
        server.join()


def test_programs_elsewhere_search_where_this_process_was_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", "dependencies")
    assert processes.searched(Path("of_test")).split(os.pathsep) == [root, "of_test", "dependencies"]
    monkeypatch.delenv("PYTHONPATH")
    assert processes.searched() == root
