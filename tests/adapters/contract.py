"""What serving engines ask of attention backends: signatures of their published wheels, kept as data.

    python -m tests.adapters.contract vllm sglang flashinfer       # compares with the newest wheels
    python -m tests.adapters.contract --write --wheel FILE vllm   # takes a wheel's signatures instead

Nothing of an engine is imported or kept but names, parameters and their defaults. `stubs` makes modules of
them that backends can be imported against, `mismatches` says where a class does not fit its engine's.
"""

from __future__ import annotations

import argparse
import ast
import enum
import inspect
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, new_class
from typing import Any, Generic, TypeAlias, TypeVar

FOLDER = Path(__file__).parent / "contracts"

#: Names to keep of each module, and of their members; None for all.
Wanted: TypeAlias = Mapping[str, Mapping[str, tuple[str, ...] | None]]
WANTED: Mapping[str, Wanted] = {
    "vllm": {
        "vllm.v1.attention.backend": {
            "AttentionBackend": None,
            "AttentionCGSupport": None,
            "AttentionImpl": ("__init__", "forward"),
            "AttentionMetadataBuilder": None,
            "AttentionType": None,
            "CommonAttentionMetadata": None,
            "MLAAttentionImpl": ("do_kv_cache_update",),
            "MultipleOf": None,
        },
        "vllm.model_executor.layers.attention.mla_attention": {
            "MLACommonBackend": None,
            "MLACommonDecodeMetadata": ("block_table", "seq_lens"),
            "MLACommonImpl": ("__init__", "forward_mqa", "supports_quant_query_input", "dcp_world_size"),
            "MLACommonMetadata": ("causal", "decode", "query_start_loc"),
            "MLACommonMetadataBuilder": ("query_len_support", "supports_non_causal_multi_token_decode"),
            "MLACommonPrefillMetadata": ("query_start_loc",),
            "QueryLenSupport": None,
        },
        "vllm.model_executor.layers.attention.sparse_mla_attention": {
            "SparseMLACommonImpl": ("__init__", "_forward_mqa_kernel", "group_conversion_decode_only"),
            "SparseMLACommonMetadata": ("block_table", "req_id_per_token"),
            "SparseMLACommonMetadataBuilder": ("__init__", "_init_reorder_batch_threshold", "metadata_cls"),
        },
        "vllm.v1.attention.backends.mla.sparse_utils": {
            "align_blocks_to_rows": None,
            "flat_kv_row_view": None,
        },
        "vllm.v1.attention.backends.mla.prefill.base": {"MLADimensions": None, "MLAPrefillBackend": None},
        "vllm.v1.attention.backends.mla.prefill.registry": {
            "MLAPrefillBackendEnum": ("CUSTOM", "get_path", "is_overridden"),
            "register_mla_prefill_backend": None,
        },
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": ("CUSTOM", "get_path", "is_overridden"),
            "register_backend": None,
        },
        # What layers call beside the base class is there by example alone.
        "vllm.v1.attention.backends.triton_attn": {
            "TritonAttentionImpl": ("__init__", "forward", "do_kv_cache_update"),
        },
        "vllm.v1.kv_cache_interface": {"AttentionSpec": ("head_size", "head_size_v")},
        "vllm.plugins": {"DEFAULT_PLUGINS_GROUP": None},
    },
    "sglang": {
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": None},
        "sglang.srt.layers.attention.attention_registry": {"register_attention_backend": None},
        "sglang.srt.layers.attention.flashattention_backend": {
            "FlashAttentionBackend": ("forward_extend", "forward_decode"),
        },
        "sglang.srt.arg_groups.choices": {
            "ATTENTION_BACKEND_CHOICES": (),
            "add_attention_backend_choices": None,
            "add_chunked_prefix_cache_attention_backend": None,
            "add_draft_attention_backend_choices": None,
        },
        "sglang.srt.layers.radix_attention": {
            "RadixAttention": (
                "attn_type", "is_cross_attention", "k_scale", "layer_id", "logit_cap", "logit_capping_method",
                "pos_encoding_mode", "qk_head_dim", "scaling", "sliding_window_size", "tp_k_head_num",
                "tp_q_head_num", "v_head_dim", "v_scale", "xai_temperature_len",
            ),
            "AttentionType": None,
        },
        "sglang.srt.mem_cache.memory_pool": {
            "KVWriteLoc": ("for_layer",),
            "MLATokenToKVPool": ("get_key_buffer", "set_kv_buffer"),
            "MHATokenToKVPool": ("get_key_buffer", "get_value_buffer", "set_kv_buffer"),
            "ReqToTokenPool": ("req_to_token",),
        },
        "sglang.srt.model_executor.forward_batch_info": {
            "ForwardBatch": (
                "forward_mode", "batch_size", "req_pool_indices", "seq_lens", "out_cache_loc", "seq_lens_cpu",
                "extend_seq_lens", "spec_info",
            ),
            "ForwardMode": (
                "DECODE", "DRAFT_EXTEND_V2", "EXTEND", "MIXED", "TARGET_VERIFY", "is_decode_or_idle",
                "is_draft_extend_v2", "is_extend_or_draft_extend_or_mixed", "is_target_verify",
            ),
        },
        "sglang.srt.model_executor.forward_batch_deepseek_mha_mixin": {
            "ForwardBatchDeepSeekMHAMixin": (
                "attn_attend_prefix_cache", "mha_return_lse", "prefix_chunk_cu_seq_lens", "prefix_chunk_idx",
            ),
        },
        "sglang.srt.models.deepseek_common.attention_backend_handler": {
            "AttentionBackendRegistry": ("register",),
            "_handle_attention_backend": None,
        },
        "sglang.srt.plugins.hook_registry": {"HookRegistry": ("register",), "HookType": None},
        "sglang.srt.speculative.draft_utils": {
            "DraftBackendFactory": ("_create_backend", "draft_model_runner", "speculative_num_steps", "topk"),
        },
        "sglang.srt.speculative.eagle_info": {
            "EagleVerifyInput": ("custom_mask", "num_tokens_per_req", "topk"),
            "EagleDraftExtendInput": ("num_tokens_per_req",),
        },
        "sglang.srt.speculative.ngram_info": {"NgramVerifyInput": ("custom_mask", "num_tokens_per_req")},
        "sglang.srt.model_executor.model_runner": {
            "ModelRunner": (
                "attention_chunk_size", "device", "kv_cache_dtype", "kv_index_translator", "model_config",
                "page_size", "req_to_token_pool", "token_to_kv_pool", "use_mla_backend",
            ),
        },
        "sglang.srt.plugins": {"GENERAL_PLUGINS_GROUP": None},
    },
    "flashinfer": {
        "flashinfer.attention._core": {
            "BatchAttention": ("__init__", "plan", "prewarm_paged_kv_stride_variant", "run"),
            "BatchAttentionWithAttentionSinkWrapper": ("__init__", "run"),
            "BatchDecodeWithAttentionSinkWrapper": ("__init__", "run"),
            "BatchPrefillWithCausalBidirectionalRangesWrapper": ("__init__", "plan", "run"),
        },
        "flashinfer.cascade": {
            "BatchDecodeWithSharedPrefixPagedKVCacheWrapper": ("__init__", "begin_forward", "forward"),
            "BatchPrefillWithSharedPrefixPagedKVCacheWrapper": ("__init__", "begin_forward", "forward"),
            "MultiLevelCascadeAttentionWrapper": ("__init__", "plan", "run"),
            "merge_state": None,
            "merge_state_in_place": None,
            "merge_states": None,
        },
        "flashinfer.decode": {
            "BatchDecodeWithPagedKVCacheWrapper": (
                "__init__", "_plan_impl", "forward", "forward_return_lse", "run",
            ),
            "CUDAGraphBatchDecodeWithPagedKVCacheWrapper": ("__init__",),
            "fast_decode_plan": None,
            "single_decode_with_kv_cache": None,
        },
        "flashinfer.mla._batch_mla._wrapper": {"BatchMLAPagedAttentionWrapper": ("__init__", "plan", "run")},
        "flashinfer.page": {
            "append_paged_kv_cache": None,
            "append_paged_mla_kv_cache": None,
            "get_batch_indices_positions": None,
            "get_seq_lens": None,
        },
        "flashinfer.pod": {
            "BatchPODWithPagedKVCacheWrapper": ("__init__", "plan", "run"),
            "PODWithPagedKVCacheWrapper": ("__init__", "plan", "run"),
        },
        "flashinfer.prefill": {
            "BatchPrefillWithPagedKVCacheWrapper": (
                "__init__", "forward", "forward_return_lse", "plan", "run",
            ),
            "BatchPrefillWithRaggedKVCacheWrapper": (
                "__init__", "forward", "forward_return_lse", "plan", "run",
            ),
            "single_prefill_with_kv_cache": None,
        },
        "flashinfer.quantization.packbits": {"packbits": None, "segment_packbits": None},
        "flashinfer.sparse": {
            "BlockSparseAttentionWrapper": ("__init__", "plan", "run"),
            "VariableBlockSparseAttentionWrapper": ("__init__", "plan", "run"),
            "convert_bsr_mask_layout": None,
        },
    },
}  # fmt: skip

