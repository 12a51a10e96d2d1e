"""The training loop: build, resume, step, report, evaluate, save."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.errors import InputError, RidgelineError
from ridgeline.llm.data.batch import micro_batch, stacked
from ridgeline.llm.data.loader import Loader, TextLoader, TokenLoader
from ridgeline.llm.data.tokens import TokenFile
from ridgeline.llm.model.config import ModelConfig
from ridgeline.llm.model.tensor_file import write_text
from ridgeline.llm.model.weights import Block, HfFiles, Source, blocks, save_hf, seeded
from ridgeline.llm.train import adapters, report
from ridgeline.llm.train.checkpoint import Checkpoint, Checkpointer, newest
from ridgeline.llm.train.checks import check_checkpoint, check_settings, tokenizer_of
from ridgeline.llm.train.optimizer import (
    Held,
    held_parameters,
    learning_rate,
    load_optimizer_state,
    make_optimizers,
    optimizer_state,
    set_learning_rate,
)  # fmt: skip
from ridgeline.llm.train.parallel import build_parts, set_up
from ridgeline.llm.train.precision import prepare_modules
from ridgeline.llm.train.recompute import set_recompute
from ridgeline.llm.train.settings import Settings
from ridgeline.llm.train.step import Batch, TrainStep


@dataclass(slots=True)
class StepLine:
    """What is known of a step when it is over."""

    step: int
    loss: float
    norm: float
    lr: float
    tokens: int
    step_s: float
    tokens_per_s: float
    mfu_frac: float | None = None
    predicted_s: float | None = None
    balance: float | None = None
    busiest: float | None = None
    peak_bytes: int | None = None

    def __str__(self) -> str:
        parts = [f"step {self.step}", f"loss {self.loss:.4f}", f"norm {self.norm:.3f}", f"lr {self.lr:.2e}",
                 f"{self.tokens_per_s:,.0f} tok/s", f"{1e3 * self.step_s:.1f} ms"]  # fmt: skip
        if self.predicted_s is not None:
            parts.append(f"predicted {1e3 * self.predicted_s:.1f} ms, ratio {self.step_s / self.predicted_s:.2f}")
        if self.mfu_frac is not None:
            parts.append(f"MFU {100 * self.mfu_frac:.1f} %")
        if self.balance is not None:
            parts.append(f"balance {self.balance:.3f}  busiest expert {self.busiest:.2f}x")
        return "  ".join(parts)


@dataclass(slots=True)
class Trained:
    """A run that ended: every step's line, evaluations as (step, loss), and where the weights are."""

    steps: list[StepLine]
    evaluations: list[tuple[int, float]]
    weights: Path | None
    stopped: bool = False
    forecast: report.Forecast | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """Of the last step."""
        return self.steps[-1].loss if self.steps else math.nan


