"""What a test is told of processes that are forked for it."""

from multiprocessing import Pipe, get_context

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
