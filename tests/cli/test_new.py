"""`attnc new`: every starting point is a spec that compiles, as the formatter writes it, under any name."""

from pathlib import Path

import pytest

from attnc.build import compile_spec
from attnc.cli.new import new, starters
from attnc.syntax.format import format_file
from attnc.syntax.parser import load, parse
from tests.cli.conftest import Run


@pytest.mark.one_in(3)
@pytest.mark.parametrize("like", starters())
def test_a_new_spec_compiles_and_is_formatted(run: Run, folder: Path, like: str) -> None:
    done = run("new", "mine", "--like", like)
    assert (done.code, done.out) == (0, "wrote specs/mine.attn\n")
    path = folder / "specs" / "mine.attn"
    compiled = compile_spec(path)
    assert compiled.warnings == ()
    assert any(output.path.startswith("mine/triton/") for output in compiled.outputs)
    source = load(path)
    assert format_file(parse(source)) == source.text
    assert source.text.startswith("# ")


def test_the_help_names_every_starting_point() -> None:
    option = new.__annotations__["like"]
    assert ", ".join(starters()) in option


@pytest.mark.parametrize(
    ("arguments", "problem", "hint"),
    [
        (["my-mask"], "'my-mask' is no name", "for example 'my_mask'"),
        (["for"], "'for' is reserved", "choose another name"),
        (["a", "--like", "widow"], "nothing like 'widow'", "did you mean 'window'?"),
        (["tiny"], "'specs/tiny.attn' is there already", "choose another name"),
    ],
)
def test_mistakes(run: Run, arguments: list[str], problem: str, hint: str) -> None:
    done = run("new", *arguments)
    assert done.code == 2
    assert problem in done.err
    assert hint in done.err
