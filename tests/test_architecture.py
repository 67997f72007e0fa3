"""The shape of the source tree: import order, who may use which library, file sizes, leftovers.

Everything is read with `ast`, nothing is imported. `LAYERS` is the one list to extend for a new module: put
it to the right of everything it needs.
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A module of attnc may import from layers to the left of its own, and from its own.
LAYERS = (
    "support", "version", "effort", "files", "source", "diagnostics", "resources", "expr", "syntax", "model",
    "reference", "reference_gradients", "output", "plan", "tuned", "explain",
    "target", "build", "editor", "paging", "runtime", "verify", "api", "flex", "distributed", "tune",
    "calibrate", "adapters", "compat", "bench", "cli", "__main__", "__init__",
)  # fmt: skip

# Libraries that only some layers or modules may import, wherever in the file the import stands.
OWNERS = {
    "torch": {
        "support",
        "reference",
        "reference_gradients",
        "paging",
        "runtime",
        "verify",
        "api",
        "flex",
        "distributed",
        "bench",
        "adapters",
        "compat",
    },
    "triton": {"support", "runtime", "verify", "bench"},
    "cupy": {"support", "runtime", "verify"},
    "numpy": {
        "attnc.expr.evaluate",
        "attnc.plan.picture",
        "reference",
        "reference_gradients",
        "runtime",
        "verify",
        "distributed",
        "tune",
        "calibrate",
    },
    "hypothesis": {"verify"},
    "jinja2": {"target"},
    "lark": {"syntax"},
    "typer": {"cli"},
    "pygls": {"cli"},
    "lsprotocol": {"cli"},
    "rich": {"cli"},
    "matplotlib": {"bench"},
    "transformers": {"adapters"},
    "vllm": {"adapters", "bench"},
    "sglang": {"adapters"},
}

# The layers that need torch. What runs in `attnc compile` must not need them.
NUMERIC = {
    "support", "reference", "reference_gradients", "paging", "runtime", "verify", "api",
    "flex", "distributed", "tune", "calibrate", "bench", "adapters",
    "compat",
}  # fmt: skip

# What judges a kernel shares no reasoning with what makes it, or both would be wrong together.
INDEPENDENT = {
    "attnc.reference": ("attnc.plan", "attnc.target", "attnc.expr.interval"),
    "attnc.reference_gradients": ("attnc.plan", "attnc.target", "attnc.expr.derive", "attnc.expr.interval"),
    "attnc.expr.evaluate": ("attnc.plan", "attnc.target", "attnc.expr.interval"),
}

# Families of targets, and those whose kernels each builds on.
FAMILIES: dict[str, tuple[str, ...]] = {"triton": (), "sm80": (), "sm90": ("sm80",)}

# Where parts of a target are listed, or what is for one target is made.
KNOWS_FAMILIES = {
    "attnc.plan.targets",
    "attnc.target.files",
    "attnc.target.projection",
    "attnc.runtime.toolchains",
}

# Where a target is still asked for by name, and why; all else asks `plan.targets` and the lists by family.
NAMES_TARGETS = {
    "attnc.model.resolve_schedule": "projections are made for one target",
    "attnc.tune.schedules": "so are tables of schedules",
    "attnc.verify.calls": "stands in for the two ways in which host code launches",
    "attnc.bench.decode": "kernels for another target may be timed beside Triton's",
    "attnc.bench.prefill": "the same of prompts",
    "attnc.bench.serving": "the same of further cells",
}

# Names with several classes: a node of the syntax tree beside its meaning, a declaration of generated modules
# beside its plan, and three more. Any other class gets a name of its own.
SHARED_NAMES = {
    "Attention", "Call", "Compare", "Let", "Node", "Not", "Param", "Projection", "Schedule", "When",
    "Backward", "Gradient", "Kernel", "Program", "Softmax", "Split", "Tensor",
    "AttncMetadata",  # of vLLM and of SGLang
    "Plan",  # of FlashInfer's wrappers, and of ranks
    "Step",  # of a paged cache, and of a kernel
}  # fmt: skip

GENERATED_MAY_IMPORT = {"torch", "triton", "cupy", "numpy"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.glob("attnc/**/*.py"))}
GENERATED = sorted(ROOT.glob("generated/**/*.py"))


def layer_of(module: str) -> str:
    """The name right below `attnc`: `attnc.expr.nodes` is in `expr`; `attnc` itself is in `__init__`."""
    return [*module.split("."), "__init__"][1]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path, *, module_level: bool = False) -> tuple[tuple[str, int], ...]:
    """(module, line) of each import; `from a import b` gives `a.b` where that is a module.

    With `module_level`, only what runs when the module is imported: nothing inside a function or under
    `if TYPE_CHECKING`.
    """
    return _imports(path, module_level)


@cache
def _imports(path: Path, module_level: bool) -> tuple[tuple[str, int], ...]:
    return tuple(_list_imports(path, module_level=module_level))


def _list_imports(path: Path, *, module_level: bool) -> Iterator[tuple[str, int]]:
    nodes: list[ast.AST] = [parse(path)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            # ruff bans it, except in generated/ and in the support package that is copied there
            if path.is_relative_to(ROOT / "attnc"):
                yield f"{module_name(path.parent)}.{node.module}", node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield (inner if inner in MODULES else base), node.lineno
        elif not (module_level and runs_later(node)):
            nodes.extend(ast.iter_child_nodes(node))


def runs_later(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def attnc_imports(*, module_level: bool = False) -> Iterator[tuple[str, str, int]]:
    for module, path in MODULES.items():
        for target, line in imports(path, module_level=module_level):
            if is_in(target, "attnc") and target != module:
                yield module, target, line


def test_a_class_name_has_one_home() -> None:
    homes: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), set()).add(module)
    shared = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert {name: modules for name, modules in shared.items() if name not in SHARED_NAMES} == {}
    assert SHARED_NAMES - shared.keys() == set()


def test_every_module_has_a_layer() -> None:
    unknown = {module for module in MODULES if layer_of(module) not in LAYERS}
    assert not unknown, "add them to LAYERS, to the right of all they import"


def test_imports_go_from_right_to_left() -> None:
    wrong = [
        f"{where(MODULES[module], line)}: {layer_of(module)} must not import {target}"
        for module, target, line in attnc_imports()
        if target != "attnc" and LAYERS.index(layer_of(target)) > LAYERS.index(layer_of(module))
    ]
    assert not wrong, "\n".join(wrong)


def test_there_are_no_import_cycles() -> None:
    """Not even of imports inside functions, or for the eyes of a type checker: what needs each other is one
    module, or lacks one that both need.
    """
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for module, target, _ in attnc_imports():
        graph[module].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_libraries_stay_with_their_owners() -> None:
    wrong = []
    for module, path in MODULES.items():
        for target, line in imports(path):
            owners = OWNERS.get(target.partition(".")[0])
            if owners is not None and not {layer_of(module), module} & owners:
                wrong.append(f"{where(path, line)}: {target} belongs to {', '.join(sorted(owners))}")
    assert not wrong, "\n".join(wrong)


def test_the_compiler_does_not_need_the_numeric_layers() -> None:
    wrong = [
        f"{where(MODULES[module], line)}: {target}; only cli may import it, and only inside a function"
        for module, target, line in attnc_imports(module_level=True)
        if layer_of(target) in NUMERIC and layer_of(module) not in NUMERIC
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("judge", sorted(INDEPENDENT))
def test_what_judges_is_independent_of_what_makes(judge: str) -> None:
    wrong = [
        f"{where(MODULES[module], line)}: {target}"
        for module, target, line in attnc_imports()
        if is_in(module, judge) and any(is_in(target, banned) for banned in INDEPENDENT[judge])
    ]
    assert not wrong, "\n".join(wrong)


def family_of(module: str) -> str:
    """`attnc.plan.sm80.layout` and `attnc.target.sm80.kernel` are of `sm80`; "" for what is of none."""
    parts = [*module.split("."), "", ""]
    return parts[2] if parts[1] in ("plan", "target") and parts[2] in FAMILIES else ""


def test_passes_of_a_target_are_for_it_alone() -> None:
    """All else finds them through lists: `plan.targets`, and by family those of other layers."""
    wrong = [
        f"{where(MODULES[module], line)}: {target}"
        for module, target, line in attnc_imports()
        if module not in KNOWS_FAMILIES and (family := family_of(target))
        if family not in (family_of(module), *FAMILIES.get(family_of(module), ()))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_support_package_stands_alone() -> None:
    allowed = GENERATED_MAY_IMPORT | set(sys.stdlib_module_names) | {"attnc"}
    wrong = [
        f"{where(path, line)}: {target}"
        for module, path in MODULES.items()
        if layer_of(module) == "support"
        for target, line in imports(path)
        if target.partition(".")[0] not in allowed
        or (target.startswith("attnc") and layer_of(target) != "support")
    ]
    assert not wrong, "\n".join(wrong)


def test_targets_are_asked_and_not_named() -> None:
    """A comparison with a target's name is a place that a new target would have to find."""
    wrong = {
        f"{where(path, node.lineno)}: {ast.unparse(node)}": module
        for module, path in MODULES.items()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Compare) and any(map(names_a_target, (node.left, *node.comparators)))
        if "sys.modules" not in ast.unparse(node)
    }
    assert [place for place, module in wrong.items() if module not in NAMES_TARGETS] == []
    assert NAMES_TARGETS.keys() <= set(wrong.values()), "one of these names none any more"


