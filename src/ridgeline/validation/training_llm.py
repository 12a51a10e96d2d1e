"""Published language-model training runs, row by row: the row's own dimensions and plan, simulated and compared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ridgeline.errors import InputError, RidgelineError
from ridgeline.graph import Graph
from ridgeline.hardware import Cluster
from ridgeline.hardware import cluster as cluster_named
from ridgeline.hardware import device as device_named
from ridgeline.models import build, models
from ridgeline.models.llm import Decoder, Latent, decoder
from ridgeline.models.moe import Experts
from ridgeline.plan import Plan
from ridgeline.sim.generation import default_stack, stack_of
from ridgeline.sim.step import Step, simulate_step
from ridgeline.validation.spelling import catalog_name, is_no, whole_number
from ridgeline.validation.verdict import Judged, Row, Unused

GIB = float(1 << 30)
DEVICES = (
    (r"a100.*sxm.*40|a100[ -]*40 ?g", "a100-sxm-40gb"), (r"a100.*pcie.*40", "a100-pcie-40gb"),
    (r"a100.*(80 ?gb pcie|pcie)", "a100-pcie-80gb"), (r"a100|a800", "a100-sxm-80gb"), (r"gb300", "gb300"),
    (r"gb200", "gb200"), (r"\bb300", "b300"), (r"\bb200", "b200"), (r"gh200.*144", "gh200-144gb"), (r"gh200", "gh200"),
    (r"h200", "h200"), (r"h100.*pcie", "h100-pcie"), (r"h100.*nvl\b", "h100-nvl"), (r"h100|h800", "h100-sxm"),
    (r"l40s", "l40s"), (r"\bl4\b", "l4"), (r"v100.*pcie", "v100-pcie-32gb"), (r"v100.*16 ?g", "v100-sxm2-16gb"),
    (r"v100", "v100-sxm2-32gb"), (r"mi100", "mi100"), (r"mi210", "mi210"), (r"mi250", "mi250x"), (r"mi300x", "mi300x"),
    (r"mi325x", "mi325x"), (r"mi350x", "mi350x"), (r"mi355x", "mi355x"),
)  # fmt: skip
"""Catalog names by what sources write; the first pattern that is found counts."""
STACKS = (
    ("llm-foundry", r"llm-foundry|composer"), ("neusight", r"^(pytorch|torch) 2\.[01](\.\d+)?( eager.*)?$"),
    ("megatron-2022", r"megatron-lm.*2022"), ("megatron-2021", r"megatron-lm.*202[01]"), ("megascale", r"megascale"),
    ("megatron-2023", r"megatron-lm baseline"), ("megatron-core-2024", r"megatron-core|^nemo 24"),
    ("megatron-bridge-2026b", r"bridge nemo 26\.0[6-9]|bridge nemo 26\.1"),
    ("megatron-bridge-2025a", r"^nemo 25\.0[1-7]"), ("megatron-bridge-2025", r"bridge nemo 25|^nemo 25"),
    ("megatron-bridge", r"bridge"), ("mlperf-2025b", r"(nemo framework|pytorch nvidia) release 25\.(0[7-9]|1)"),
    ("mlperf-2025", r"(nemo framework|pytorch nvidia) release 25"), ("mlperf-2023", r"nemo framework 12\.1"),
    ("mlperf-2024", r"nemo framework|nvidia|ngc"),
    ("maxtext", r"maxtext|jax"), ("megatron-core-2024", r"meta internal|hai-llm|nemo|megatron"),
    ("llm-foundry", r"fsdp|deepspeed|torchtitan|mosaic"),
)  # fmt: skip
"""Software generations by what sources write."""


def judge(rows: Sequence[Row]) -> Iterable[Judged | Unused]:
    """Every row as a verdict: seconds of a step, or bytes of memory, or why it cannot be judged."""
    for row in rows:
        try:
            yield _judged(row)
            if row.number("peak_mem_gib"):
                yield _peak(row)
        except RidgelineError as error:
            yield Unused(row=row.line, source=source_of(row), why=str(error))
        except (ArithmeticError, LookupError, ValueError, AssertionError) as error:
            why = f"its configuration cannot be simulated ({type(error).__name__}: {error})"
            yield Unused(row=row.line, source=source_of(row), why=why)


def _judged(row: Row) -> Judged:
    case = case_of(row)
    metric = row.text("metric").lower()
    if metric in MEMORY:
        measured, predicted, unit = _memory(row, case, metric)
        low, high = predicted * 0.85, predicted * 1.15
    else:
        step = run(case)
        measured, unit = measured_s(row, case), "s"
        outside = outside_s(row, step)
        predicted = step.step_s - outside
        low, high = (s - outside for s in step.interval_s)
    return Judged(row=row.line, key=f"{row.text('config_id')}:{metric}", source=source_of(row), what=case.words(),
                  metric=metric, unit=unit, measured=measured, predicted=predicted, low=low, high=high)  # fmt: skip


def _peak(row: Row) -> Judged:
    """A row that also publishes what its allocator handed out at most."""
    case, measured = case_of(row), row.number("peak_mem_gib")
    predicted = max(f.allocated_bytes for f in run(case).footprints) / GIB
    return Judged(row=row.line, key=f"{row.text('config_id')}:peak_mem_gib", source=source_of(row),
                  what=case.words(), metric="peak_mem_gib", unit="GiB", measured=measured or 0.0, predicted=predicted,
                  low=predicted * 0.85, high=predicted * 1.15)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A row understood: model, plan, cluster and software generation, and what had to be assumed."""

    name: str
    config: Decoder | None  # None: a network of the zoo
    seq: int
    plan: Plan
    cluster: Cluster
    stack: str
    assumed: tuple[str, ...] = ()

    def words(self) -> str:
        return f"{self.name} seq {self.seq} on {self.cluster.name}: {self.plan.words()} [{self.stack}]"