#: What pip calls an engine, where that is not its own name.
PACKAGES = {"flashinfer": "flashinfer-python"}

Snapshot: TypeAlias = dict[str, Any]
_T = TypeVar("_T")


def snapshot(engine: str) -> Snapshot:
    """What was read of an engine."""
    read: Snapshot = json.loads((FOLDER / f"{engine}.json").read_text(encoding="utf-8"))
    return read


def read_wheel(engine: str, wheel: Path) -> Snapshot:
    """The wanted signatures of a wheel. KeyError naming what it does not have."""
    modules: dict[str, Any] = {}
    with zipfile.ZipFile(wheel) as files:
        for module, names in WANTED[engine].items():
            tree = ast.parse(_text(files, module))
            found = {name: node for node in tree.body for name in _names(node)}
            modules[module] = {name: _described(found[name], kept) for name, kept in names.items()}
    return {"engine": engine, "version": wheel.name.split("-")[1], "modules": modules}


def _text(files: zipfile.ZipFile, module: str) -> bytes:
    path = module.replace(".", "/")
    names = set(files.namelist())
    return files.read(next(name for name in (f"{path}.py", f"{path}/__init__.py") if name in names))


def _names(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            yield name
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            yield name


def _described(node: ast.stmt, kept: tuple[str, ...] | None) -> Any:
    """A class as its members, a function as its parameters, another name as its value."""
    if isinstance(node, ast.FunctionDef):
        return {"parameters": _parameters(node.args)}
    if not isinstance(node, ast.ClassDef):
        return {"value": _literal(getattr(node, "value", None))}
    members: dict[str, Any] = {}
    for member in node.body:
        for name in _names(member):
            if isinstance(member, ast.FunctionDef):
                marks = [ast.unparse(mark) for mark in member.decorator_list]
                members[name] = {"parameters": _parameters(member.args)} | dict.fromkeys(marks, True)
            else:
                members[name] = {"value": _literal(getattr(member, "value", None))}
    for name in _assigned(node):
        members.setdefault(name, {"set": True})
    if kept is not None and (missing := set(kept) - members.keys()):
        raise KeyError(f"{node.name} has no {', '.join(sorted(missing))}")
    wanted = {name: what for name, what in members.items() if kept is None or name in kept}
    if kept is None:
        wanted = {name: what for name, what in wanted.items() if "set" not in what}
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    return {"bases": [ast.unparse(base) for base in node.bases], "marks": marks, "members": wanted}


def _parameters(args: ast.arguments) -> list[list[str | None]]:
    """[name, kind, default] of each: kind is "" for what may be given by position, "*" for keywords."""
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + [ast.unparse(x) for x in args.defaults]
    found: list[list[str | None]] = [[x.arg, "", d] for x, d in zip(plain, defaults, strict=True)]
    if args.vararg:
        found.append([args.vararg.arg, "args", None])
    for x, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append([x.arg, "*", None if default is None else ast.unparse(default)])
    if args.kwarg:
        found.append([args.kwarg.arg, "kwargs", None])
    return found


def _literal(value: ast.expr | None) -> Any:
    """A value as text, "" where there is none; "..." where it is no literal."""
    if value is None:
        return ""
    try:
        return repr(ast.literal_eval(value))
    except ValueError:
        return "..."


def _assigned(node: ast.ClassDef) -> Iterator[str]:
    """Attributes that the methods of a class assign."""
    for part in ast.walk(node):
        match part:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Each place where two snapshots differ, by its name, with what was and what is."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for name in sorted({*old, *new})
            if name not in ("version", "bases")
            for line in differences(old.get(name), new.get(name), f"{where}.{name}" if where else name)
        ]
    return [] if old == new else [f"{where}: was {json.dumps(old)}, is {json.dumps(new)}"]


