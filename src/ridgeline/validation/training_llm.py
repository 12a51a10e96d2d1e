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
from ridgeline.validation.publications import Fact, publications
from ridgeline.validation.spelling import catalog_name, is_no, whole_number
from ridgeline.validation.verdict import Judged, Row, Unused

GIB = float(1 << 30)
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
    name = catalog_name(row.text("device"), "training_llm")
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


def _stack(row: Row, cluster: Cluster) -> str:
    """The generation that software belongs to; one that is unknown counts as the newest fitted on the device."""
    text = row.text("software").lower()
    if "mlcommons" not in row.text("source") and not row.text("config_id").lower().startswith("mlperf"):
        text = re.sub(r"^(nvidia )?nemo (framework )?(container |release |version |v)?(?=\d)", "nemo ", text)
        text = re.sub(r"bridge[^\d]*(?=2\d\.\d\d)", "bridge nemo ", text)
    known = publications("training_llm")["stack"].choose({"software": text})
    found: str | None = known.get("stack")
    if found is None or device_named(stack_of(found, cluster.device).device).arch != cluster.device.arch:
        if found is not None and known.get("anywhere"):
            return found
        return default_stack(cluster.device, cluster.num_devices, _precision(row))
    return found


def _model(row: Row, stack: str) -> tuple[str, Decoder | None]:
    """The name of a network of the zoo, or a name and the dimensions that the row gives, or that its name implies."""
    name = row.text("model")
    said = publications("training_llm")["model"].choose(
        {"model": name.lower(), "stack": stack, "software": row.text("software").lower()}
    )
    if "zoo" in said:
        return said["zoo"], None
    if "layers" in said and row.number("layers") is None:
        num, topk, expert_ffn, shared_ffn = said["experts"]
        experts = Experts(num, topk, expert_ffn, shared_ffn, router=said["router"], dense_layers=said["dense_layers"])
        sizes = {key: said[key] for key in ("layers", "hidden", "heads", "ffn", "vocab")}
        return name, Decoder(**sizes, latent=Latent(*said["latent"]), experts=experts)
    if not any(row.text(n) for n in ("layers", "hidden", "heads")) and (same := _known(name)):
        return same, None
    layers, hidden, heads = (_whole(row, n) for n in ("layers", "hidden", "heads"))
    ffn = _whole(row, "ffn", 4 * hidden)
    vocab = _whole(row, "vocab", 50304)
    kv = _whole(row, "kv_heads", heads)
    if heads % kv or hidden % heads:
        raise InputError(f"{heads} heads share neither {kv} heads of keys nor a width of {hidden} evenly")
    num_experts = row.number("experts") or 0
    experts_of_row = Experts(int(num_experts), _whole(row, "topk"), ffn) if num_experts >= 2 else None
    unfused = is_no(row.text("flash_attn"))
    made = Decoder(layers=layers, hidden=hidden, heads=heads, kv_heads=kv, ffn=ffn, vocab=vocab, experts=experts_of_row,
                   windows=(said.get("window", 0),), core="unfused" if unfused else "sdpa", lora=said.get("lora", 0),
                   lora_out=said["lora_out"], head_dim=said.get("head_dim", 0), qk_norm=said.get("qk_norm", False),
                   fused=True)  # fmt: skip
    if ffn != 4 * hidden or experts_of_row is not None:
        return name, made
    rotary = said.get("positions") == "rotary"
    return name, replace(made, act=said.get("act", "gelu"), gated=False, norm="layer_norm", conv1d=not rotary,
                         tied=not rotary, fused=True, qkv_bias=not rotary, o_bias=not rotary, mlp_bias=not rotary,
                         positions=0 if rotary else _whole(row, "seq"),
                         dropout=unfused, score_dropout=said.get("score_dropout", True))  # fmt: skip


def _known(name: str) -> str | None:
    """A language model of the zoo that a row names and gives no sizes of; not one that is tuned through adapters."""
    plain = re.sub(r"[^a-z0-9.]", "", name.lower()).replace("llama3.1", "llama3").replace("llama3.3", "llama3")
    if re.search(r"lora|peft|adapter", plain):
        return None
    cards = {card.name.replace("-", "").replace("llama3.1", "llama3"): card.name for card in models()}
    return cards.get(plain)


