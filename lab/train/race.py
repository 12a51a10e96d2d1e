"""Whole training steps against rivals on one GPU, in a time that is given: ``python -m lab.train race --out FILE``.

First a check: six steps of two layers of each model, ours against ``transformers`` in float32 masters and PyTorch's
AdamW from the same weights, on tokens that are drawn afresh for every step; losses have to agree. Then contenders take
turns, ours before and after the strongest rival, each in a process of its own, because two models do not fit, and
because what one does to the allocator or to compilers must not touch the next. A process reports every step as it
ends, and the file is written each time: a run that is cut off keeps what it measured, and a contender that fails is a
row that says why. Two commands of nine minutes measure everything: ``--models 1b,moe`` and ``--models 8b,8b-fp8``.

Rivals that are not installed are looked for in ``lab/train/rivals`` (ignored by git): pure Python, put there by
``pip install --no-deps --target lab/train/rivals liger-kernel==0.8.5 torchao==0.18.0 torchtitan==0.2.2``.
``--tiny`` runs everything with small sizes on the CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192,
         "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "eos_token_id": 128001, "bos_token_id": 128000}  # fmt: skip
LLAMA_8B = {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "1b": {"config": {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                      "num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True},
           "length": 2048, "micro": 16, "sequences": 16, "optimizer": "adamw",
           "rivals": ("compiled", "liger", "titan", "eager")},
    "moe": {"config": {"model_type": "qwen3_moe", "vocab_size": 50304, "hidden_size": 1024, "num_hidden_layers": 16,
                       "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "intermediate_size": 4096,
                       "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
                       "norm_topk_prob": True, "max_position_embeddings": 8192, "eos_token_id": 0, "bos_token_id": 0},
            "length": 2048, "micro": 8, "sequences": 8, "optimizer": "adamw",
            "rivals": ("compiled", "liger", "eager")},
    "8b": {"config": LLAMA_8B, "length": 8192, "micro": 1, "sequences": 1, "optimizer": "adamw-8bit",
           "rivals": ("torchao", "liger")},
    "8b-fp8": {"config": LLAMA_8B, "length": 8192, "micro": 1, "sequences": 1, "optimizer": "adamw-8bit", "fp8": True,
               "rivals": ("torchao",)},
}  # fmt: skip
# Seconds that a contender may take: a process starts in 15, a forecast and a model take 10 each, torch.compile 50
SECONDS = {"check": 60, "ours": 95, "compiled": 110, "titan": 110, "torchao": 130, "liger": 70, "eager": 60}
RIVALS = Path(__file__).parent / "rivals"
Step = Callable[[], dict[str, Any]]


def tiny(of: dict[str, Any]) -> dict[str, Any]:
    small = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 4, "eos_token_id": 0, "bos_token_id": 0}  # fmt: skip
    if "num_experts" in of["config"]:
        small |= {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
    return {**of, "config": {**of["config"], **small}, "length": 64}


# --- contenders: run in a process of their own ------------------------------------------------------------------------


def ours(of: dict[str, Any], folder: Path, device: str, **changes: Any) -> tuple[Step, Any]:
    """Steps of the trainer as it is; weights are drawn on the device, since billions take minutes on the host."""
    import torch

    from ridgeline.llm.train import trainer as module

    def drawn(config: Any, seed: int) -> Any:
        def source(name: str, offset: Any, shape: Any) -> Any:
            if name.endswith(("norm.weight", "layernorm.weight")):
                return torch.ones(shape, device=device)
            return torch.empty(shape, device=device).normal_(0.0, config.init_std)

        return source

    torch.manual_seed(0)
    module.seeded = drawn  # type: ignore[assignment]
    trainer = module.Trainer(module.Settings.of({
        "model": str(folder / "config.json"), "out": str(folder / "out"), "steps": 1_000_000, "device": device,
        "data": {"tokens": str(folder / "tokens.bin"), "document_mask": False},
        "batch": {name: of[name] for name in ("length", "micro", "sequences")},
        "optimizer": {"kind": of["optimizer"], "lr": 1e-3, "warmup": 1, "schedule": "constant"},
        "precision": {"fp8": bool(of.get("fp8"))}, "checkpoint": {"resume": False}, "balance": 0.0, **changes,
    }))  # fmt: skip

    def step() -> dict[str, Any]:
        line, _ = trainer.run_step()
        return {"loss": line.loss, "norm": line.norm}

    return step, trainer


def transformers_model(folder: Path, device: str, dtype: Any) -> Any:
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()


def theirs(of: dict[str, Any], folder: Path, device: str, kind: str) -> Step:
    """``transformers`` with SDPA, bf16 weights and a fused AdamW, as its users write it."""
    import torch

    model = transformers_model(folder, device, torch.bfloat16)
    if of["optimizer"] == "adamw-8bit" and kind != "torchao":
        model.gradient_checkpointing_enable()  # moments of the model's type and activations do not fit otherwise
    optimizer: Any = None
    if kind == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance  # type: ignore[import-not-found]

        _apply_liger_kernel_to_instance(model=model)
    if kind == "torchao":
        from torchao.optim import AdamW8bit  # type: ignore[import-not-found]

        if of.get("fp8"):
            from torchao.float8 import convert_to_float8_training  # type: ignore[import-not-found]

            convert_to_float8_training(model, module_filter_fn=lambda module, name: "lm_head" not in name)
        model.gradient_checkpointing_enable()
        optimizer = AdamW8bit(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    forward = model
    if kind in ("compiled", "torchao"):
        forward = torch.compile(model) if device == "cuda" else torch.compile(model, backend="aot_eager")
    return loop(of, folder, device, lambda x, y: forward(input_ids=x, labels=x, use_cache=False).loss,
                list(model.parameters()), optimizer)  # fmt: skip


def titan(of: dict[str, Any], folder: Path, device: str) -> Step:
    """torchtitan's Llama, each block compiled as its trainer does, with its compiled loss."""
    from unittest.mock import MagicMock

    import torch

    for name in ("tyro", "torchdata", "torchdata.stateful_dataloader", "torchdata.nodes", "datasets",
                 "datasets.distributed", "torch.utils.tensorboard", "wandb"):  # fmt: skip
        sys.modules[name] = MagicMock(StatefulDataLoader=type("StatefulDataLoader", (), {}))  # of its data and its logs
    from torchtitan.models.llama3.model.args import TransformerModelArgs  # type: ignore[import-not-found]
    from torchtitan.models.llama3.model.model import Transformer  # type: ignore[import-not-found]

    config = of["config"]
    args = TransformerModelArgs(
        dim=config["hidden_size"], n_layers=config["num_hidden_layers"], n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"], vocab_size=config["vocab_size"], max_seq_len=of["length"],
        multiple_of=32, ffn_dim_multiplier=config["intermediate_size"] / int(8 * config["hidden_size"] / 3),
    )  # fmt: skip
    with torch.device(device):
        model = Transformer(args)
    with torch.no_grad():
        model.init_weights()
    model.to(torch.bfloat16)
    model.freqs_cis = model._precompute_freqs_cis().to(device)  # complex numbers, which the line above made real
    made = model.layers["0"].feed_forward.w1.weight.shape[0]
    if made != config["intermediate_size"]:
        raise ValueError(f"its MLP is {made} wide and not {config['intermediate_size']}")
    options = {} if device == "cuda" else {"backend": "aot_eager"}
    for name, block in model.layers.named_children():
        model.layers.register_module(name, torch.compile(block, fullgraph=True, **options))

    def loss(logits: Any, y: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())

    compiled = torch.compile(loss, **options)
    return loop(of, folder, device, lambda x, y: compiled(model(x), y), list(model.parameters()), None)