def mismatches(ours: type, theirs: Mapping[str, Any], name: str, extra: tuple[str, ...] = ()) -> list[str]:
    """Where a class of ours does not fit one of a snapshot, by name.

    Methods must take every call that theirs take; attributes and methods that they do not have are only those
    that begin with an underscore, and `extra`. What ours has includes what it has from bases of attnc's.
    """
    members, found = theirs["members"], []
    bases = [base for base in ours.__mro__[1:] if base.__module__.startswith("attnc.")]
    own_members = {key: value for one in (*reversed(bases), ours) for key, value in vars(one).items()}
    for member, what in members.items():
        if what.get("abstractmethod") and member not in own_members:
            found.append(f"{ours.__name__}.{member}: {name} wants it")
    for member, value in own_members.items():
        own = member.startswith("__") and member != "__init__"
        if own or member in extra or (member.startswith("_") and member not in members):
            continue
        if member not in members:
            found.append(f"{ours.__name__}.{member}: {name} has none")
        elif "parameters" in members[member]:
            kind = next((k for k in ("staticmethod", "classmethod") if members[member].get(k)), "method")
            actual = type(value).__name__ if isinstance(value, staticmethod | classmethod) else "method"
            if kind != actual:
                found.append(f"{ours.__name__}.{member}: is a {kind} in {name}, here a {actual}")
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            lines = unfit(function, members[member]["parameters"])
            found += [f"{ours.__name__}.{member}: {line}" for line in lines]
    return found