def _plan(row: Row, config: Decoder | None, cluster: Cluster, stack: str) -> tuple[Plan, tuple[str, ...]]:
    """The plan of a row's columns; what they leave open is as the publication's recipes set it."""
    assumed = [n for n in ("mbs", "vp") if row.number(n) is None]
    tp, pp = (_whole(row, n) for n in ("tp", "pp"))
    cp, ep = (_whole(row, n, 1) for n in ("cp", "ep"))  # sources from before these say nothing of them
    vp = _whole(row, "vp", 0) or _likely_chunks(row, pp, config)
    dp = _whole(row, "dp", max(1, cluster.num_devices // (tp * pp * cp)))
    gbs, tokens = _whole(row, "gbs"), _whole(row, "seq") // cp
    known, sharding, precision = publications("training_llm"), row.text("optimizer_sharding").lower(), _precision(row)
    release = re.search(r"bridge nemo (\d+\.\d+\S*)", row.text("software").lower())
    settings = known["plan"].choose({
        "stack": stack, "sharding": sharding, "tp": tp, "lora": config is not None and config.lora > 0,
        "core": config.core if config is not None else "", "device": cluster.device.name, "arch": cluster.device.arch,
        "tensor_precision": precision, "written_precision": row.text("precision").lower(),
        "model": row.text("model").lower(), "release": release[1] if release else "",
        "notes": row.text("notes").lower(),
    })  # fmt: skip
    if sharding:
        settings |= known["sharding"].choose({"sharding": sharding}) or {"zero": 0 if is_no(sharding) else 1}
    # Not stated: one, or with no pipeline what leaves two micro-batches of sequences that are short enough. A rank's
    # micro-batch seldom has more than 8,192 tokens: their activations fill what a device has.
    likely = 1 if pp > 1 else max(1, min(4, max(1, gbs // dp) // 2, 8192 // max(1, tokens)))
    accumulates = settings.pop("accumulates", True)
    mbs = _whole(row, "mbs", 0) or (likely if accumulates else max(1, gbs // dp))
    recompute = row.text("recompute").lower()
    layers = re.match(r"full:block (\d+)", recompute)  # the first so many of a stage
    if not recompute.startswith("selective:"):
        said = {} if is_no(recompute) else known["recompute"].choose({"recompute": recompute})
        recompute = said.get("recompute", "none")
    plan = Plan(
        tp=tp, pp=pp, cp=cp, ep=ep, dp=dp, vp=vp, schedule="interleaved" if vp > 1 else "1f1b", micro_batch=mbs,
        global_batch=gbs, sequence_parallel=tp > 1 and not is_no(row.text("seq_parallel")), precision=precision,
        recompute=recompute, recompute_layers=int(layers[1]) if layers else 0, **settings,
    )  # fmt: skip
    return plan, tuple(assumed)


def _likely_chunks(row: Row, pp: int, config: Decoder | None) -> int:
    """Not stated: frameworks since the interleaved schedule use as many chunks as divide a stage's layers."""
    software = publications("training_llm")["stack"].choose({"software": row.text("software").lower()})
    if pp == 1 or config is None or not software.get("interleaved", True) or config.layers % pp:
        return 1
    each = config.layers // pp
    return max(v for v in range(1, 9) if each % v == 0)


def _precision(row: Row) -> str:
    text = row.text("precision").lower()
    if not text:
        raise InputError("the row does not say its precision")
    if "ambiguous" in text:
        raise InputError(f"precision {row.text('precision')!r} is ambiguous")
    facts: dict[str, Fact] = {"written": text, "device_text": row.text("device").lower()}
    found = publications("training_llm")["precision"].choose(facts)
    if not found:
        raise InputError(f"unknown precision {row.text('precision')!r}")
    return str(found["precision"])


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
    text = row.text("software").lower()
    release = re.search(r"nemo\D{0,20}(\d\d)\.(\d\d)", text)
    major, minor = (int(release[1]), int(release[2])) if release else (0, 0)
    counts_half = bool(publications("training_llm")["flops"].choose({"software": text, "major": major, "minor": minor}))
    seen = 0.5 if counts_half else 1.0
    return 12.0 * layers * h * h * (1 + kv + seen * seq / h + wide + vocab / (2 * layers * h))


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