def batches(of: dict[str, Any], folder: Path, device: str) -> Callable[[], Any]:
    """Sequences [micro, length + 1] from the token file, at random."""
    import numpy as np
    import torch

    kind = np.uint32 if of["config"]["vocab_size"] > 65536 else np.uint16
    tokens = np.memmap(folder / "tokens.bin", dtype=kind, mode="r")
    rng = np.random.default_rng(0)

    def draw() -> Any:
        starts = rng.integers(0, len(tokens) - of["length"] - 1, size=of["micro"])
        rows = torch.from_numpy(np.stack([tokens[s : s + of["length"] + 1] for s in starts]).astype(np.int64))
        return rows.pin_memory().to(device, non_blocking=True) if device == "cuda" else rows

    return draw


def loop(of: dict[str, Any], folder: Path, device: str, loss_of: Any, params: list[Any], optimizer: Any) -> Step:
    import torch

    if optimizer is None:
        optimizer = torch.optim.AdamW(params, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    draw, num = batches(of, folder, device), of["sequences"] // of["micro"]

    def step() -> dict[str, Any]:
        total: Any = 0.0
        for _ in range(num):
            rows = draw()
            loss = loss_of(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) / num
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"loss": float(total)}

    return step


def check(of: dict[str, Any], folder: Path, device: str) -> dict[str, Any]:
    """Six steps of two layers, ours (a replayed graph from the fourth on) and a plain loop from the same weights."""
    import torch

    from ridgeline.llm.model.weights import blocks, hf_tensors
    from ridgeline.llm.train import report

    report.device_model = lambda device: None  # no forecast of two layers
    of = {**of, "micro": 1, "sequences": 2}
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    step, trainer = ours(of, folder, device)
    (part,) = trainer.parts
    held = {block.name: mine.detach().clone() for block, mine in blocks(part)}
    with torch.device(device):
        model = transformers_model(folder, device, torch.float32)
    names = dict(model.named_parameters())
    with torch.no_grad():
        for name in held:
            for key, value in hf_tensors(trainer.config, name, held.__getitem__).items():
                if key in names:
                    names[key].copy_(value)
                elif ".experts." in key:  # one tensor of all experts, gates above ups
                    stem, _, rest = key.partition(".experts.")
                    expert, kind, _ = rest.split(".")
                    if kind == "down_proj":
                        names[f"{stem}.experts.down_proj"][int(expert)].copy_(value)
                    else:
                        half = value.shape[0]
                        rows = slice(0, half) if kind == "gate_proj" else slice(half, 2 * half)
                        names[f"{stem}.experts.gate_up_proj"][int(expert), rows].copy_(value)
                elif not config.get("tie_word_embeddings"):
                    raise KeyError(key)
    rest = [p for p in model.parameters() if p.dim() < 2]
    decayed = [p for p in model.parameters() if p.dim() > 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=1e-3,
                                  betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)  # fmt: skip
    found: dict[str, Any] = {"losses": [], "expected_losses": [], "norms": [], "expected_norms": []}
    if "num_experts" in config:  # an expert without rows has a gradient of zeros, not of what lay in memory
        x, w = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in ((64, 32), (4, 48, 32)))
        w.requires_grad_()
        ends = torch.tensor([16, 16, 40, 64], dtype=torch.int32, device=device)
        y = torch.nn.functional.grouped_mm(x, w.transpose(1, 2), offs=ends)
        (grad,) = torch.autograd.grad(y, w, torch.randn_like(y))
        found["empty_expert_is_zero"] = not bool(grad[1].count_nonzero())
    for number in range(6):
        rows = torch.from_numpy(trainer.loader.rows(number, range(2))).to(device)
        total: Any = 0.0
        for row in rows[:, None]:
            with torch.autocast(device, torch.bfloat16):
                logits = model(input_ids=row[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), row[:, 1:].flatten()) / 2
            loss.backward()
            total = total + loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mine = step()
        for name, value in (("losses", mine["loss"]), ("expected_losses", total), ("norms", mine["norm"]),
                            ("expected_norms", norm)):  # fmt: skip
            found[name].append(float(value))
    pairs = list(zip(found["losses"], found["expected_losses"], strict=True))
    found["largest_loss_gap"] = max(abs(a - b) / b for a, b in pairs)
    found["first_norm_gap"] = abs(found["norms"][0] / found["expected_norms"][0] - 1)
    # bf16 against autocast, and learning that shows: the loss of fresh tokens falls
    found["agrees"] = found["largest_loss_gap"] < 0.01 and found["first_norm_gap"] < (0.05 if of.get("fp8") else 0.02)
    found["learned"] = found["losses"][0] - found["losses"][-1]
    return found


