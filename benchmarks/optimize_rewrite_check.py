"""Rewrites and substitution on the GPU at hand: right first, then what each family is worth on four models.

    python benchmarks/optimize_rewrite_check.py --out DIR [--budget-s 150] [--only attention,spellings,apply,models]

Writes optimize_rewrite.json as it goes: every check with its error against float64 beside eager's own, every time.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(ROOT / "benchmarks"))
import workloads  # noqa: F401  (lets transformers be imported beside a torchvision without its binary)

from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.in_place import attention_registry as hooks
from ridgeline.optimizer.in_place.substitution import apply, revert

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Notes:
    """Rows written after each one, and the clock they are under."""

    def __init__(self, out: Path, budget_s: float) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._path = out / "optimize_rewrite.json"
        self._end_s = time.monotonic() + budget_s
        self.rows: list[dict[str, Any]] = []

    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        self._path.write_text(
            json.dumps({"device": _device_name(), "torch": torch.__version__, "rows": self.rows}, indent=0)
        )
        print({k: v for k, v in row.items() if k != "detail"}, flush=True)


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _ms(call: Callable[[], Any], repeats: int = 10) -> float:
    """Median milliseconds of a call, the device idle before each."""
    for _ in range(3):
        call()
    if not torch.cuda.is_available():
        return 0.0
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _graph_ms(call: Callable[[], Any]) -> float | str:
    """The same inside a CUDA graph: what is left without the host."""
    if not torch.cuda.is_available():
        return 0.0
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        found = _ms(graph.replay)
        del graph
        return found
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"


# who computes attention -----------------------------------------------------------------------------------------------


def attention_race(notes: Notes) -> None:
    shapes = {"bert 32x512": (32, 16, 16, 512, 64, False), "llama 4096": (1, 32, 8, 4096, 128, True),
              "vit 64x197": (64, 16, 16, 197, 64, False), "gpt2 8x1024": (8, 25, 25, 1024, 64, True)}  # fmt: skip
    if DEVICE == "cpu":
        shapes = {"tiny": (1, 2, 2, 16, 16, True)}
    for name, shape in shapes.items():
        _race(notes, name, *shape)


def _race(notes: Notes, name: str, b: int, h: int, k: int, n: int, d: int, causal: bool) -> None:
    from torch.nn.attention import SDPBackend

    from ridgeline.kernels import attention

    q, key, v = (
        torch.randn(b, n, heads, d, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for heads in (h, k, k)
    )
    gqa = h != k
    keep = torch.ones(b, 1, 1, n, dtype=torch.bool, device=DEVICE)
    wide_mask = keep.expand(b, 1, n, n)
    runs: dict[str, Callable[[], Any]] = {
        "default": lambda: F.scaled_dot_product_attention(q, key, v, is_causal=causal, enable_gqa=gqa),
        "ridgeline": lambda: attention(q, key, v, causal),
    }
    for kind in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        runs[kind.split("_")[0].lower()] = _forced(getattr(SDPBackend, kind), q, key, v, causal, gqa, None)
        if not causal and not gqa:
            runs[f"{kind.split('_')[0].lower()} key mask"] = _forced(
                getattr(SDPBackend, kind), q, key, v, False, gqa, keep
            )
            runs[f"{kind.split('_')[0].lower()} whole mask"] = _forced(
                getattr(SDPBackend, kind), q, key, v, False, gqa, wide_mask
            )
    if hooks.TAKES_KEY_MASKS:
        runs["ridgeline key mask"] = lambda: attention(q, key, v, causal, key_mask=keep[:, 0, 0])
    for who, run in runs.items():
        try:
            with torch.no_grad():
                forward = _ms(run)
            out = run()
            seed = torch.randn_like(out)
            backward = _ms(lambda run=run, seed=seed: torch.autograd.grad(run(), (q, key, v), seed)) - forward
            notes.add(part="attention", case=name, who=who, forward_ms=forward, backward_ms=backward)
        except Exception as error:
            notes.add(part="attention", case=name, who=who, error=f"{type(error).__name__}: {str(error)[:150]}")


def _forced(kind: Any, q: Any, k: Any, v: Any, causal: bool, gqa: bool, mask: Any) -> Callable[[], Any]:
    from torch.nn.attention import sdpa_kernel

    def run() -> Any:
        with sdpa_kernel([kind]):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa)

    return run


# spellings ------------------------------------------------------------------------------------------------------------


def _spellings() -> Any:
    spec = importlib.util.spec_from_file_location("spellings", ROOT / "tests/unit/optimizer/spellings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["spellings"] = module
    spec.loader.exec_module(module)
    return module


def _error(found: Any, meant: Any) -> float:
    """Root mean square error relative to the reference's own size, the worst of all outputs."""
    pairs = zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(meant), strict=True)
    worst = 0.0
    for a, b in pairs:
        b = b.detach().double()
        size = b.square().mean().sqrt().clamp_min(1e-30)
        worst = max(worst, float((a.detach().double() - b).square().mean().sqrt() / size))
    return worst