def unfit(function: Callable[..., Any], theirs: list[list[str | None]]) -> Iterator[str]:
    """Parameters of theirs that a function does not take as they do, with another default too, and its own
    that they do not give.
    """
    ours = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in ours.values())
    at = {name: position for position, name in enumerate(ours)}
    for position, (name, kind, default) in enumerate(theirs):
        if kind in ("args", "kwargs"):
            continue
        assert name is not None
        if name not in ours:
            if not (takes_any and (kind == "*" or default is not None)):
                yield f"takes no {name}"
        elif kind == "" and (at[name] != position or ours[name].kind is inspect.Parameter.KEYWORD_ONLY):
            yield f"{name} is at {at[name]}, not at {position}"
        elif default is not None and ours[name].default is inspect.Parameter.empty:
            yield f"{name} has no default, theirs is {default}"
        elif default is not None and (said := _say(ours[name].default)) != default:
            yield f"{name} is {said} where it is left out, theirs is {default}"
    given = {name for name, *_ in theirs}
    for name, parameter in ours.items():
        optional = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if name not in given and not optional and parameter.default is inspect.Parameter.empty:
            yield f"wants {name}, which is not given"


def _say(default: object) -> str:
    """A default as the text of a signature has it."""
    return f"{type(default).__name__}.{default.name}" if isinstance(default, enum.Enum) else repr(default)


def stubs(read: Snapshot) -> dict[str, ModuleType]:
    """Modules with the classes and functions of a snapshot, packages above them included.

    Abstract methods are abstract, constructors keep their arguments as attributes, data classes and
    enumerations are what they are; every other method raises.
    """
    made: dict[str, ModuleType] = {}
    for path, names in read["modules"].items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            if package not in made:
                made[package] = ModuleType(package)
                made[package].__path__ = []
        for name, what in names.items():
            value = _stub(path, name, what) if "members" in what else what.get("value")
            if "parameters" in what:
                value = _function(name, what)
            elif isinstance(value, str):
                value = ast.literal_eval(value) if value not in ("", "...") else []
            setattr(made[path], name, value)
    return made