def case_of(row: Row) -> Case:
    """What a row describes; raises with what is missing."""
    cluster = _cluster(row)
    stack = _stack(row, cluster)
    name, config = _model(row, stack)
    seq = _whole(row, "seq")
    plan, assumed = _plan(row, config, cluster, stack)
    if plan.global_batch < plan.dp * plan.micro_batch:
        raise InputError(f"{plan.dp} data-parallel ranks cannot share a global batch of {plan.global_batch}")
    if plan.world != cluster.num_devices:
        raise InputError(f"dp·tp·pp·cp = {plan.world}, but the row has {cluster.num_devices} devices")
    return Case(name, config, seq, plan, cluster, stack, assumed)


@lru_cache(maxsize=256)
def _graph(name: str, config: Decoder | None, batch: int, seq: int, precision: str) -> Graph:
    wide = precision if precision in ("fp16", "fp32", "tf32") else "bf16"
    if config is None:
        return build(name, batch=batch, seq=seq, mode="train", precision=wide, optimizer="adamw_fused")
    return decoder(name, config, batch=batch, seq=seq, precision=wide)


def graph_of(case: Case) -> Graph:
    return _graph(case.name, case.config, case.plan.micro_batch, case.seq, case.plan.precision)


def run(case: Case) -> Step:
    """Simulate the row."""
    return simulate_step(graph_of(case), case.plan, case.cluster, stack_of(case.stack, case.cluster.device))


# Reading a row.


def source_of(row: Row) -> str:
    """What `validate` groups by: a document (of one that grows with releases, its section for a release).

    Of repositories that keep a file for every result (MLPerf's rounds, NeuSight, Calculon) it is the repository, and
    for MLPerf the submitter: a source of one file would be a source of one row.
    """
    text = row.text("source")
    found = re.match(r"github:(mlcommons/training_results_v[\d.]+/[^/]+|sitar-lab/NeuSight|calculon-ai/calculon)", text)
    return f"github:{found[1]}" if found else text


def _whole(row: Row, name: str, default: int | None = None) -> int:
    found = whole_number(row.text(name))
    if found:
        return found
    if found == 0 and default is None:
        raise InputError(f"{name} cannot be 0")
    text = row.text(name).lower()
    if found is None and text and not re.match(r"(not stated|n/?[as]\b|unknown|\?|-$)", text):
        raise InputError(f"{name} {row.text(name)!r} is no whole number")
    if default is None:
        raise InputError(f"the row does not say {name}")
    return default