def spellings_check(notes: Notes) -> None:
    """Every spelling in bfloat16 (float32 where no kernel is involved) through its rewrite, against float64."""
    for case in _spellings().SPELLINGS:
        for dtype in (torch.bfloat16, torch.float32):
            if notes.left_s() < 20:
                return
            torch.manual_seed(0)
            torch._dynamo.reset()
            try:
                model, args = case.make()
                wide = copy.deepcopy(model).double().to(DEVICE)
                model = model.to(DEVICE, dtype)
                args = tuple(x.to(DEVICE).to(dtype) if x.is_floating_point() else x.to(DEVICE) for x in args)
                wide_args = tuple(x.double() if x.is_floating_point() else x for x in args)
                report = Report()
                fast = compiled(model, rewrites=(case.rewrite,), report=report)
                trains = "inference" not in _modes(case.rewrite)
                with torch.set_grad_enabled(trains):
                    found, eager, meant = fast(*args), model(*args), _exact(wide, wide_args)
                ours, theirs = _error(found, meant), _error(eager, meant)
                floor = 3e-3 if dtype is torch.bfloat16 else 1e-6
                verdict = "right" if ours <= 2 * theirs + floor else "WRONG"
                notes.add(part="spelling", case=case.name, rewrite=case.rewrite, dtype=str(dtype),
                          matches=report.counts(), error=ours, eager_error=theirs, verdict=verdict,
                          refusals=[r.why for r in report.refusals])  # fmt: skip
            except Exception as error:
                notes.add(part="spelling", case=case.name, rewrite=case.rewrite, dtype=str(dtype),
                          error=f"{type(error).__name__}: {str(error)[:300]}", verdict="FAILED",
                          detail=traceback.format_exc()[-1500:])  # fmt: skip


def _modes(name: str) -> Any:
    from ridgeline.optimizer.rewrites import rewrites

    return rewrites()[name].modes


def _exact(model: Any, args: Any) -> Any:
    return model(*args)


# substitution ---------------------------------------------------------------------------------------------------------


def _small_models() -> dict[str, Any]:
    import transformers as t

    small = {
        "vocab_size": 512,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 512,
    }
    lm = t.AutoModelForCausalLM.from_config
    return {
        "llama": lambda: lm(t.LlamaConfig(num_key_value_heads=2, **small)),
        "qwen3": lambda: lm(t.Qwen3Config(num_key_value_heads=2, head_dim=64, **small)),
        "gemma": lambda: lm(t.GemmaConfig(num_key_value_heads=2, head_dim=64, **small)),
        "phi3": lambda: lm(t.Phi3Config(num_key_value_heads=2, pad_token_id=0, **small)),
        "gpt2": lambda: lm(t.GPT2Config(vocab_size=512, n_embd=256, n_layer=2, n_head=4)),
        "mixtral": lambda: lm(t.MixtralConfig(num_key_value_heads=2, num_local_experts=4, **small)),
        "bert": lambda: t.BertModel(t.BertConfig(**small)),
        "vit": lambda: t.ViTModel(t.ViTConfig(hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
                                              intermediate_size=512, image_size=64, patch_size=8)),
    }  # fmt: skip


def apply_check(notes: Notes) -> None:
    for name, make in _small_models().items():
        if notes.left_s() < 20:
            return
        try:
            torch.manual_seed(0)
            model = make().eval().to(DEVICE, torch.bfloat16)
            wide = copy.deepcopy(model).float()
            ids = torch.randint(3, 500, (4, 65), device=DEVICE)
            kwargs: dict[str, Any] = {"input_ids": ids}
            if name == "vit":
                kwargs = {"pixel_values": torch.randn(4, 3, 64, 64, device=DEVICE, dtype=torch.bfloat16)}
            if name in ("bert", "llama"):
                keep = torch.ones_like(ids)
                keep[1, 40:] = 0
                kwargs["attention_mask"] = keep
            if name not in ("bert", "vit"):
                kwargs["labels"] = ids
            wide_kwargs = {k: v.float() if v.is_floating_point() else v for k, v in kwargs.items()}
            with torch.no_grad():
                meant, eager = _main(wide(**wide_kwargs)), _main(model(**kwargs))
                done = apply(model)
                found = _main(model(**kwargs))
                eager_ms_applied = _ms(lambda model=model, kwargs=kwargs: model(**kwargs))
                revert(model)
                again = _main(model(**kwargs))
                eager_ms = _ms(lambda model=model, kwargs=kwargs: model(**kwargs))
            ours, theirs = _error(found, meant), _error(eager, meant)
            notes.add(part="apply", case=name, error=ours, eager_error=theirs, replaced=done.counts(), left=done.left,
                      verdict="right" if ours <= 2 * theirs + 1e-3 else "WRONG",
                      reverted=bool(torch.equal(again, eager)),
                      eager_ms=eager_ms, applied_ms=eager_ms_applied)  # fmt: skip
        except Exception as error:
            notes.add(part="apply", case=name, verdict="FAILED", error=f"{type(error).__name__}: {str(error)[:300]}",
                      detail=traceback.format_exc()[-1500:])  # fmt: skip


