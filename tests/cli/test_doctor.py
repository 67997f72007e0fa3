"""What `attnc doctor` says of tables of targets."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnc.cli.doctor import _tables
from attnc.tuned.tables import ANY_TARGET, TARGET_SIZES, Row, Table, dump_tables


def test_tables_of_this_device_are_named_and_malformed_ones_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "specs" / "tuned"
    folder.mkdir(parents=True)
    rows = tuple(
        Row(limits=(None, limit, None, None), choice={"target": target}, microseconds=1.0)
        for limit, target in ((512, "triton"), (4096, "cuda.sm_90a"), (None, "triton"))
    )
    tables = [
        Table(name=name, target=ANY_TARGET, variant="d64", device=device, toolchain="triton 3.6.0",
              sizes=TARGET_SIZES, rows=rows)
        for name, device in (("near", "a GPU"), ("far", "another"))
    ]  # fmt: skip
    (folder / "near.dispatch.json").write_text(dump_tables(tables), encoding="utf-8")
    (folder / "worn.dispatch.json").write_text("{", encoding="utf-8")
    assert [(found.state, found.detail) for found in _tables(0, "a GPU")] == [
        ("note", f"{Path('specs/tuned/worn.dispatch.json')} cannot be read"),
        ("ok", "near cuda.sm_90a or triton"),
    ]