def contend(of: dict[str, Any], contender: str, folder: Path, device: str, steps: int, say: Any) -> None:
    import torch

    cuda = device == "cuda"
    if contender == "check":
        say(check=check(of, folder, device))
        return
    trainer = None
    if contender == "ours":
        step, trainer = ours(of, folder, device)
        if trainer.forecast is not None:
            say(predicted_s=trainer.forecast.step_s, predicted_bytes=trainer.forecast.peak_bytes,
                recompute=trainer.forecast.recompute, graph=trainer.train_step._graphs is not None)  # fmt: skip
        say(notes=trainer.notes)
    elif contender == "titan":
        step = titan(of, folder, device)
    else:
        step = theirs(of, folder, device, contender)
    say(built=True)
    for number in range(5):  # ours captures its graph in the fourth
        started = time.perf_counter()
        said = step()
        say(warm_s=time.perf_counter() - started, number=number, **said)
    for number in range(steps):
        if cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        said = step()
        if cuda:
            torch.cuda.synchronize()
        say(step_s=time.perf_counter() - started, loss=said["loss"],
            peak_bytes=torch.cuda.max_memory_allocated() if cuda else 0,
            reserved_bytes=torch.cuda.max_memory_reserved() if cuda else 0)  # fmt: skip
        if cuda and number == steps // 2:
            fields = "power.draw,clocks.sm,temperature.gpu"
            shown = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
                                   capture_output=True, text=True)  # fmt: skip
            say(power_clock_temperature=shown.stdout.strip())
    if cuda and contender == "ours":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
            step()
            torch.cuda.synchronize()
        times: dict[str, list[float]] = {}
        for event in recorded.events():
            if event.device_type.name == "CUDA":
                times.setdefault(event.name[:120], []).append(event.device_time_total)
        longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:50]
        say(kernels=[{"name": name, "times": len(each), "us": round(sum(each), 1)} for name, each in longest])