def _main(output: Any) -> torch.Tensor:
    return output.logits if "logits" in output else output.last_hidden_state


# what families are worth --------------------------------------------------------------------------------------------

_ATTENTION = ("identity", "attention", "mask", "grouped-keys")
_EPILOGUE = ("activation", "linear-activation")
_KERNELS = ("norm", "norm-call", "norm-residual", "gate", "rotary")


def _models() -> dict[str, tuple[Callable[[], Any], bool, dict[str, tuple[tuple[str, ...] | None, str]]]]:
    """name → (build, whether it trains, variants: rewrites and compiler; None is PyTorch's own)."""
    both: dict[str, tuple[tuple[str, ...] | None, str]] = {"torch.compile": (None, "inductor")}
    kernel = (*_ATTENTION, "attention-kernel")
    return {
        "resnet-50 64 channels last": (_resnet, False, both | {
            "inductor + fold": (("in-place", "identity", "fold-norm"), "inductor"),
            "inductor + fold + activation": (("in-place", "identity", "fold-norm", "conv-activation"), "inductor"),
            "none + fold": (("in-place", "identity", "fold-norm"), "none"),
            "none + fold + activation": (("in-place", "identity", "fold-norm", "conv-activation"), "none"),
        }),
        "vit-large x4 layers 64": (_vit, False, both | {
            "inductor": (_ATTENTION, "inductor"),
            "inductor + horizontal": ((*_ATTENTION, "horizontal"), "inductor"),
            "none + all kernels": ((*kernel, *_KERNELS, "horizontal"), "none"),
        }),
        "gpt2-xl x4 layers 8x1024 train": (_gpt2, True, both | {
            "inductor + mask": (_ATTENTION, "inductor"),
            "inductor + norms": ((*_ATTENTION, "norm-call", "norm-residual"), "inductor"),
            "inductor + loss": ((*_ATTENTION, "cross-entropy"), "inductor"),
            "none + all kernels": ((*_ATTENTION, *_KERNELS, "activation", "cross-entropy"), "none"),
        }),
        "gpt2-xl x4 layers 8x1024": (_gpt2, False, both | {
            "inductor + mask": (_ATTENTION, "inductor"),
            "inductor + epilogue": ((*_ATTENTION, *_EPILOGUE), "inductor"),
            "none + kernels": ((*kernel, *_KERNELS, "activation"), "none"),
            "none + kernels + epilogue": ((*kernel, *_KERNELS, *_EPILOGUE), "none"),
        }),
        "llama-8b x4 layers 1x2048": (_llama, False, both | {
            "inductor + mask": (_ATTENTION, "inductor"),
            "inductor + attention kernel + horizontal": ((*kernel, "horizontal"), "inductor"),
            "none + all kernels": ((*kernel, *_KERNELS, "horizontal"), "none"),
        }),
        "bert-large x4 layers 32x512": (_bert, False, both | {
            "inductor + attention kernel + horizontal": ((*kernel, "horizontal"), "inductor"),
        }),
        "bert-large x4 layers 32x512, mask left out": (_bert_without_mask, False, both | {
            "inductor + horizontal": ((*_ATTENTION, "horizontal"), "inductor"),
        }),
    }  # fmt: skip


def _sized(big: int, small: int) -> int:
    return big if DEVICE == "cuda" else small