def _stub(module: str, name: str, what: Mapping[str, Any]) -> Any:
    members = what["members"]
    plain = {
        member: ast.literal_eval(value["value"])
        for member, value in members.items()
        if value.get("value") not in (None, "", "...")
    }
    if any("Enum" in base for base in what["bases"]):
        values = {
            member: plain.get(member, at)
            for at, (member, value) in enumerate(members.items())
            if "value" in value
        }
        return enum.Enum(name, values, module=module, type=str if "str" in what["bases"] else None)
    body: dict[str, Any] = dict(plain)
    for member, value in members.items():
        if "parameters" in value:
            body[member] = _function(f"{name}.{member}", value)
    if any("dataclass" in mark for mark in what["marks"]):
        fields = [(member, value["value"]) for member, value in members.items() if "value" in value]
        body["__init__"] = _keeps([[field, "", default or None] for field, default in fields], bound=False)
    elif "__init__" in members:
        body["__init__"] = _keeps(members["__init__"]["parameters"][1:])
        body["__init__"].__isabstractmethod__ = bool(members["__init__"].get("abstractmethod"))
    generic = any("Generic" in base for base in what["bases"])
    bases: tuple[Any, ...] = (ABC, Generic[_T]) if generic else (ABC,)  # type: ignore[index]  # not a type of T
    return new_class(name, bases, {}, lambda space: space.update(body, __module__=module))


def _function(name: str, what: Mapping[str, Any]) -> Any:
    def stub(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{name} is a stub")

    stub.__name__ = name.rpartition(".")[2]
    made: Any = abstractmethod(stub) if what.get("abstractmethod") else stub
    return (
        staticmethod(made)
        if what.get("staticmethod")
        else classmethod(made)
        if what.get("classmethod")
        else made
    )


def _keeps(parameters: list[list[str | None]], *, bound: bool = True) -> Any:
    """A constructor of these parameters."""
    names = [str(name) for name, kind, _ in parameters if kind in ("", "*")]
    known = {
        str(name): ast.literal_eval(default)
        for name, kind, default in parameters
        if default not in (None, "...") and _is_literal(default)
    }

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        unknown = given.keys() - set(names)
        if unknown:
            raise TypeError(f"{type(self).__name__}() has no {', '.join(sorted(unknown))}")
        for name in names:
            if name not in given and name not in known:
                raise TypeError(f"{type(self).__name__}() wants {name}")
            setattr(self, name, given.get(name, known.get(name)))

    return __init__


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except ValueError:
        return False
    return True


def download(engine: str, folder: Path) -> Path:
    """The newest wheel of pip's index, without what it needs."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, PACKAGES.get(engine, engine), "-d", str(folder)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engines", nargs="+", choices=WANTED)
    parser.add_argument("--wheel", type=Path, help="of the one engine, instead of the newest of the index")
    parser.add_argument("--write", action="store_true", help="keep what was read")
    options = parser.parse_args()
    changed = False
    for engine in options.engines:
        with tempfile.TemporaryDirectory() as folder:
            new = read_wheel(engine, options.wheel or download(engine, Path(folder)))
        path = FOLDER / f"{engine}.json"
        found = differences(snapshot(engine), new) if path.exists() else ["nothing was kept"]
        print(f"{engine} {new['version']}: {len(found)} differences", *found, sep="\n  ")
        changed |= bool(found)
        if options.write:
            path.write_text(_compact(new), encoding="utf-8")
    return int(changed and not options.write)


def _compact(read: Snapshot) -> str:
    """As JSON, a member of a class on a line."""
    text = json.dumps(read, indent=1)
    for _ in range(3):
        text = re.sub(r"(?<=[\[{])\s+([^\[\]{}]*?)\s+(?=[\]}])", lambda found: _joined(found[1]), text)
    return re.sub(r"\[\s+(\[[^{}]*?\])\s+\]", lambda found: f"[{_joined(found[1])}]", text) + "\n"


def _joined(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text)


if __name__ == "__main__":
    sys.exit(main())
