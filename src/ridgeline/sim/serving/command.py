"""The command line of a serving engine that starts what was simulated."""

from __future__ import annotations

import re
import shlex

from ridgeline.errors import ModelError
from ridgeline.models.card import find
from ridgeline.sim.serving.simulate import Deployment, Pool

QUANTIZATION = {"fp8": "fp8", "fp8_block": "fp8", "int8": "compressed-tensors", "int4_wo": "awq"}
"""What vLLM and SGLang call formats that they make or read; mxfp4, nvfp4 and bf16 are the checkpoint's own."""


def launch_command(deployment: Deployment) -> str:
    """What starts one replica, or with prompts apart one instance of each kind; empty where the engine has none."""
    if deployment.prefill is None:
        return _one(deployment, deployment.pool, "")
    return " & ".join(_one(deployment, pool, kind)
                      for pool, kind in ((deployment.prefill, "prefill"), (deployment.pool, "decode")))  # fmt: skip


def _checkpoint(model: str) -> str:
    """What an engine can load: a network of the zoo goes by its name on the hub, anything else by its own."""
    try:
        found = re.match(r"(\S+/\S+) config\.json", find(model)[0].source)
    except ModelError:
        return model
    return found[1] if found else model


def _one(deployment: Deployment, pool: Pool, kind: str) -> str:
    """``kind`` is prefill or decode, where they are apart."""
    layout, engine, model = pool.layout, deployment.engine, shlex.quote(_checkpoint(deployment.anatomy.name))
    family = engine.name.partition("-")[0]
    quantized = QUANTIZATION.get(deployment.precision.name, "")
    narrow_cache = deployment.precision.kv == "fp8"
    if family == "vllm":
        words = [f"vllm serve {model}", f"--tensor-parallel-size {layout.tp}"]
        words += [f"--pipeline-parallel-size {layout.pp}"] if layout.pp > 1 else []
        words += [f"--data-parallel-size {layout.attention_dp}"] if layout.attention_dp > 1 else []
        words += ["--enable-expert-parallel"] if layout.ep > 1 else []
        words += [f"--quantization {quantized}"] if quantized else []
        words += ["--kv-cache-dtype fp8"] if narrow_cache else []
        words += [f"--max-num-batched-tokens {engine.chunk_tokens}", f"--max-num-seqs {engine.max_sequences}",
                  f"--gpu-memory-utilization {engine.memory_frac:g}"]  # fmt: skip
        role = {"prefill": "kv_producer", "decode": "kv_consumer"}.get(kind)
        if role:
            config = f'{{"kv_connector":"NixlConnector","kv_role":"{role}"}}'
            words.append(f"--kv-transfer-config {shlex.quote(config)}")
        return " ".join(words)
    if family == "sglang":
        words = [f"python -m sglang.launch_server --model-path {model}", f"--tp {layout.tp * layout.attention_dp}"]
        words += [f"--pp-size {layout.pp}"] if layout.pp > 1 else []
        words += [f"--dp {layout.attention_dp} --enable-dp-attention"] if layout.attention_dp > 1 else []
        words += [f"--ep {layout.ep}"] if layout.ep > 1 else []
        words += [f"--quantization {quantized}"] if quantized else []
        words += ["--kv-cache-dtype fp8_e4m3"] if narrow_cache else []
        words += [f"--chunked-prefill-size {engine.chunk_tokens}", f"--max-running-requests {engine.max_sequences}",
                  f"--mem-fraction-static {engine.memory_frac:g}"]  # fmt: skip
        words += [f"--disaggregation-mode {kind}"] if kind else []
        return " ".join(words)
    if family == "trtllm":
        words = [f"trtllm-serve {model}", f"--tp_size {layout.tp * layout.attention_dp}"]
        words += [f"--pp_size {layout.pp}"] if layout.pp > 1 else []
        words += [f"--ep_size {layout.ep}"] if layout.ep > 1 else []
        words += [f"--max_num_tokens {engine.chunk_tokens}", f"--max_batch_size {engine.max_sequences}",
                  f"--kv_cache_free_gpu_memory_fraction {engine.memory_frac:g}"]  # fmt: skip
        return " ".join(words)
    return ""