def _bert() -> Any:
    import transformers as t

    config = t.BertConfig(vocab_size=_sized(30522, 99), hidden_size=_sized(1024, 64), num_hidden_layers=_sized(4, 1),
                          num_attention_heads=_sized(16, 2), intermediate_size=_sized(4096, 128))  # fmt: skip
    ids = torch.randint(0, 99, (_sized(32, 2), _sized(512, 16)))
    return t.BertModel(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _bert_without_mask() -> Any:
    model, kwargs = _bert()
    return model, {"input_ids": kwargs["input_ids"]}


def _llama() -> Any:
    import transformers as t

    config = t.LlamaConfig(vocab_size=_sized(128256, 99), hidden_size=_sized(4096, 64), num_hidden_layers=_sized(4, 1),
                           num_attention_heads=_sized(32, 4), num_key_value_heads=_sized(8, 2),
                           intermediate_size=_sized(14336, 128))  # fmt: skip
    return t.LlamaModel(config), {"input_ids": torch.randint(0, 99, (1, _sized(2048, 16))), "use_cache": False}


def _vit() -> Any:
    import transformers as t

    config = t.ViTConfig(hidden_size=_sized(1024, 64), num_hidden_layers=_sized(4, 1),
                         num_attention_heads=_sized(16, 2), intermediate_size=_sized(4096, 128),
                         image_size=_sized(224, 32), patch_size=16)  # fmt: skip
    side = _sized(224, 32)
    return t.ViTModel(config), {"pixel_values": torch.randn(_sized(64, 2), 3, side, side, dtype=torch.bfloat16)}


def _resnet() -> Any:
    import transformers as t

    small = {"depths": [1, 1, 1, 1], "embedding_size": 8, "hidden_sizes": [8, 16, 16, 16]} if DEVICE == "cpu" else {}
    side = _sized(224, 32)
    pixels = torch.randn(_sized(64, 2), 3, side, side, dtype=torch.bfloat16)
    model = t.ResNetModel(t.ResNetConfig(**small)).to(memory_format=torch.channels_last)
    return model, {"pixel_values": pixels.to(memory_format=torch.channels_last)}


def _gpt2() -> Any:
    import transformers as t

    config = t.GPT2Config(vocab_size=_sized(50257, 99), n_embd=_sized(1600, 64), n_layer=_sized(4, 1),
                          n_head=_sized(25, 2), resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    ids = torch.randint(0, 99, (_sized(8, 2), _sized(1024, 16)))
    return t.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids, "use_cache": False}


def models_race(notes: Notes) -> None:
    for name, (build, trains, variants) in _models().items():
        if notes.left_s() < 15:
            return
        torch.manual_seed(0)
        model, kwargs = build()
        model = model.to(DEVICE, torch.bfloat16).train(trains)
        kwargs = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
        everything: dict[str, Any] = {"eager": None, "applied": None} | dict(variants.items())
        for variant, made in everything.items():
            if notes.left_s() < 10:
                return
            _one_variant(notes, name, variant, made, model, kwargs, trains)
        del model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _one_variant(notes: Notes, name: str, variant: str, made: Any, model: Any, kwargs: Any, trains: bool) -> None:
    torch._dynamo.reset()
    report = Report()
    try:
        call = model
        if variant == "applied":
            apply(model)
        elif variant != "eager":
            rewrites, compiler = made
            call = (
                torch.compile(model, dynamic=False)
                if rewrites is None
                else compiled(model, rewrites=rewrites, compiler=compiler, report=report)
            )
        step = _step(model, call, kwargs, trains)
        start = time.monotonic()
        step()
        built_s = time.monotonic() - start
        _peak_reset()
        took = _ms(step)
        row = {"ms": took, "first_s": built_s, "peak_gb": _peak_gb(), "matches": report.counts()}
        if not trains:
            row["graph_ms"] = _graph_ms(step)
        row["refusals"] = sorted({f"{r.rewrite}: {r.why}"[:160] for r in report.refusals})
        notes.add(part="model", case=name, variant=variant, **row)
    except Exception as error:
        notes.add(part="model", case=name, variant=variant, error=f"{type(error).__name__}: {str(error)[:300]}",
                  detail=traceback.format_exc()[-2500:])  # fmt: skip
    finally:
        revert(model)
        report.undo()


def _step(model: Any, call: Any, kwargs: Any, trains: bool) -> Callable[[], Any]:
    if not trains:

        def infer() -> Any:
            with torch.no_grad():
                return call(**kwargs)

        return infer

    def train() -> Any:
        model.zero_grad(set_to_none=True)
        call(**kwargs).loss.backward()

    return train


def _peak_reset() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak_gb() -> float:
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


PARTS = {"attention": attention_race, "apply": apply_check, "models": models_race, "spellings": spellings_check}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=150.0)
    parser.add_argument("--only", default=",".join(PARTS))
    chosen = parser.parse_args()
    if DEVICE == "cpu":
        hooks.RUNS_ON = frozenset({"cpu", "cuda"})
    notes = Notes(chosen.out, chosen.budget_s)
    for part in chosen.only.split(","):
        try:
            PARTS[part](notes)
        except Exception as error:
            notes.add(part=part, error=f"{type(error).__name__}: {error}", detail=traceback.format_exc()[-2500:])
    wrong = [row for row in notes.rows if row.get("verdict") in ("WRONG", "FAILED")]
    print(f"{len(notes.rows)} rows, {len(wrong)} wrong or failed, {notes.left_s():.0f} s left")


if __name__ == "__main__":
    main()