def child(given: argparse.Namespace) -> None:
    of = MODELS[given.models]
    of = tiny(of) if given.tiny else of
    sys.path.append(str(RIVALS))

    def say(**what: Any) -> None:
        print("RACE " + json.dumps(what), flush=True)

    try:
        contend(of, given.contenders, Path(given.folder), "cpu" if given.tiny else "cuda", given.steps, say)
    except Exception as error:  # out of memory too: a rival that cannot run is a row that says why
        import traceback

        traceback.print_exc()
        text = str(error).splitlines()
        say(error=f"{type(error).__name__}: {text[0] if text else ''}"[:500])


# --- the referee ------------------------------------------------------------------------------------------------------


def row_of(model: str, contender: str, of: dict[str, Any], said: list[dict[str, Any]], is_tiny: bool) -> dict[str, Any]:
    """What a contender reported, summed up: also of one that was cut off."""
    from ridgeline.hardware import device
    from ridgeline.llm.model.config import ModelConfig
    from ridgeline.llm.train.report import flops_per_token

    row: dict[str, Any] = {"model": model, "contender": contender, "steps_s": [], "warm_s": [], "losses": []}
    for one in said:
        one = dict(one)
        for name, into in (("step_s", "steps_s"), ("warm_s", "warm_s"), ("loss", "losses")):
            if name in one:
                row[into].append(one.pop(name))
        row |= one
    if row["steps_s"]:
        tokens = of["sequences"] * of["length"]
        median = row["step_s"] = statistics.median(row["steps_s"])
        row["tokens_per_s"] = tokens / median
        if not is_tiny:
            flops = flops_per_token(ModelConfig.from_hf(of["config"]), of["length"])
            row["mfu_frac"] = flops * tokens / median / device("h200").peak_flops_per_s("tensor", "bf16")
        if "predicted_s" in row:
            row["step_over_predicted"] = median / row["predicted_s"]
            row["peak_over_predicted"] = row["peak_bytes"] / row["predicted_bytes"]
    return row


def shown(row: dict[str, Any]) -> str:
    parts = [f"{row['model']:8}{row['contender']:10}"]
    if "check" in row:
        found = row["check"]
        verdict, gaps = (
            "agrees" if found["agrees"] else "DISAGREES",
            (found["largest_loss_gap"], found["first_norm_gap"]),
        )
        parts.append(f"{verdict}, largest gap of losses {100 * gaps[0]:.3f} %, of the first norm {100 * gaps[1]:.2f} %")
    if "step_s" in row:
        parts.append(f"{1e3 * row['step_s']:.1f} ms  {row['tokens_per_s']:,.0f} tok/s")
        if "mfu_frac" in row:
            parts.append(f"MFU {100 * row['mfu_frac']:.1f} %  {row['peak_bytes'] / 1e9:.1f} GB")
        if "step_over_predicted" in row:
            parts.append(f"of predicted: step {row['step_over_predicted']:.3f}, peak {row['peak_over_predicted']:.3f}")
        parts.append(row.get("power_clock_temperature", ""))
    return "  ".join([*parts, row.get("error", "")])


