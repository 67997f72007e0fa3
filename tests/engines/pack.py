"""Packs an engine for a machine that has torch, triton and transformers, but no index to install from.

    python -m tests.engines.pack vllm --wheel WHEEL --out .engines     # prints the size of the folder
    . .engines/vllm.sh           # on that machine, which has the folder: unpacks, and sets PYTHONPATH

The engine comes as its Python, with the operations of vLLM as machine code of one kind of GPU, and with
wheels of what it imports that the machine lacks: `--installed` names a file that lists what it has, a name a
line.
What the tests do not ask has stand-ins (`standins.py`). `--source` adds vLLM's tests, of its sdist.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from tests.engines.thin import thin

#: What both engines import and such a machine may lack, by names of distributions.
COMMON = (
    "aiohappyeyeballs", "aiohttp", "aiosignal", "annotated-doc", "annotated-types", "anyio",
    "apache-tvm-ffi==0.1.11", "attrs", "certifi", "charset-normalizer", "dill", "einops", "fastapi",
    "frozenlist", "gguf", "h11", "idna", "lark", "loguru", "msgspec", "multidict", "opentelemetry-api",
    "orjson", "partial-json-parser", "pillow", "propcache", "psutil", "pybase64", "pytest", "iniconfig",
    "pluggy", "pygments", "pyzmq", "requests", "sentencepiece", "sniffio", "starlette", "typing-inspection",
    "urllib3", "uvloop", "yarl",
)  # fmt: skip
NEEDED = {
    "vllm": ("cachetools", "cbor2", "cloudpickle", "compressed-tensors==0.17.0", "prometheus-client",
             "py-cpuinfo"),
    "sglang": ("compressed-tensors==0.18.0", "setproctitle", "uvicorn"),
}  # fmt: skip
#: Compiled parts that an engine cannot run without, and that load under an older torch.
COMPILED = {"vllm": ("vllm/_C_stable_libtorch.abi3.so",), "sglang": ()}
_KINDS = (".py", ".json", "METADATA", "entry_points.txt")
_LEFT_OUT = ("sglang/multimodal_gen/",)
#: What SGLang compiles when it runs.
_SOURCES = "sglang/kernels/jit/"
_SCRIPT = """\
here=$(dirname "${{BASH_SOURCE[0]}}")
python3 -m pip install -q --no-index --no-deps --target /tmp/{engine} "$here"/{{common,{engine}}}/*.whl
python3 -c "import tarfile; tarfile.open('$here/{engine}.txz').extractall('/tmp/{engine}', filter='data')"
export PYTHONPATH=/tmp/{engine}:$PWD${{PYTHONPATH:+:$PYTHONPATH}} HF_HUB_OFFLINE=1
"""


def pack(
    engine: str,
    wheel: Path,
    out: Path,
    *,
    source: Path | None = None,
    python: str = "3.12",
    installed: Iterable[str] = (),
    architecture: int = 90,
) -> int:
    """Writes the archive, wheels and script; returns the bytes of the folder. source, python, installed,
    architecture: as the command has them.
    """
    out.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as whole, tarfile.open(out / f"{engine}.txz", "w:xz") as part:
        for name in whole.namelist():
            if name in COMPILED[engine]:
                _add(part, name, thin(whole.read(name), architecture))
            elif name.startswith(_SOURCES) or (name.endswith(_KINDS) and not name.startswith(_LEFT_OUT)):
                _add(part, name, whole.read(name))
        if source is not None:
            for path in sorted((source / "tests/v1/attention").glob("*.py")):
                part.add(path, f"source/tests/v1/attention/{path.name}")
    has = {_normalise(name) for name in installed}
    lacking = {
        folder: [name for name in names if _normalise(name.partition("==")[0]) not in has]
        for folder, names in (("common", COMMON), (engine, NEEDED[engine]))
    }
    _download(["pydantic"], out / "common", python, with_dependencies=True)  # its core of one version
    for folder, names in lacking.items():
        _download(names, out / folder, python)
    (out / f"{engine}.sh").write_text(_SCRIPT.format(engine=engine), encoding="utf-8")
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    if not name.endswith("/"):
        entry = tarfile.TarInfo(name)
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))


def _normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip().lower())


def _download(names: list[str], out: Path, python: str, *, with_dependencies: bool = False) -> None:
    """Downloads wheels for that version of Python on x86-64 Linux."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary", ":all:"]
    command += ["--python-version", python, "-d", str(out)]
    for platform in ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any"):
        command += ["--platform", platform]
    subprocess.run([*command, *([] if with_dependencies else ["--no-deps"]), *names], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=NEEDED)
    parser.add_argument("--wheel", type=Path, required=True, help="of the engine")
    parser.add_argument("--source", type=Path, help="of vLLM, with its tests")
    parser.add_argument("--python", default="3.12", help="version on that machine")
    parser.add_argument("--installed", type=Path, help="a file that names the distributions it has")
    parser.add_argument("--architecture", type=int, default=90, help="of its GPU: 90 is Hopper")
    parser.add_argument("--out", type=Path, default=Path(".engines"))
    options = parser.parse_args()
    size = pack(
        options.engine,
        options.wheel,
        options.out,
        source=options.source,
        python=options.python,
        installed=options.installed.read_text(encoding="utf-8").split() if options.installed else (),
        architecture=options.architecture,
    )
    print(f"{options.out}: {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
