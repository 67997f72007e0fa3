"""What a user installs works: the wheel, built from the sdist, in an environment that has no checkout."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from attnc.version import __version__, find_commit

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow

SPEC = """\
attention tiny {
  input q: f16[B, H, M, D]
  input k, v: f16[B, H, N, D]
  score = dot(q, k) / sqrt(D)
  mask = causal
  normalize = softmax
  output o: f16[B, H, M, D]
}
schedule tiny for triton {
  loops = [q, kv]
  tile.q = 64, tile.kv = 64
}
"""


def run(*command: str | Path, cwd: Path, status: int = 0) -> str:
    """Runs a command that can see neither the checkout nor an index; returns its output, or what it says on
    standard error where it is to fail with this status.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))
    }
    environment["PIP_CONFIG_FILE"] = os.devnull
    environment["PIP_NO_INDEX"] = "1"
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status else done.stdout


def build_sdist(checkout: Path, folder: Path) -> Path:
    """An sdist, built without writing into the checkout."""
    source = folder / "source"
    source.mkdir()
    for entry in checkout.iterdir():
        if (
            not entry.name.startswith(".")
            and entry.suffix != ".egg-info"
            and entry.name not in {"build", "dist"}
        ):
            (source / entry.name).symlink_to(entry)
    return build("sdist", source, folder / "dist", "*.tar.gz")


def build(kind: str, source: Path, folder: Path, pattern: str) -> Path:
    """What the build backend makes in a folder; pip calls it likewise."""
    program = f"import setuptools.build_meta as backend; backend.build_{kind}({str(folder)!r})"
    run(sys.executable, "-c", program, cwd=source)
    (built,) = folder.glob(pattern)
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    with tarfile.open(build_sdist(ROOT, folder)) as sdist:
        unread = ("docs/", "generated/", "tests/")  # by the backend, and most of it
        members = [member for member in sdist if not member.name.partition("/")[2].startswith(unread)]
        sdist.extractall(folder, members, filter="data")
    (unpacked,) = folder.glob("attnc-*/")
    return build("wheel", unpacked, folder / "dist", "*.whl")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin/` of an environment that holds the wheel and can import what this interpreter has installed.

    A path in a .pth file makes a directory importable without running the .pth files *in* it, so an editable
    install of attnc stays invisible.
    """
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (site_packages,) = folder.glob("lib/python*/site-packages")
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-compile",
        "--no-deps",
        wheel,
        cwd=folder,
    )
    return folder / "bin"


def files_below(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.glob("**/*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_holds_the_package_and_what_it_carries(wheel: Path) -> None:
    expected = {f"attnc/{name}" for name in files_below(ROOT / "attnc")}
    if find_commit() is not None:
        expected.add("attnc/COMMIT")
    for carried in ("grammar", "specs", "templates"):
        expected |= {f"attnc/{carried}/{name}" for name in files_below(ROOT / carried)}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected


def test_sdist_holds_what_the_tests_need(wheel: Path) -> None:
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    tops = ("attnc", "generated", "grammar", "specs", "templates", "tests", "tools")
    expected = {f"{top}/{name}" for top in tops for name in files_below(ROOT / top)}
    assert expected - held == set()


def test_installed_package_is_the_wheels(installed: Path, tmp_path: Path) -> None:
    program = "import attnc; print(attnc.__file__)"
    origin = Path(run(installed / "python", "-c", program, cwd=tmp_path).strip())
    assert origin.is_relative_to(installed.parent)


def test_installed_command_says_version_and_commit(installed: Path, tmp_path: Path) -> None:
    commit = find_commit()
    expected = f"attnc {__version__}" + (f" ({commit})" if commit else "")
    assert run(installed / "attnc", "--version", cwd=tmp_path).strip() == expected


def test_benchmarks_of_claims_ask_for_a_checkout(installed: Path, tmp_path: Path) -> None:
    said = run(installed / "attnc", "bench", "--papers", "--list", cwd=tmp_path, status=2)
    assert "--papers runs from a checkout alone\n   = help: " in said


def test_installed_command_compiles_a_spec(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.attn").write_text(SPEC)
    run(installed / "attnc", "compile", "tiny.attn", "--out", "kernels", cwd=tmp_path)
    modules = [path for path in (tmp_path / "kernels").glob("**/*.py") if path.name != "__init__.py"]
    assert modules
    for module in modules:
        compile(module.read_text(), str(module), "exec")


def test_the_first_commands_work_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    """What help starts with, and an example of its texts by its name."""
    attnc = installed / "attnc"
    assert "Start with: attnc demo" in run(attnc, "--help", cwd=tmp_path)
    run(attnc, "new", "local_sink", "--like", "local_sink", cwd=tmp_path)
    run(attnc, "check", "specs/local_sink.attn", cwd=tmp_path)


@pytest.mark.nightly  # eight seconds, most of them Triton's; by day the demo runs from the checkout
def test_the_demo_needs_no_checkout(installed: Path, tmp_path: Path) -> None:
    assert "verified" in run(installed / "attnc", "demo", cwd=tmp_path)
