"""A small Llama with random weights in vLLM: greedy tokens with attnc's backend, and without.

    python -m tests.engines.vllm_llama        # where vLLM can be imported; on a GPU where there is one

The whole engine runs: scheduler, cache manager, model runner, sampler, with prompts in chunks, a shared
prefix, and requests that come and go. No compiled part of vLLM is needed: layers are plain torch. Tokens must
be those of transformers, in single precision on the CPU, and on a GPU those of vLLM's own Triton backend,
too. Without one vLLM's CPU platform has stand-ins. `--latent` runs a DeepSeek with latent attention, whose
prompts vLLM gives to compiled kernels alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from typing import Any

import torch

from tests.engines.standins import VLLM, register_models, stand_in

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "num_key_value_heads": 2,
        "head_dim": 32,  # the smallest that vLLM's Triton backend takes
        **_SIZES,
    },
    "deepseek": {
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "kv_lora_rank": 256,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 64,
        "v_head_dim": 16,
        "first_k_dense_replace": 2,
        "n_routed_experts": 2,  # of layers behind those that are dense, which are all
        **_SIZES,
    },
}
#: Of weights under which the likeliest token leads at every step by more than products of tf32 are off, which
#: vLLM's Triton backend makes of single precision, or than types of 16 bits round.
SEEDS = {"llama": 5, "deepseek": 5}
MODULES = {"llama": "llama.LlamaForCausalLM", "deepseek": "deepseek_v2.DeepseekV2ForCausalLM"}
#: attnc's backend, and vLLM's own where it runs such a model without compiled parts.
BACKENDS = {"llama": ("CUSTOM", "TRITON_ATTN"), "deepseek": ("ATTNC_MLA",)}


_PREFIX = list(range(3, 35))
PROMPTS = [[5, 6, 7], [*_PREFIX, *range(40, 70)], [*_PREFIX, 90, 91], [9] * 17, [*_PREFIX, 3]]
TOKENS = 6


def weights(model: str) -> Any:
    """A model of transformers, with weights that let attention decide what follows."""
    import transformers

    config = transformers.AutoConfig.for_model(**MODELS[model])
    torch.manual_seed(SEEDS[model])
    made: Any = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in made.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(std=0.5 if "embed" in name or "lm_head" in name else 0.2)
    return made


def reference(model: str) -> list[list[int]]:
    """Greedy tokens of transformers, prompt by prompt."""
    made, found = weights(model).eval(), []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(TOKENS):
            with torch.no_grad():
                tokens.append(int(made(torch.tensor([tokens])).logits[0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


def generate(model: str, backend: str) -> list[list[int]]:
    """Greedy tokens of a few prompts, from a process's only engine."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    stand_in(VLLM)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        _stand_in_for_a_platform(backend)
    from attnc.adapters.vllm import register

    register()
    from vllm import LLM, SamplingParams

    register_models(MODULES[model])
    more: dict[str, Any] = {}
    if device == "cuda":
        more = {
            "attention_config": {"backend": backend},
            "gpu_memory_utilization": 0.05,  # which must be free, whoever else is there
            "kv_cache_memory_bytes": 1 << 26,
        }
        if backend == "ATTNC_MLA":
            more["attention_config"]["mla_prefill_backend"] = "CUSTOM"
    with tempfile.TemporaryDirectory() as folder:
        weights(model).save_pretrained(folder)
        engine = LLM(
            model=folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32" if model == "llama" else "float16",
            block_size=16,
            max_model_len=160,
            max_num_seqs=4,
            max_num_batched_tokens=48,
            seed=0,
            compilation_config={"custom_ops": ["none"]},
            **more,
        )
    asked = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    found = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], asked)
    return [list(request.outputs[0].token_ids) for request in found]


def _stand_in_for_a_platform(backend: str) -> None:
    """vLLM's CPU platform, with a backend that it would not choose, and without its compiled operations."""
    from attnc.verify.interpreter import ensure_interpreter

    ensure_interpreter()
    import vllm.platforms as platforms
    from vllm.platforms.cpu import CpuPlatform

    def chosen(selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        path: str = AttentionBackendEnum[backend].get_path()
        return path

    platform: Any = type("Platform", (CpuPlatform,), {"get_attn_backend_cls": staticmethod(chosen)})
    platforms._current_platform = platform()
    operations: Any = torch.ops._C
    operations.init_cpu_memory_env = lambda *given: ""
    operations.init_cpu_threads_env = lambda *given: ""
    operations.greedy_argmax = lambda logits: logits.argmax(-1)
    operations.compute_slot_mapping_kernel_impl = slot_mapping


def slot_mapping(
    starts: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, slots: torch.Tensor, block: int
) -> None:
    """Stands in for vLLM's compiled operation: where the keys of tokens go, -1 behind the last."""
    slots.fill_(-1)
    ends = starts.tolist()
    for request, (first, last) in enumerate(pairwise(ends)):
        at = positions[first:last]
        slots[first:last] = table[request, at // block].long() * block + at % block


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--latent", action="store_true", help="a DeepSeek with latent attention")
    parser.add_argument("--backend", help="this one alone, its tokens as JSON")
    options = parser.parse_args()
    model = "deepseek" if options.latent else "llama"
    if options.backend:
        print("tokens", json.dumps(generate(model, options.backend)), flush=True)
        return 0
    command = [sys.executable, "-m", "tests.engines.vllm_llama", *sys.argv[1:], "--backend"]
    tokens = {}
    for backend in BACKENDS[model] if torch.cuda.is_available() else BACKENDS[model][:1]:
        ran = subprocess.run([*command, backend], stdout=subprocess.PIPE, text=True, check=True)
        lines = [line for line in ran.stdout.splitlines() if line.startswith("tokens ")]
        tokens[backend] = json.loads(lines[-1].removeprefix("tokens "))
    tokens["transformers"] = reference(model)
    for name, found in tokens.items():
        print(f"{name}: {found}")
    are_same = all(found == tokens["transformers"] for found in tokens.values())
    print("the same tokens" if are_same else "OTHER TOKENS")
    return int(not are_same)


if __name__ == "__main__":
    sys.exit(main())
