"""Where a CUDA module has its machine code from: beside itself, the user's cache, or the compiler."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from attnc.runtime.loader import load_file, program_of
from attnc.support.cache import read_sealed, seal_bytes

GENERATED = Path(__file__).parents[2] / "generated" / "fa2_split_q" / "cuda_sm_80"
FORWARD = "fa2_split_q_forward"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "user" / "cache"
    monkeypatch.setenv("ATTNC_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels of a copy of a module in a folder of its own, with a compiler that counts."""
    for original in GENERATED.glob("d64*"):
        (tmp_path / original.name).write_text(original.read_text(encoding="utf-8"), encoding="utf-8")
    found: Any = program_of(load_file(tmp_path / "d64.py"))
    found.compiled = []

    def compiler(name: str, options: tuple[str, ...]) -> bytes:
        found.compiled.append((name, *options))
        return b"code"

    monkeypatch.setattr(found, "compile", compiler)
    return found


def test_what_was_shipped_needs_neither_a_compiler_nor_a_cache(program: Any, cache: Path) -> None:
    config = program.kernels[FORWARD].configs[0]
    shipped = program.module.with_name("cubin") / program.cubin_name(FORWARD, config, True, "sm_90")
    shipped.parent.mkdir()
    shipped.write_bytes(seal_bytes(shipped.name, b"shipped"))
    assert program.cubin(FORWARD, config, True, "sm_90") == shipped
    assert not program.compiled
    assert not cache.exists()


@pytest.mark.parametrize("damage", ["unsealed", "renamed", "open file", "open folder", "foreign", "a folder"])
def test_what_was_shipped_and_is_not_what_it_was_is_compiled(damage: str, program: Any, cache: Path) -> None:
    """It is, too, where somebody may have written it who could not have written the module."""
    config = program.kernels[FORWARD].configs[0]
    shipped = program.module.with_name("cubin") / program.cubin_name(FORWARD, config, True, "sm_90")
    shipped.parent.mkdir()
    shipped.write_bytes(seal_bytes(shipped.name, b"shipped"))
    match damage:
        case "unsealed":
            shipped.write_bytes(b"shipped")
        case "renamed":
            shipped.write_bytes(seal_bytes("another.cubin", b"shipped"))
        case "open file":
            shipped.chmod(0o666)
        case "open folder":
            shipped.parent.chmod(0o777)
        case "foreign":
            if os.geteuid():
                pytest.skip("only root gives files away")
            os.chown(shipped, 12345, -1)
        case _:
            shipped.unlink()
            shipped.mkdir()
    found = program.cubin(FORWARD, config, True, "sm_90")
    assert (found.parent, read_sealed(found)) == (cache, b"code")


def test_what_is_as_open_as_the_module_is_taken(program: Any, cache: Path) -> None:
    """On disks of Windows, say, everybody may write to everything."""
    config = program.kernels[FORWARD].configs[0]
    shipped = program.module.with_name("cubin") / program.cubin_name(FORWARD, config, True, "sm_90")
    shipped.parent.mkdir()
    shipped.write_bytes(seal_bytes(shipped.name, b"shipped"))
    for path in (program.module, shipped, shipped.parent):
        path.chmod(0o777)
    assert program.cubin(FORWARD, config, True, "sm_90") == shipped


def test_what_was_not_is_compiled_once_and_kept_in_a_private_folder(program: Any, cache: Path) -> None:
    config = program.kernels[FORWARD].configs[0]
    paths = {program.cubin(FORWARD, config, True, "sm_90") for _ in range(2)}
    assert [read_sealed(path) for path in paths] == [b"code"]
    assert list(cache.iterdir()) == list(paths)  # no half of a file beside it
    assert len(program.compiled) == 1
    assert cache.stat().st_mode & 0o777 == 0o700


def test_every_difference_of_the_code_is_one_of_the_name(program: Any, cache: Path) -> None:
    config = program.kernels[FORWARD].configs[0]
    wanted = [(config, True, "sm_90"), (config, False, "sm_90"), (config, True, "sm_80")]
    wanted.append((config._replace(STAGES=config.STAGES + 1), True, "sm_90"))
    before = {program.cubin_name(FORWARD, *one) for one in wanted}
    source = program.module.with_name("d64.cu")
    source.write_text(source.read_text(encoding="utf-8") + "// changed\n", encoding="utf-8")
    program.forget()
    assert len(before | {program.cubin_name(FORWARD, *one) for one in wanted}) == 2 * len(wanted)


def test_a_folder_that_others_can_write_to_is_refused(program: Any, cache: Path) -> None:
    cache.mkdir(parents=True)
    for mode in (0o720, 0o702):
        cache.chmod(mode)
        with pytest.raises(PermissionError, match="others can write to it; remove it or set ATTNC_CACHE_DIR"):
            program.cubin(FORWARD, program.kernels[FORWARD].configs[0], True, "sm_90")


def test_a_folder_of_somebody_else_is_refused(
    program: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(mode=0o700, parents=True)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match=f"belongs to another user .{owner}"):
        program.cubin(FORWARD, program.kernels[FORWARD].configs[0], True, "sm_90")


def test_a_link_is_refused(program: Any, cache: Path, tmp_path: Path) -> None:
    cache.parent.mkdir()
    (tmp_path / "real").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError, match="is a link"):
        program.cubin(FORWARD, program.kernels[FORWARD].configs[0], True, "sm_90")
    assert not program.compiled