def _cluster(row: Row) -> Cluster:
    name = catalog_name(row.text("device"), DEVICES)
    if name is None or device_named(name).kind != "gpu":
        raise InputError(f"device {row.text('device')!r} is not a GPU the simulator knows")
    num = _whole(row, "num_devices")
    change = _network(row.text("interconnect"))
    if name == "v100-sxm2-32gb" and num <= 16:
        change = ""
    half = " sms=0.5x hbm_bandwidth=0.5x" if name == "mi250x" else ""  # one die of two is one device to programs
    return cluster_named(f"{name}*{num}{_odd_host(name, num)}{change}{half}")


def _odd_host(name: str, num: int) -> str:
    """Devices that do not fill the usual hosts: the largest host that divides them."""
    usual = cluster_named(f"{name}*1").host.num_devices
    if num <= usual or num % usual == 0:
        return ""
    fits = max(d for d in range(1, usual + 1) if num % d == 0)
    return f" devices_per_host={fits}"


def _network(text: str) -> str:
    """A stated network that differs from the system's own."""
    rate = re.search(r"(\d+) ?gbps/node", text.lower())
    if rate:
        return f" scaleout={int(rate[1]) // 8}Gb"
    return " scaleout=200Gb" if "200gb/s per gpu" in text.lower() else ""


BOUND = ("neusight",)
"""Generations that are what they are on any device."""


def _stack(row: Row, cluster: Cluster) -> str:
    """The generation that software belongs to; one nobody knows counts as the newest fitted on the device."""
    text = row.text("software").lower()
    if "mlcommons" not in row.text("source") and not row.text("config_id").lower().startswith("mlperf"):
        text = re.sub(r"^(nvidia )?nemo (framework )?(container |release |version |v)?(?=\d)", "nemo ", text)
        text = re.sub(r"bridge[^\d]*(?=2\d\.\d\d)", "bridge nemo ", text)
    found = next((name for name, pattern in STACKS if re.search(pattern, text)), None)
    if found is None or device_named(stack_of(found, cluster.device).device).arch != cluster.device.arch:
        return found if found in BOUND else default_stack(cluster.device, cluster.num_devices, _precision(row))
    return found


KIMI_K2 = Decoder(layers=61, hidden=7168, heads=64, ffn=18432, vocab=163840, latent=Latent(1536, 512, 128, 64, 128),
                  experts=Experts(384, 8, 2048, 2048, router="sigmoid_groups", dense_layers=1))  # fmt: skip
"""moonshotai/Kimi-K2 config.json, recalled; rows name the model and give no dimensions."""


def _model(row: Row, stack: str) -> tuple[str, Decoder | None]:
    name = row.text("model")
    known = _zoo(name)
    if known is not None:
        return known, None
    if "kimi" in name.lower() and "k2" in name.lower() and row.number("layers") is None:
        return name, KIMI_K2
    if not any(row.text(n) for n in ("layers", "hidden", "heads")) and (same := _known(name)):
        return same, None
    layers, hidden, heads = (_whole(row, n) for n in ("layers", "hidden", "heads"))
    ffn = _whole(row, "ffn", 4 * hidden)
    vocab = _whole(row, "vocab", 50304)
    kv = _whole(row, "kv_heads", heads)
    if heads % kv or hidden % heads:
        raise InputError(f"{heads} heads share neither {kv} heads of keys nor a width of {hidden} evenly")
    experts = _experts(row, ffn, name)
    plain = ffn == 4 * hidden and experts is None
    unfused = is_no(row.text("flash_attn"))
    made = Decoder(layers=layers, hidden=hidden, heads=heads, kv_heads=kv, ffn=ffn, vocab=vocab, experts=experts,
                   windows=_windows(row),
                   core="unfused" if unfused else "sdpa", lora=16 if "lora" in name.lower() else 0,
                   lora_out=stack.startswith("mlperf"),  # NeMo and Megatron-Bridge adapt queries, keys, values alone
                   head_dim=128 if "qwen3" in name.lower() else 0, qk_norm="qwen3" in name.lower(),
                   fused=True)  # fmt: skip
    if not plain:
        return name, made
    rotary = "nemotron" in name.lower()  # no biases either (NeMo-Framework-Launcher's conf/training/nemotron)
    opt = name.lower().startswith("opt")  # ReLU, and no dropout on probabilities, by its published configuration
    act = "gelu_new" if "gpt2" in name.lower() and stack == "neusight" else "relu" if opt else "gelu"
    return name, replace(made, act=act, gated=False, norm="layer_norm", conv1d=not rotary, tied=not rotary,
                         fused=True, qkv_bias=not rotary, o_bias=not rotary, mlp_bias=not rotary,
                         positions=0 if rotary else _whole(row, "seq"),
                         dropout=unfused, score_dropout=not opt)  # fmt: skip


