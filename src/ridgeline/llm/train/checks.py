"""What is refused before the first step: each check says what is wrong and names the nearest that works."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.errors import InputError, MissingExtra, PlanError, nearest
from ridgeline.llm.data.tokens import TokenFile, fingerprint
from ridgeline.llm.model.config import ModelConfig
from ridgeline.llm.train.settings import Settings

CHOICES = {
    "optimizer.kind": ("adamw", "adamw-8bit", "muon"), "optimizer.schedule": ("cosine", "wsd", "constant"),
    "precision.compute": ("bfloat16", "float32"), "precision.weights": ("master", "stochastic"),
    "recompute": ("auto", "none", "selective", "full"), "save_dtype": ("bfloat16", "float16", "float32"),
}  # fmt: skip


def check_settings(settings: Settings, config: ModelConfig) -> None:
    """Everything that can be known without other processes and without the device."""
    for name, choices in CHOICES.items():
        value: Any = settings
        for part in name.split("."):
            value = getattr(value, part)
        if value not in choices:
            raise InputError(f"{name} is {value!r}{nearest(str(value), choices)}")
    batch, plan, optimizer = settings.batch, settings.plan, settings.optimizer
    for name, number in (("steps", settings.steps), ("batch.length", batch.length), ("batch.micro", batch.micro),
                         ("optimizer.lr", optimizer.lr)):  # fmt: skip
        if number <= 0:
            raise InputError(f"{name} is {number}: it has to be above zero")
    if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
        raise InputError(f"optimizer.betas is {list(optimizer.betas)}: two numbers from 0 to below 1")
    each = batch.micro * plan.dp
    if batch.sequences % each:
        more = -(-batch.sequences // each) * each
        raise InputError(
            f"batch.sequences {batch.sequences} does not divide into micro-batches of {batch.micro} on {plan.dp} "
            f"data-parallel ranks; {more} does"
        )
    if batch.length > config.max_positions:
        raise InputError(
            f"batch.length {batch.length} is above the model's max_position_embeddings {config.max_positions}"
        )
    if settings.precision.fp8 and batch.micro * batch.length % 16:
        num = batch.micro * batch.length
        raise InputError(f"fp8 products take multiples of 16 tokens and a micro-batch has {num}: "
                         f"batch.length = {-(-batch.length // 16) * 16} does")  # fmt: skip
    if settings.precision.fp8 and settings.lora is not None:
        raise InputError("precision.fp8 and [lora] change the same linear layers: leave one out")
    if settings.lora is not None and settings.lora.rank < 1:
        raise InputError(f"lora.rank is {settings.lora.rank}: it has to be above zero")
    _check_plan(settings, config)
    _check_data(settings, config)


def _check_plan(settings: Settings, config: ModelConfig) -> None:
    plan, batch = settings.plan, settings.batch
    for name in ("dp", "tp", "pp", "cp", "ep", "vp"):
        if getattr(plan, name) < 1:
            raise PlanError(f"plan.{name} is {getattr(plan, name)}: it has to be above zero")
    units = {"heads": config.num_heads, "key-value heads": config.num_heads if config.latent else config.num_kv_heads,
             "hidden units of the MLP": config.intermediate, "tokens of the vocabulary": config.vocab_size}  # fmt: skip
    if config.moe is not None:
        units["hidden units of an expert"] = config.moe.intermediate
    for what, num in units.items():
        if num % plan.tp:
            raise PlanError(
                f"plan.tp {plan.tp} does not divide {num} {what}{_nearest_divisor(plan.tp, *units.values())}"
            )
    stages = plan.pp * plan.vp
    if stages > config.num_layers:
        raise PlanError(
            f"{stages} pipeline stages for {config.num_layers} layers; plan.pp = {config.num_layers} is the most"
        )
    if plan.vp > 1 and plan.pp == 1:
        raise PlanError(f"plan.vp is {plan.vp} without a pipeline; set plan.pp, or plan.vp = 1")
    if plan.pp > 1:
        if config.tied:
            raise PlanError(
                "the embedding and the head of this model are one weight, which two stages would hold: plan.pp = 1"
            )
        known = ("interleaved",) if plan.vp > 1 else ("1f1b", "gpipe")
        if plan.schedule not in known:
            raise PlanError(f"plan.schedule {plan.schedule!r} with vp={plan.vp}: train runs {', '.join(known)}")
        num = batch.sequences // (batch.micro * plan.dp)
        if num < stages or num % plan.pp:
            fits = -(-max(num, stages) // plan.pp) * plan.pp
            raise PlanError(
                f"{num} micro-batches a step do not fill {stages} pipeline stages; "
                f"batch.sequences = {fits * batch.micro * plan.dp} does"
            )
        if settings.lora is not None:
            raise PlanError("adapters are trained without a pipeline: plan.pp = 1")
    if plan.cp > 1 and batch.length % (2 * plan.cp):
        fits = -(-batch.length // (2 * plan.cp)) * 2 * plan.cp
        raise PlanError(
            f"batch.length {batch.length} does not cut into {2 * plan.cp} chunks of plan.cp {plan.cp}; {fits} does"
        )
    if plan.ep > 1:
        if config.moe is None:
            raise PlanError(f"plan.ep is {plan.ep} and the model has no experts: plan.ep = 1")
        for what, num in (("experts", config.moe.num_experts), ("data and context ranks", plan.dp * plan.cp)):
            if num % plan.ep:
                raise PlanError(f"plan.ep {plan.ep} does not divide {num} {what}"
                                f"{_nearest_divisor(plan.ep, config.moe.num_experts, plan.dp * plan.cp)}")  # fmt: skip
    if plan.zero not in (0, 1, 2, 3):
        raise PlanError(f"plan.zero is {plan.zero}: 0 copies all, 1 and 2 share states and gradients, 3 parameters too")
    if plan.offload != "none" or plan.etp != 1:
        raise PlanError("train neither offloads nor splits experts apart from tp: plan.offload = 'none', plan.etp = 1")
    if plan.tp > 1 and (settings.precision.fp8 or settings.lora is not None):
        raise PlanError("fp8 and adapters are for whole linear layers: plan.tp = 1")


def _nearest_divisor(wanted: int, *numbers: int) -> str:
    fits = [n for n in range(1, min(numbers) + 1) if all(number % n == 0 for number in numbers)]
    return f"; {min(fits, key=lambda n: (abs(n - wanted), n))} does"


def _check_data(settings: Settings, config: ModelConfig) -> None:
    data = settings.data
    if bool(data.tokens) == bool(data.text):
        raise InputError("set one of data.tokens (a token file) and data.text (patterns of JSONL or parquet shards)")
    if data.text:
        if not settings.tokenizer:
            raise InputError("data.text is tokenized on the way: set tokenizer to a tokenizer.json")
        if not config.eos_ids:
            raise InputError("config.json has no eos_token_id, which ends documents: add it")
    expected = ""
    if settings.tokenizer:
        size = tokenizer_of(settings.tokenizer).get_vocab_size()
        if size > config.vocab_size:
            raise InputError(
                f"{settings.tokenizer} has {size} tokens and the model {config.vocab_size}: use the model's tokenizer"
            )
        expected = fingerprint(settings.tokenizer)
    for name, path in (("data.tokens", data.tokens), ("evaluation.tokens", settings.evaluation.tokens)):
        if not path:
            continue
        info = TokenFile(path).info
        if expected and info.tokenizer and info.tokenizer != expected:
            raise InputError(
                f"{name} {path} was made by another tokenizer than {settings.tokenizer}: tokenize the text again"
            )
        if info.vocab_size > config.vocab_size:
            raise InputError(f"{name} {path} has ids up to {info.vocab_size} and the model {config.vocab_size} tokens: "
                             "it was made by another tokenizer")  # fmt: skip
    if data.tokens:
        seen = TokenFile(data.tokens).info.num_tokens
        if seen <= settings.batch.length:
            raise InputError(f"{data.tokens} has {seen:,} tokens, less than a sequence of {settings.batch.length:,}")


def check_checkpoint(state: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    """A checkpoint of another model or of other data order is not gone on from."""
    found = state["identity"]
    for name, value in wanted["model"].items():
        if found["model"].get(name) != value:
            raise InputError(
                f"{folder} is of another model: its {name} is {found['model'].get(name)} and this one's {value}; "
                "set another `out`, or checkpoint.resume = false"
            )
    for name, value in wanted.items():
        if name != "model" and found.get(name) != value:
            raise InputError(
                f"{folder} was trained with {name} {found.get(name)} and this run has {value}: put it back, or start "
                "from its weights in another `out`"
            )


def tokenizer_of(path: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtra("tokenizers", "llm", "tokenizing text") from None
    if not Path(path).is_file():
        raise InputError(f"no tokenizer at {path}: give a tokenizer.json")
    try:
        return Tokenizer.from_file(path)
    except Exception as error:
        raise InputError(f"{path} is no tokenizer.json: {error}") from None
