"""Packs an engine for a machine that has torch, triton and transformers, but no index to install from.

    python -m tests.engines.pack vllm --wheel WHEEL --python 3.12 --out .engines     # prints its size
    . .engines/vllm.sh           # on that machine, which has the folder: unpacks, and sets PYTHONPATH

The engine comes as its Python alone, without compiled parts, and with wheels of what it imports there; what
the tests do not ask has stand-ins (`standins.py`). `--source` adds vLLM's tests, of its sdist.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

#: What both engines import and such a machine lacks, by names of distributions.
COMMON = (
    "aiohappyeyeballs", "aiohttp", "aiosignal", "annotated-doc", "annotated-types", "anyio",
    "apache-tvm-ffi==0.1.11", "attrs", "certifi", "charset-normalizer", "dill", "einops", "fastapi",
    "frozenlist", "gguf", "h11", "idna", "msgspec", "multidict", "opentelemetry-api", "orjson",
    "partial-json-parser", "pillow", "propcache", "psutil", "pybase64", "pytest", "iniconfig", "pluggy",
    "pygments", "pyzmq", "requests", "sentencepiece", "sniffio", "starlette", "typing-inspection",
    "urllib3", "uvloop", "yarl",
)  # fmt: skip
NEEDED = {
    "vllm": (*COMMON, "cachetools", "cbor2", "cloudpickle", "prometheus-client", "py-cpuinfo"),
    "sglang": (*COMMON, "compressed-tensors==0.18.0", "lark", "loguru", "setproctitle", "uvicorn"),
}
_KINDS = (".py", ".json", "METADATA", "entry_points.txt")
_LEFT_OUT = ("sglang/multimodal_gen/",)
_SCRIPT = """\
here=$(dirname "${{BASH_SOURCE[0]}}")
python3 -m pip install -q --no-index --no-deps --target /tmp/{engine} "$here"/{engine}/*.whl
python3 -m zipfile -e "$here/{engine}.zip" /tmp/{engine}
export PYTHONPATH=/tmp/{engine}:$PWD HF_HUB_OFFLINE=1
"""


def pack(engine: str, wheel: Path, python: str, out: Path, source: Path | None) -> int:
    """Writes the archive, wheels and script; returns their bytes."""
    out.mkdir(exist_ok=True)
    with (
        zipfile.ZipFile(wheel) as whole,
        zipfile.ZipFile(out / f"{engine}.zip", "w", zipfile.ZIP_DEFLATED) as part,
    ):
        for name in whole.namelist():
            if name.endswith(_KINDS) and not name.startswith(_LEFT_OUT):
                part.writestr(name, whole.read(name))
        if source is not None:
            for path in sorted((source / "tests/v1/attention").glob("*.py")):
                part.write(path, f"source/tests/v1/attention/{path.name}")
    platforms = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")
    command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary", ":all:"]
    command += ["--python-version", python, "-d", str(out / engine)]
    for platform in platforms:
        command += ["--platform", platform]
    subprocess.run([*command, "pydantic"], check=True)  # with its core, of the version that it wants
    subprocess.run([*command, "--no-deps", *NEEDED[engine]], check=True)
    (out / f"{engine}.sh").write_text(_SCRIPT.format(engine=engine), encoding="utf-8")
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=NEEDED)
    parser.add_argument("--wheel", type=Path, required=True, help="of the engine")
    parser.add_argument("--source", type=Path, help="of vLLM, with its tests")
    parser.add_argument("--python", default="3.12", help="version on that machine")
    parser.add_argument("--out", type=Path, default=Path(".engines"))
    options = parser.parse_args()
    size = pack(options.engine, options.wheel, options.python, options.out, options.source)
    print(f"{options.out}: {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