def _known(name: str) -> str | None:
    """A language model of the zoo that a row names and gives no sizes of; not one that is tuned through adapters."""
    plain = re.sub(r"[^a-z0-9.]", "", name.lower()).replace("llama3.1", "llama3").replace("llama3.3", "llama3")
    if re.search(r"lora|peft|adapter", plain):
        return None
    cards = {card.name.replace("-", "").replace("llama3.1", "llama3"): card.name for card in models()}
    return cards.get(plain)


SHORT_DOCUMENT = 128
"""Keys that a token of a packed sequence of short documents meets, in the tiles attention kernels work by.

NeMo's fine-tuning results are of SQuAD packed to the stated length (the prose of its performance summaries says so):
contexts of some 120 words with a question and an answer, about 190 tokens; their own arithmetic a token leaves
attention out.
"""


def _windows(row: Row) -> tuple[int, ...]:
    """Fine-tuning under NeMo packs short documents, none of which sees another."""
    tuned = re.search(r"\b(sft|lora|peft)\b", row.text("model").lower().replace("_", " "))
    return (SHORT_DOCUMENT,) if tuned and re.match(r"nemo 2\d", row.text("software").lower()) else (0,)


def _zoo(name: str) -> str | None:
    text = re.sub(r"[ _-]", "", name.lower())
    return next((known for word, known in (("deepseekv3", "deepseek-v3"), ("gptoss120b", "gpt-oss-120b"),
                                           ("gptoss20b", "gpt-oss-20b")) if word in text), None)  # fmt: skip


def _experts(row: Row, ffn: int, name: str) -> Experts | None:
    num = row.number("experts")
    if not num or num < 2:
        return None
    return Experts(int(num), _whole(row, "topk"), ffn)