def run_child(args: list[str], seconds: float, log: Any, heard: Callable[[dict[str, Any]], None]) -> None:
    """Run one contender; kill it, and what it started, when its time is over."""
    command = [sys.executable, "-m", "lab.train", "race", *args]
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
           "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # fmt: skip
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": log, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env=env, **options) as process:

        def stop() -> None:
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("RACE "):
                    heard(json.loads(line[5:]))
            process.wait()
        finally:
            timer.cancel()
    if process.returncode == -signal.SIGKILL:
        heard({"error": f"stopped after its {seconds:.0f} s, or killed for memory"})
    elif process.returncode:
        heard({"error": f"ended with status {process.returncode}"})


def write_files(of: dict[str, Any], folder: Path) -> None:
    """The configuration, and tokens of skewed frequencies, which a model learns within a few steps."""
    import numpy as np

    from ridgeline.llm.data.tokens import write_token_file

    config = of["config"]
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(int.from_bytes(os.urandom(4), "little"))
    frequencies = 1.0 / np.arange(8, config["vocab_size"])
    ids = rng.choice(np.arange(8, config["vocab_size"]), size=(64, of["length"] * 8), p=frequencies / frequencies.sum())
    write_token_file(folder / "tokens.bin", (row.tolist() for row in ids), vocab_size=config["vocab_size"],
                     eos=config["eos_token_id"])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="1b,moe,8b,8b-fp8")
    parser.add_argument("--contenders", default="", help="of check, ours, compiled, liger, eager, titan, torchao")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=9.3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder:
        child(given)
        return
    ends, rows = time.monotonic() + 60 * given.minutes, []
    names = given.models.split(",")
    asked = given.contenders.split(",") if given.contenders else []
    # Every model is checked and measured once before rivals spend the time; the best rival runs between two of ours
    turns = [(name, who) for who in ("check", "ours") for name in names]
    for at in range(4):
        turns += [(name, who) for name in names for who in MODELS[name]["rivals"][at : at + 1]]
        turns += [(name, "ours") for name in names] if at == 0 else []
    if not any(importlib.util.find_spec(name) for name in ("liger_kernel", "torchao")) and not RIVALS.is_dir():
        print(f"note: no {RIVALS}: rivals that are not installed will not run", file=sys.stderr)
    with tempfile.TemporaryDirectory() as root:
        for name in names:
            for purpose in ("check", "race"):
                (Path(root) / purpose / name).mkdir(parents=True)
                write_files(tiny(MODELS[name]) if given.tiny else MODELS[name], Path(root) / purpose / name)
        for name, who in turns:
            if asked and who not in asked:
                continue
            of = tiny(MODELS[name]) if given.tiny else MODELS[name]
            left = ends - time.monotonic()
            said: list[dict[str, Any]] = []
            rows.append({})

            def heard(one: dict[str, Any], name: str = name, who: str = who, of: Any = of, said: Any = said) -> None:
                said.append(one)
                rows[-1] = row_of(name, who, of, said, given.tiny)
                if given.out is not None:
                    given.out.write_text(json.dumps(rows, indent=1))

            if left < 25:
                heard({"error": "not run: no time was left"})
            else:
                folder = Path(root) / ("check" if who == "check" else "race") / name
                args = ["--models", name, "--contenders", who, "--steps", str(given.steps), "--folder", str(folder)]
                with open(Path(root) / "log", "w+") as log:
                    seconds = min(left - 5, 600 if given.tiny else SECONDS[who] * (1.3 if name.startswith("8b") else 1))
                    run_child([*args, *(["--tiny"] if given.tiny else [])], seconds, log, heard)
                    if rows[-1].get("error"):
                        log.seek(0)
                        heard({"log": log.read()[-1500:]})
            print(f"[{60 * given.minutes - (ends - time.monotonic()):5.0f} s] {shown(rows[-1])}", flush=True)


if __name__ == "__main__":
    main()
