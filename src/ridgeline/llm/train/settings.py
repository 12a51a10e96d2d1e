"""What a training run is told: a TOML file or the same as a mapping, checked before anything is built."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.errors import InputError, PlanError, nearest
from ridgeline.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """``tokens`` is a token file; ``text`` patterns of JSONL or parquet shards, tokenized on the way."""

    tokens: str = ""
    text: tuple[str, ...] = ()
    column: str = "text"
    shuffle: bool = True
    document_mask: bool = True  # documents that are packed into one sequence do not see each other
    unit_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    length: int = 1024  # tokens a sequence
    sequences: int = 0  # a step, over all ranks; the plan's global batch unless told
    micro: int = 0  # a micro-batch; the plan's unless told


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    kind: str = "adamw"  # adamw, adamw-8bit or muon
    lr: float = 3e-4
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # of matrices; norms and biases have none
    clip: float = 1.0  # norm of all gradients; 0 is no clipping
    muon_lr: float = 0.02
    schedule: str = "cosine"  # cosine, wsd (constant, then linear to the end) or constant
    warmup: int = 100
    final: float = 0.1  # the last learning rate as a share of the largest
    decay: float = 0.2  # share of the steps in which wsd decays


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSettings:
    compute: str = "bfloat16"  # or float32
    weights: str = "master"  # of bfloat16: float32 masters, or "stochastic": bfloat16 alone, rounded at random
    fp8: bool = False  # products of linear layers in fp8 (CUDA)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    every: int = 0  # steps; 0 is only at the end
    keep: int = 2
    resume: bool = True  # from the newest whole checkpoint in the folder


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    tokens: str = ""
    every: int = 0
    sequences: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One training run."""

    model: str  # a config.json or a folder with one
    out: str
    steps: int
    data: DataSettings
    weights: str = ""  # a folder in the Hugging Face layout to start from; drawn from the seed unless told
    tokenizer: str = ""
    seed: int = 0
    device: str = ""  # cuda where there is one, unless told
    recompute: str = "auto"  # none, selective, full, or what our prediction says is needed to fit
    graph: bool = True  # the whole step as one CUDA graph, where it can be
    balance: float | None = None  # weight of the experts' balance loss; config.json's unless told
    bias_rate: float = 1e-3  # a step's change of a router's correction, in models that balance experts by one
    save_dtype: str = "bfloat16"
    log_every: int = 1
    batch: BatchSettings = field(default_factory=BatchSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    lora: LoraSettings | None = None
    plan: Plan = field(default_factory=Plan)

    @classmethod
    def load(cls, path: str | Path, changes: Mapping[str, Any] | None = None) -> Settings:
        """Read a TOML file; paths in it are relative to it. ``changes`` are dotted names with new values."""
        path = Path(path)
        try:
            given = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise InputError(f"no settings at {path}") from None
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{path} is not TOML: {error}") from None
        for name, value in (changes or {}).items():
            *sections, last = name.split(".")
            at = given
            for section in sections:
                at = at.setdefault(section, {})
            at[last] = value
        return cls.of(given, path.parent)

    @classmethod
    def of(cls, given: Mapping[str, Any], folder: Path | None = None) -> Settings:
        """Check a mapping: every name known, every value of its type."""
        given = dict(given)
        plan = given.pop("plan", {})
        if isinstance(plan, str):
            plan = read_plan((folder or Path()) / plan)
        settings: Settings = _read(cls, given, "", {"plan": _plan(plan)})
        return settings._with_paths(folder)._with_batch(plan)

    def _with_paths(self, folder: Path | None) -> Settings:
        def placed(path: str) -> str:
            return path if not path or folder is None or Path(path).is_absolute() else str(folder / path)

        data, evaluation = self.data, self.evaluation
        return replace(
            self, model=placed(self.model), out=placed(self.out), weights=placed(self.weights),
            tokenizer=placed(self.tokenizer),
            data=replace(data, tokens=placed(data.tokens), text=tuple(map(placed, data.text))),
            evaluation=replace(evaluation, tokens=placed(evaluation.tokens)),
        )  # fmt: skip

    def _with_batch(self, plan: Mapping[str, Any]) -> Settings:
        """Batch sizes in one place: the plan's where the batch says none, an error where they differ."""
        found = {}
        for name, choice in (("sequences", "global_batch"), ("micro", "micro_batch")):
            own = getattr(self.batch, name)
            if own and choice in plan and plan[choice] != own:
                raise InputError(f"batch.{name} is {own} and the plan's {choice} {plan[choice]}: leave one out")
            found[name] = own or getattr(self.plan, choice)
        found["sequences"] = max(found["sequences"], found["micro"] * self.plan.dp)
        return replace(self, batch=replace(self.batch, **found))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_plan(path: Path) -> dict[str, Any]:
    """The plan in a JSON file: the first of what ``ridgeline plan --json`` prints, or a plan alone."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"no plan at {path}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if isinstance(found, Mapping) and found.get("best"):
        found = found["best"][0]
    if isinstance(found, Mapping) and isinstance(found.get("plan"), Mapping):
        found = found["plan"]
    if not isinstance(found, Mapping):
        raise InputError(f"{path} holds no plan: give the output of `ridgeline plan --json`")
    return dict(found)


def _plan(given: Mapping[str, Any]) -> Plan:
    known = [f.name for f in fields(Plan)]
    for name in given:
        if name not in known:
            raise PlanError(f"a plan has no choice {name!r}{nearest(name, known)}")
    return typing.cast(Plan, _read(Plan, given, "plan", {}))


def _read(kind: Any, given: Mapping[str, Any], where: str, ready: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}
    for name in given:
        if name not in known:
            section = f" in [{where}]" if where else ""
            raise InputError(f"no setting {name!r}{section}{nearest(name, known)}")
    found = dict(ready)
    for name, spec in known.items():
        if name in ready:
            continue
        if name in given:
            found[name] = _value(hints[name], given[name], f"{where}.{name}".lstrip("."))
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise InputError(f"setting {f'{where}.{name}'.lstrip('.')!r} is missing")
    return kind(**found)


def _value(hint: Any, value: Any, where: str) -> Any:
    """``value`` as the type that a setting has."""
    if isinstance(hint, types.UnionType):
        hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
        if value is None:
            return None
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise InputError(f"{where} is a section: write [{where}]")
        return _read(hint, value, where, {})
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        if not isinstance(value, (list, tuple)):
            raise InputError(f"{where} is a list, not {value!r}")
        return tuple(_value(inner, item, where) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise InputError(f"{where} is {hint.__name__}, not {value!r}")
    return value