def _plan(row: Row, config: Decoder | None, cluster: Cluster, stack: str) -> tuple[Plan, tuple[str, ...]]:
    assumed = [n for n in ("mbs", "vp") if row.number(n) is None]
    tp, pp = (_whole(row, n) for n in ("tp", "pp"))
    cp, ep = (_whole(row, n, 1) for n in ("cp", "ep"))  # sources from before these say nothing of them
    vp = _whole(row, "vp", 0) or _likely_chunks(row, pp, config)
    dp = _whole(row, "dp", max(1, cluster.num_devices // (tp * pp * cp)))
    sharding = row.text("optimizer_sharding").lower()
    zero, group = _zero(sharding)
    dispatch, beside = _dispatch(row, cluster)
    gbs = _whole(row, "gbs")
    tokens = _whole(row, "seq") // cp
    mbs = _whole(row, "mbs", 0) or (max(1, gbs // dp) if stack == "neusight"
                                    else _likely_micro_batch(gbs, dp, pp, tokens))  # fmt: skip
    lora = config is not None and config.lora > 0
    tuned = stack.startswith(("megatron-core", "megatron-bridge", "mlperf", "megascale"))
    if not sharding and tuned and not lora:
        zero = 1  # the distributed optimizer is what these frameworks' recipes run with
    plan = Plan(
        tp=tp, pp=pp, cp=cp, ep=ep, dp=dp, vp=vp, schedule="interleaved" if vp > 1 else "1f1b", zero=zero,
        shard_group=group, micro_batch=mbs, global_batch=gbs,
        sequence_parallel=tp > 1 and not is_no(row.text("seq_parallel")),
        precision=_precision(row), recompute=_recompute(row), recompute_layers=_recompute_layers(row),
        overlap_tp=tuned and tp > 1,
        overlap_grads=stack not in BEFORE_OVERLAP, overlap_params=stack not in BEFORE_OVERLAP,
        overlap_ep=beside, execution=_execution(stack), replayed=_replayed(row, cluster),
        attention=_attention(stack, cluster, config), dispatch=dispatch,
        narrow_attention=_narrow_attention(row, stack, cluster),
        reduce_dtype="bf16" if stack.startswith(("llm-foundry", "mlperf", "megatron-bridge")) else "fp32",
        narrow_params=stack.startswith("mlperf"), narrow_activations=stack.startswith("mlperf") and lora,
        gather_dtype="fp32" if "mixed_precision=default" in sharding else "",
    )  # fmt: skip
    return plan, tuple(assumed)


BEFORE_OVERLAP = ("megatron-2021", "megatron-2022")
"""Generations that reduced gradients after the last backward."""


def _execution(stack: str) -> str:
    return {"llm-foundry": "eager", "neusight": "eager"}.get(stack, "compiled")


RECIPES = (
    (r"25\.\d+ gb\d+ (qwen3|deepseek|kimi)", "hybrid", False), (r"25\.\d+ h100\S* deepseek", "deep", True),
    (r"25\.\d+ (\S+ qwen3.235b|h100\S* qwen3)", "all-to-all", True), (r"25\.", "all-to-all", False),
    (r"26\.0\d\S* h100\S* qwen3.235b|26\.02\S* b300 qwen3.235b", "all-to-all", True),
    (r"26\.0\d\S* b200 qwen3.235b|26\.02 b200 qwen3.30b", "all-to-all", False),
    (r"26\.0\d\S* (b200|h100\S*) kimi|26\.0[2-5]\S* \S+ gpt.oss", "all-to-all", False),
    (r"26\.0[6-9]\S* gb", "hybrid", True), (r"26\.", "hybrid", False),
)  # fmt: skip
"""How Megatron-Bridge's performance recipes of a release send tokens to experts, and whether beside other work.

By release, system and model, where a row's own recipe was not found. Read in scripts/performance/configs of
NVIDIA-NeMo/Megatron-Bridge at v0.2.2 (25.11), v0.3.0 (26.02), v0.4.0, v0.4.2 (26.04) and v0.5.0 (26.06).
"""


def _dispatch(row: Row, cluster: Cluster) -> tuple[str, bool]:
    """How tokens reach their experts and whether overlapped: as the row's recipe says, else as its release's do."""
    notes = row.text("notes").lower()
    said = next((name for word, name in (("tokendrop", "drop"), ("hybridep", "hybrid"), ("deepep", "deep"))
                 if word in notes), "")  # fmt: skip
    beside = "moe_a2a_overlap=true" in notes
    release = re.search(r"bridge nemo (\d+\.\d+\S*)", row.text("software").lower())
    if release is None:
        return said or "all-to-all", beside
    words = f"{release[1]} {cluster.device.name} {row.text('model').lower()}"
    usual, hidden = next(((how, over) for pattern, how, over in RECIPES if re.match(pattern, words)),
                         ("all-to-all", False))  # fmt: skip
    if said == "drop":
        return said, beside
    if "recipe " in notes and "perf_recipes/" not in notes:  # since v0.6.0 recipes are calls that set these elsewhere
        return said or "all-to-all", beside
    return said or usual, beside or hidden


def _replayed(row: Row, cluster: Cluster) -> bool:
    """Whole steps as one graph: said by the recipe; since v0.6.0 of Megatron-Bridge set out of its sight."""
    notes = row.text("notes").lower()
    if re.search(r"cuda_graph_impl=full_iteration|cuda_graph_impl=local, cuda_graph_scope=full_iteration", notes):
        return True
    words = f"{cluster.device.name} {row.text('precision')} {row.text('model')}".lower()
    return "perf_recipes/" in notes and bool(re.match(r"(gb|b300).*(mx|nvfp4).*(qwen3|deepseek|gpt.oss)", words))


def _attention(stack: str, cluster: Cluster, config: Decoder | None) -> str:
    """The library a generation of software brought for attention."""
    if config is not None and config.core == "unfused":
        return ""
    newer = cluster.device.arch not in ("ampere", "volta", "ada")
    return "cudnn" if newer and stack.startswith(("megatron-bridge", "mlperf")) else "fa2"


NARROW_ATTENTION = (
    r"26\.0[6-9]\S* gb[23]00 mxfp8 (qwen3|gpt.oss)", r"26\.0[6-9]\S* b300 mxfp8 qwen3.30b",
    r"26\.0[6-9]\S* gb300 mxfp8 deepseek", r"26\.0[89]\S* b300 mxfp8 (deepseek|gpt.oss|qwen3)",
)  # fmt: skip
"""Recipes of Megatron-Bridge that set fp8_dot_product_attention, at v0.5.0 (26.06) and v0.6.0 (26.08)."""


def _narrow_attention(row: Row, stack: str, cluster: Cluster) -> bool:
    """Attention in eight bits: by recipe; MLPerf's fine-tuning and its small pretraining set FP8_DPA=1."""
    name, precision = row.text("model").lower(), _precision(row)
    if stack.startswith("mlperf"):
        return precision in ("fp8", "mxfp8", "nvfp4") and bool(re.search(r"lora|\b8b\b", name))
    release = re.search(r"bridge nemo (\d+\.\d+\S*)", row.text("software").lower())
    words = f"{release[1]} {cluster.device.name} {precision} {name}" if release else ""
    return any(re.match(pattern, words) for pattern in NARROW_ATTENTION)


MICRO_TOKENS = 8192
"""Tokens of a rank's micro-batch beyond which recipes seldom go: activations of that many fill what a device has."""


def _likely_micro_batch(gbs: int, dp: int, pp: int, seq: int) -> int:
    """Not stated: one, or with no pipeline what leaves two micro-batches of sequences that are short enough."""
    per_rank = max(1, gbs // dp)
    return 1 if pp > 1 else max(1, min(4, per_rank // 2, MICRO_TOKENS // max(1, seq)))


def _likely_chunks(row: Row, pp: int, config: Decoder | None) -> int:
    """Not stated: frameworks since the interleaved schedule use as many chunks as divide a stage's layers."""
    old = re.search(r"2020|jan 2021|pytorch|meta internal", row.text("software").lower())
    if pp == 1 or config is None or old or config.layers % pp:
        return 1
    each = config.layers // pp
    return max(v for v in range(1, 9) if each % v == 0)


def _zero(text: str) -> tuple[int, int]:
    if "fsdp=8" in text:
        return 3, 8
    if "shard_grad_op" in text:
        return 2, 0
    if re.search(r"full_shard|zero-? ?3|\bfsdp2?\b(?!=)|fully.shard", text):
        return 3, 0
    return (0, 0) if not text or is_no(text) or re.fullmatch(r"ddp|replicated|data parallel", text) else (1, 0)


def _precision(row: Row) -> str:
    text = row.text("precision").lower()
    if not text:
        raise InputError("the row does not say its precision")
    if "ambiguous" in text:
        raise InputError(f"precision {row.text('precision')!r} is ambiguous")
    for name, pattern in PRECISIONS:
        if re.search(pattern, text):
            blockwise = name == "mxfp8" and re.search(r"h[12]00|h800", row.text("device").lower())
            return "fp8" if blockwise else name
    raise InputError(f"unknown precision {row.text('precision')!r}")


PRECISIONS = (
    ("nvfp4", r"fp4"), ("mxfp8", r"mxfp8|fp8.mx"), ("fp8", r"fp8|float8|e4m3"), ("bf16", r"bf16|bfloat"),
    ("fp16", r"fp16|float16|\bhalf|\bamp\b"), ("tf32", r"tf32"), ("fp32", r"fp32|float32|\bsingle"),
)  # fmt: skip
"""What sources write, the narrowest first: a recipe in few bits names the wide ones beside them."""


def _recompute(row: Row) -> str:
    text = row.text("recompute").lower()
    if text.startswith("selective:"):
        return text
    if is_no(text) or text.startswith("not stated"):
        return "none"
    if re.match(r"full|yes\b|true\b|all\b|uniform|block\b", text):
        return "full"
    return "selective" if re.match(r"selective|core|attention", text) else "none"


def _recompute_layers(row: Row) -> int:
    """``full:block 5 layers`` recomputes the first five of a stage."""
    found = re.match(r"full:block (\d+)", row.text("recompute").lower())
    return int(found[1]) if found else 0


# What was measured, in seconds or bytes.

MEMORY = ("activation_mem_gib", "activation_mem_pct_of_tp_baseline", "params_plus_optimizer_mem_gib")


def measured_s(row: Row, case: Case) -> float:
    """Seconds of a step from whatever the row publishes."""
    metric, value, unit = row.text("metric").lower(), row.number("value"), row.text("unit").lower()
    metric = re.sub(r"\s+", "_", metric.replace("/", "_per_"))
    if not value or value < 0:
        raise InputError("the row has no value")
    batch, world = case.plan.global_batch, case.plan.world
    ranks = world if re.search(r"per_(device|gpu|chip)|/ ?(gpu|device|chip)", f"{metric} {unit}") else 1
    if re.fullmatch(STEP_TIME, metric):
        return value / 1e3 if re.match(r"ms|milli", unit) or re.search(r"_ms\b|\(ms\)|^ms_", metric) else value
    if re.match(r"tokens?_per_s", metric):
        return batch * case.seq / value / ranks
    if re.match(r"(samples?|sequences?)_per_s", metric):
        return batch / value / ranks
    if re.match(r"(hw_|model_)?tflops?", metric):
        return batch * case.seq * flops_per_token(row, case) / (value * 1e12) / world
    raise InputError(f"metric {metric!r} is no step time")


STEP_TIME = r"(step|iteration|iter)_?time(_?\(?m?s\)?)?|(m?s|sec|seconds)_per_(step|iteration|iter)"


def flops_per_token(row: Row, case: Case) -> float:
    """The convention of the source: 6N + 12·L·h·s, of Megatron's papers of 2021 with a forward pass more."""
    c = case.config
    if c is None:
        raise InputError("arithmetic is published, but not how it was counted for this model")
    if not any(word in row.text("software").lower() for word in ("megatron", "nemo", "maxtext")):
        raise InputError("arithmetic is published, but not how it was counted")
    layers, h, seq, vocab = c.layers, c.hidden, case.seq, c.vocab
    if "hw" in row.text("metric").lower():
        return 96.0 * layers * h * h * (1 + seq / (6 * h) + vocab / (16 * layers * h))
    kv, wide = c.hkv / c.heads, c.ffn / h * (1.5 if c.gated else 1.0)
    seen = 0.5 if _counts_half(row) else 1.0
    return 12.0 * layers * h * h * (1 + kv + seen * seq / h + wide + vocab / (2 * layers * h))


def _counts_half(row: Row) -> bool:
    """NeMo counts causal attention once since August 2025 (its flops_formulas.py), Megatron-Bridge from its start."""
    text = row.text("software").lower()
    release = re.search(r"nemo\D{0,20}(\d\d)\.(\d\d)", text)
    return "bridge" in text or (release is not None and (int(release[1]), int(release[2])) >= (25, 9))


def outside_s(row: Row, step: Step) -> float:
    """Seconds of a simulated step that the row did not time: around forward and backward passes alone, the rest."""
    return step.parts["optimizer"] + step.parts["other"] if "optimizer step" in row.text("unit") else 0.0


def _memory(row: Row, case: Case, metric: str) -> tuple[float, float, str]:
    """(measured, predicted, unit) of a memory row; activations are those of the first stage."""
    value = row.number("value")
    if not value:
        raise InputError("the row has no value")
    if metric == "params_plus_optimizer_mem_gib":
        found = [sum(f.by_kind[k] for k in ("parameters", "gradients", "optimizer")) for f in run(case).footprints]
        return value, sum(found) / len(found) / GIB, "GiB"
    predicted = run(case).footprints[0].by_kind["activations"] / GIB
    if metric == "activation_mem_gib":
        return value, predicted, "GiB"
    base = replace(case, plan=replace(case.plan, sequence_parallel=False, recompute="none"))
    return value, 100.0 * predicted / (run(base).footprints[0].by_kind["activations"] / GIB), "%"


def cases(rows: Sequence[Row]) -> Iterator[tuple[Row, Case]]:
    """Rows that can be simulated as step times, for fits."""
    for row in rows:
        try:
            case = case_of(row)
            measured_s(row, case)
        except RidgelineError:
            continue
        yield row, case