def names_a_target(node: ast.AST) -> bool:
    values = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return any(isinstance(value, str) and re.fullmatch(r"triton|cuda[._]\w*", value) for value in values)


def test_generated_modules_stand_alone() -> None:
    allowed = GENERATED_MAY_IMPORT | set(sys.stdlib_module_names)
    wrong = [
        f"{where(path, line)}: {target}"
        for path in GENERATED
        for target, line in imports_of_lines(path)
        if target.partition(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)
    assert {target for path in GENERATED[:20] for target, _ in imports_of_lines(path)} == {
        target for path in GENERATED[:20] for target, _ in imports(path)
    }


IMPORTS = re.compile(r"^\s*(?:from\s+(\w[\w.]*)\s+import\b|import\s+(\w.*))")


def imports_of_lines(path: Path) -> Iterator[tuple[str, int]]:
    """What `imports` finds where imports are lines: there are too many generated modules to parse."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if "import" in line and (found := IMPORTS.match(line)):
            names = [found[1]] if found[1] else [name.split()[0] for name in found[2].split(",")]
            yield from ((name, number) for name in names)


# Files that people write. Patterns below are spelled so that they do not match themselves.
WRITTEN = sorted(
    path
    for top in ("attnc", "tests", "examples", "templates", "grammar", "specs")
    for path in ROOT.glob(f"{top}/**/*")
    if path.is_file() and "__pycache__" not in path.parts
)
VAGUE_NAMES = {"common", "helper", "helpers", "misc", "util", "utils"}
MAX_LINES = 600
LEFTOVERS = re.compile(r"\b(TO[D]O|FIX[M]E|X[X]X)\b|Not[I]mplementedError")
FOREIGN = re.compile(r"/(wor[k]|hom[e]|Use[r]s|roo[t]|op[t])/\w|\bthis sessio[n]\b|sub[a]gent|\bissue #?\d")
UNEXPLAINED = re.compile(r"#\s*(type:\s*ignore|noqa)(\[[\w-]+\]|: ?[A-Z0-9, ]+)?\s*$", re.MULTILINE)


def lines_matching(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    """All lines that the pattern matches. Most files have none: they are searched whole."""
    return [
        f"{where(path, number)}: {line.strip()}"
        for path in paths
        if pattern.search(text := path.read_text(encoding="utf-8"))
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_file_names_say_what_is_inside() -> None:
    assert [path for path in WRITTEN if path.stem in VAGUE_NAMES] == []


def test_files_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in WRITTEN
        if path.suffix != ".json"
        and path.name != "by_night.txt"  # measured, not written
        and (count := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert long == {}


def test_nothing_is_left_for_later() -> None:
    assert lines_matching(LEFTOVERS, WRITTEN) == []


def test_no_word_belongs_to_one_machine() -> None:
    documents = [
        path
        for pattern in ("*.md", "docs/*.md", "*.toml", "*.txt", "Makefile", ".ci/*")
        for path in ROOT.glob(pattern)
    ]
    assert lines_matching(FOREIGN, WRITTEN + GENERATED + documents) == []


def test_switched_off_checks_say_why() -> None:
    assert lines_matching(UNEXPLAINED, WRITTEN) == []