class Trainer:
    """A training run, ready to step."""

    def __init__(self, settings: Settings, say: Callable[[str], None] = lambda text: None) -> None:
        self.settings = settings
        self.config = ModelConfig.load(settings.model)
        check_settings(settings, self.config)
        self.layout = set_up(settings.plan, settings.device)
        self.plan, self.device = settings.plan, self.layout.device
        self.world, self.rank = self.plan.world, self.layout.rank
        self.say = say if self.rank == 0 else lambda text: None
        self.step = 0
        self.notes: list[str] = []
        self.out = Path(settings.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.checkpointer = Checkpointer(self.out / "checkpoints", settings.checkpoint.keep, self.rank, self.world)
        found = None
        if settings.checkpoint.resume:
            found = newest(self.checkpointer.folder, self.rank, self.world, self._note)
        if found is not None:
            check_checkpoint(found.state, self._identity(), found.folder)
        compute = getattr(torch, settings.precision.compute)
        sharded = self.layout.shard is not None
        masters = settings.precision.weights == "master"
        self.dtype = torch.float32 if sharded and masters else compute
        recompute = self._choose_recompute()
        self.parts = build_parts(
            self.config, self.layout, self._source(found), self.dtype, compute,
            lambda part: prepare_modules(part, settings),
        )  # fmt: skip
        for part in self.parts:
            set_recompute(part, recompute, self.plan.recompute_layers)
            part.train()
        self.held: list[Held] = held_parameters(self.parts, self.world // self.plan.pp)
        self.generator = torch.Generator(self.device).manual_seed(settings.seed + self.rank)
        self.optimizers = make_optimizers(
            self.held, settings.optimizer, settings.precision.weights, self.generator, self.device, self.world == 1
        )
        moe = self.config.moe
        coef = settings.balance if settings.balance is not None else moe.aux_coef if moe else 0.0
        # Experts with biases are products one by one, whose sizes the host has to know
        graph = settings.graph and self.device.type == "cuda" and self.world == 1 and not (moe and moe.bias)
        self.train_step = TrainStep(
            self.parts, self.layout, self.held, self.optimizers, settings.optimizer.clip, coef, settings.bias_rate,
            graph,
        )  # fmt: skip
        self.loader = self._loader()
        # The batch of the next step where it is made already, and what the loader had read before it
        self._ahead: Batch | None = None
        self._read: dict[str, Any] | None = None
        if found is not None:
            self._resume(found)

    # --- building ----------------------------------------------------------------------------------------------------

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.say(f"note: {text}")

    def _source(self, found: Checkpoint | None) -> Source:
        """Where weights come from: a checkpoint, a folder of weights, or the seed."""
        fresh = seeded(self.config, self.settings.seed)
        given = HfFiles(self.settings.weights, self.config) if self.settings.weights else fresh

        def source(name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
            if found is not None and name in found:
                return found.read(name, offset, shape)
            if adapters.is_adapter(name):
                return adapters.first_values(name, shape, self.settings.seed)
            return given(name, offset, shape)

        return source

    def _choose_recompute(self) -> str:
        """What was asked for; or by ``auto`` the least that is predicted to fit, and the forecast of a step."""
        self.forecast: report.Forecast | None = None
        asked, model = self.settings.recompute, report.device_model(self.device)
        if model is None or self.world > 1:
            here = f"no device model of this {self.device.type.upper()}: no MFU and no prediction of steps is shown"
            several = "steps of many ranks are not predicted here: `ridgeline simulate` does, with what they send"
            self._note(here if model is None else several)
            planned = self.plan.recompute.partition(":")[0]
            return planned if asked == "auto" else asked
        try:
            for found in report.forecasts(self.settings, self.config, model):
                self.forecast = found
                if found.fits:
                    return found.recompute
        except (RidgelineError, RuntimeError, NotImplementedError) as error:  # training goes on without
            self.forecast = None
            self._note(f"no forecast of a step: {str(error).splitlines()[0]}")
            return "none" if asked == "auto" else asked
        assert self.forecast is not None
        need, has = (x / 1e9 for x in (self.forecast.peak_bytes, self.forecast.usable_bytes))
        what = f"a step is predicted to need {need:.0f} GB of {has:.0f} with recompute = {self.forecast.recompute!r}"
        if asked == "auto":
            batch = self.settings.batch
            fewer = replace(self.settings, batch=replace(batch, micro=1, sequences=batch.sequences // batch.micro))
            least = list(report.forecasts(fewer, self.config, model))[-1].peak_bytes / 1e9
            micro = 1 + int((has - least) / max(1e-9, need - least) * (batch.micro - 1)) if least <= has else 0
            cure = (
                f"batch.micro = {micro} does"
                if micro
                else "optimizer.kind = 'adamw-8bit' or more ranks with plan.zero = 3"
            )
            raise InputError(f"{what}, which does not fit; {cure}")
        self._note(f"{what}: it may run out of memory")
        return self.forecast.recompute

    def _loader(self) -> Loader:
        data, batch, seed = self.settings.data, self.settings.batch, self.settings.seed
        if data.tokens:
            return TokenLoader(TokenFile(data.tokens), batch.length, batch.sequences, seed, data.shuffle)
        tokenizer = tokenizer_of(self.settings.tokenizer)
        eos = self.config.eos_ids[0]
        return TextLoader(
            data.text, lambda text: tokenizer.encode(text, add_special_tokens=False).ids, eos, batch.length,
            batch.sequences, seed, data.column, data.unit_bytes,
        )  # fmt: skip

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint has to agree with."""
        settings = self.settings
        model = {name: getattr(self.config, name) for name in self.config.__slots__ if name != "source"}
        return json.loads(json.dumps({
            "model": model, "length": settings.batch.length, "sequences": settings.batch.sequences,
            "seed": settings.seed, "optimizer": settings.optimizer.kind, "compute": settings.precision.compute,
            "lora": None if settings.lora is None else settings.lora.rank,
        }, default=lambda value: {k: getattr(value, k) for k in value.__slots__}))  # fmt: skip

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of the steps done so far, in the background."""
        tensors: dict[str, tuple[Block, Tensor]] = {}
        for part in self.parts:
            tensors |= {block.name: (block, mine) for block, mine in blocks(part)}
        by_name = {one.block.name: one.block for one in self.held}
        for name, value in optimizer_state(self.optimizers, self.held).items():
            block = by_name[name.partition("/")[0]]
            if value.dim() == 0:  # step counts, whose place in the whole is the whole
                block = Block(block.name, (), (), ())
            tensors[name] = (block, value)
        lanes: dict[str, Any] = {}
        state = self.loader.state() if self._read is None else self._read
        if state and self.plan.dp > 1:
            every: list[Any] = [None] * self.world
            dist.all_gather_object(every, json.dumps(state))
            for text in every:
                lanes |= json.loads(text)["lanes"]
            state = {"lanes": lanes}
        random = self.settings.precision.weights == "stochastic"
        kept = {
            "step": self.step, "identity": self._identity(), "loader": state, "world": self.world,
            "generator": self.generator.get_state().tolist() if random else None, "config": self.config.source,
            "lora": dataclasses.asdict(self.settings.lora) if self.settings.lora else None,
        }  # fmt: skip
        self.checkpointer.save(self.step, tensors, kept, self.device)

    def _resume(self, found: Checkpoint) -> None:
        def read(one: Held, state: str) -> Tensor | None:
            name = f"{one.block.name}/{state}"
            if name not in found:
                return None
            if state == "step":
                return found.read(name, (), ()).clone()
            return found.read(name, one.block.offset, one.block.shape).clone()

        load_optimizer_state(self.optimizers, self.held, read)
        self.step = found.step
        if found.state["loader"]:
            self.loader.restore(found.state["loader"])
        if found.state["generator"] is not None:
            if found.state["world"] == self.world:
                self.generator.set_state(torch.tensor(found.state["generator"], dtype=torch.uint8))
            else:
                self._note("random rounding goes on with other numbers: the checkpoint is of another number of ranks")
        log = self.out / "log.jsonl"
        if self.rank == 0 and log.exists():  # steps after the checkpoint are done again
            lines = [line for line in log.read_text().splitlines() if _step_of(line) <= self.step]
            write_text(log, "".join(f"{line}\n" for line in lines))
        self.say(f"resumed from {found.folder} after step {self.step}")

    def export(self) -> Path:
        """Write the weights of the newest checkpoint in the Hugging Face layout; one process reads all parts."""
        folder = self.out / "weights"
        self.checkpointer.finish()
        if self.rank == 0:
            found = newest(self.checkpointer.folder, 0, 1, self._note)
            assert found is not None
            save_hf(folder, self.config, *adapters.merged(found), getattr(torch, self.settings.save_dtype))
            if self.settings.lora is not None:
                adapters.save_adapter(self.out / "adapter", found, self.config, self.settings.lora)
            if self.settings.tokenizer:
                write_text(folder / "tokenizer.json", Path(self.settings.tokenizer).read_text())
        if self.world > 1:
            dist.barrier()
        return folder

    # --- steps -------------------------------------------------------------------------------------------------------

    def batch(self, loader: Loader, step: int, sequences: int, micro: int) -> Batch:
        """This rank's micro-batches of a step. Which sequences share a micro-batch does not depend on the ranks."""
        plan, made = self.plan, []
        for index in range(sequences // (micro * plan.dp)):
            first = (index * plan.dp + self.layout.data_rank) * micro
            rows = loader.rows(step, range(first, first + micro))
            made.append(micro_batch(
                rows, loader.eos, document_mask=self.settings.data.document_mask,
                context_rank=self.layout.context_rank, context_size=plan.cp,
            ))  # fmt: skip
        tensors, longest, longest_key = stacked(made)
        count = torch.tensor([sum(one.num_targets for one in made)], dtype=torch.int64)
        if plan.dp * plan.cp > 1:
            count = count.to(self.device)
            dist.all_reduce(count)
            count //= plan.tp * plan.pp
        if self.device.type == "cuda":
            tensors = {name: tensor.pin_memory().to(self.device, non_blocking=True) for name, tensor in tensors.items()}
        return Batch(tensors, longest, longest_key, max(1, int(count)))

    def _next_batch(self, step: int) -> Batch:
        return self.batch(self.loader, step, self.settings.batch.sequences, self.settings.batch.micro)

    def run_step(self, stop: bool = False) -> tuple[StepLine, bool]:
        """One step: its line, and whether some rank wants to stop."""
        settings = self.settings
        share = learning_rate(self.step, settings.steps, settings.optimizer)
        set_learning_rate(self.optimizers, share)
        started = time.perf_counter()
        batch = self._ahead or self._next_batch(self.step)
        result = self.train_step.run(batch, stop)
        if self.device.type == "cuda":  # the host reads the next step's tokens while the device works
            self._read = self.loader.state()
            self._ahead = self._next_batch(self.step + 1)
        loss, norm = float(result.loss), float(result.norm)  # waits for the device
        self.step += 1
        seconds = time.perf_counter() - started
        tokens = settings.batch.sequences * settings.batch.length
        line = StepLine(
            self.step, loss, norm, settings.optimizer.lr * share, tokens, seconds, tokens / seconds,
            balance=float(result.balance) if self.config.moe else None,
            busiest=float(result.busiest) if self.config.moe else None,
            predicted_s=self.forecast.step_s if self.forecast else None,
        )  # fmt: skip
        if (model := report.device_model(self.device)) is not None:
            peak = model.peak_flops_per_s("tensor", "bf16") * self.world
            line.mfu_frac = report.flops_per_token(self.config, settings.batch.length) * line.tokens_per_s / peak
            line.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        if not math.isfinite(loss):
            raise InputError(
                f"the loss of step {self.step} is {loss}: resume from a checkpoint with a lower optimizer.lr "
                f"(now {settings.optimizer.lr:g}) or a longer optimizer.warmup"
            )
        return line, result.stop or stop

    def evaluate(self) -> float:
        """The mean loss of the held-out sequences."""
        of, batch = self.settings.evaluation, self.settings.batch
        loader = TokenLoader(TokenFile(of.tokens), batch.length, batch.sequences, 0, shuffle=False)
        total = torch.zeros((), dtype=torch.float64)
        count = 0
        for index in range(max(1, min(of.sequences, loader.num_windows) // batch.sequences)):
            made = self.batch(loader, index, batch.sequences, batch.micro)
            total += float(self.train_step.evaluate(made))
            count += made.num_targets
        return float(total) / count

    def run(self, on_step: Callable[[StepLine], None] | None = None, profile: Any = None) -> Trained:
        """Train to the end, or until SIGTERM: then save and leave."""
        settings, lines, evaluations = self.settings, [], []
        log = self.out / "log.jsonl"
        with _stop_on_signal() as stopping:
            stop = False
            with log.open("a") if self.rank == 0 else contextlib.nullcontext() as file:
                while self.step < settings.steps and not stop:
                    line, stop = self.run_step(bool(stopping))
                    lines.append(line)
                    if file is not None:
                        file.write(json.dumps({name: getattr(line, name) for name in line.__slots__}) + "\n")
                        file.flush()
                    if self.step % settings.log_every == 0 or self.step == settings.steps:
                        self.say(str(line))
                    if on_step is not None:
                        on_step(line)
                    if profile is not None:
                        profile.step()
                    self.checkpointer.poll()
                    every = settings.evaluation.every
                    if settings.evaluation.tokens and (
                        self.step == settings.steps or (every and self.step % every == 0)
                    ):
                        evaluations.append((self.step, self.evaluate()))
                        self.say(f"step {self.step}  evaluation loss {evaluations[-1][1]:.4f}")
                    every = settings.checkpoint.every
                    if (every and self.step % every == 0) or stop or self.step == settings.steps:
                        self.save()
            self.checkpointer.finish()
        weights = None
        if stop:
            self.say(f"stopped after step {self.step}; the same command goes on from there")
        elif lines:
            weights = self.export()
            self.say(f"weights: {weights}")
        return Trained(lines, evaluations, weights, stop, self.forecast, self.notes)


def train(settings: Settings | Mapping[str, Any] | str | Path, **options: Any) -> Trained:
    """Train a language model as a TOML file, a mapping or ``Settings`` say; ``say=print`` shows every step."""
    if isinstance(settings, (str, Path)):
        settings = Settings.load(settings)
    elif isinstance(settings, Mapping):
        settings = Settings.of(settings)
    return Trainer(settings, **options).run()


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[list[int]]:
    """SIGTERM is noted, and the step that runs is finished."""
    received: list[int] = []
    try:
        before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    except ValueError:  # not in the main thread, where signals arrive
        yield received
        return
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # cut off in the middle
        return 1 << 62
