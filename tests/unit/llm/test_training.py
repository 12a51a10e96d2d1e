"""One process: losses against a plain PyTorch loop, resuming, checkpoints that are torn, settings that cannot work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ridgeline.errors import InputError, RidgelineError
from ridgeline.llm.data.tokens import TokenFile, write_token_file
from ridgeline.llm.model.config import ModelConfig
from ridgeline.llm.model.decoder import Decoder, packed_inputs
from ridgeline.llm.model.tensor_file import TensorFile
from ridgeline.llm.model.weights import HfFiles, fill, load_model, seeded
from ridgeline.llm.train.settings import Settings
from ridgeline.llm.train.trainer import Trainer, train

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums of equal bits here and in processes that a test starts."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    rng = np.random.default_rng(0)
    documents = [(np.cumsum(rng.integers(0, 3, size=rng.integers(5, 60))) % 63 + 1).tolist() for _ in range(120)]
    write_token_file(tmp_path / "data.bin", documents, vocab_size=64, eos=0)
    return tmp_path


def given(folder: Path, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model": str(folder / "config.json"), "out": str(folder / "out"), "steps": 6, "device": "cpu",
        "data": {"tokens": str(folder / "data.bin")}, "batch": {"length": 32, "sequences": 4, "micro": 2},
        "optimizer": {"lr": 5e-3, "warmup": 2}, "precision": {"compute": "float32"},
    }  # fmt: skip
    for name, value in changes.items():
        found[name] = {**found[name], **value} if isinstance(found.get(name), dict) else value
    return found


def losses(folder: Path, **changes: Any) -> list[float]:
    trainer = Trainer(Settings.of(given(folder, **changes)))
    return [trainer.run_step()[0].loss for _ in range(trainer.settings.steps)]


def test_losses_are_those_of_a_plain_pytorch_loop(folder: Path) -> None:
    changes = {"data": {"document_mask": False}}
    ours = Trainer(Settings.of(given(folder, **changes)))
    model = Decoder(ours.config, device="cpu")
    fill(model, seeded(ours.config, 0))
    decayed = [p for p in model.parameters() if p.dim() > 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1},
         {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}],
        lr=5e-3, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    for step in range(6):
        expected_lr = 5e-3 * ((step + 1) / 2 if step < 2 else 0.1 + 0.45 * (1 + np.cos(np.pi * (step - 2) / 4)))
        for group in optimizer.param_groups:
            group["lr"] = expected_lr
        rows = torch.from_numpy(ours.loader.rows(step, range(4)))
        logits = model(rows[:, :-1].reshape(-1), **packed_inputs([32] * 4))
        loss = torch.nn.functional.cross_entropy(logits, rows[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert ours.run_step()[0].loss == pytest.approx(loss.item(), rel=1e-5)


def test_accumulation_and_recomputation_change_no_loss(folder: Path) -> None:
    whole = losses(folder, batch={"micro": 4})
    assert losses(folder, batch={"micro": 1}) == pytest.approx(whole, rel=1e-5)
    assert losses(folder, batch={"micro": 4}, recompute="full") == whole
    assert losses(folder, batch={"micro": 4}, recompute="selective") == whole


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": {"compute": "bfloat16"}},
        {"precision": {"compute": "bfloat16", "weights": "stochastic"}},
        {"optimizer": {"kind": "muon"}},
        {"optimizer": {"kind": "adamw-8bit"}, "precision": {"compute": "bfloat16"}},
        {"lora": {"rank": 4}},
    ],
    ids=["float32", "bfloat16", "stochastic", "muon", "8bit", "lora"],
)
def test_a_resumed_run_has_the_same_losses_to_the_bit(folder: Path, changes: dict[str, Any]) -> None:
    if changes.get("optimizer", {}).get("kind") == "adamw-8bit" or "bfloat16" in str(changes):
        pytest.importorskip("triton")
    # Wide enough for moments in eight bits, which small parameters do not have
    (folder / "config.json").write_text(json.dumps({**LLAMA, "hidden_size": 64, "intermediate_size": 96}))
    whole = train(given(folder, out=str(folder / "whole"), **changes))
    part = Trainer(Settings.of(given(folder, checkpoint={"every": 3}, **changes)))
    for _ in range(3):
        part.run_step()
    part.save()
    part.checkpointer.finish()
    rest = train(given(folder, **changes))
    assert [line.loss for line in rest.steps] == [line.loss for line in whole.steps[3:]]
    assert whole.steps[-1].loss < whole.steps[0].loss
    assert rest.weights is not None and whole.weights is not None
    a, b = (TensorFile(w / "model.safetensors") for w in (rest.weights, whole.weights))
    assert sorted(a) == sorted(b)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_torn_checkpoint_is_passed_over(folder: Path) -> None:
    train(given(folder, steps=4, checkpoint={"every": 2, "keep": 3}))
    newest = folder / "out/checkpoints/step-00000004/rank-00000.safetensors"
    damaged = bytearray(newest.read_bytes())
    damaged[-1] ^= 1
    newest.write_bytes(damaged)
    said: list[str] = []
    trainer = Trainer(Settings.of(given(folder)), said.append)
    assert trainer.step == 2
    assert any("damaged" in text for text in said)
    (folder / "out/checkpoints/step-00000002/checkpoint.json").unlink()  # never finished
    assert Trainer(Settings.of(given(folder))).step == 0


SCRIPT = """
import json, os, sys
from ridgeline.llm import Settings, Trainer
until, number = sys.argv[2], int(sys.argv[3])
say = lambda text: text.startswith(until) and os.kill(os.getpid(), number)
trainer = Trainer(Settings.of(json.loads(sys.argv[1])), say)
trainer.run()
"""


def _run(settings: dict[str, Any], until: str, number: int) -> None:
    """Run in a process of its own, which sends itself a signal where it would print something."""
    root = Path(__file__).resolve().parents[3]
    env = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, json.dumps(settings), until, str(int(number))]
    done = subprocess.run(command, env=env, check=False)
    assert done.returncode == (-number if number == signal.SIGKILL else 0)


def test_a_killed_run_goes_on_with_the_same_losses_and_a_stopped_one_saves(folder: Path) -> None:
    settings = given(folder, steps=16, checkpoint={"every": 2})
    _run(settings, "step 5 ", signal.SIGKILL)
    _run(settings, "step 10 ", signal.SIGTERM)
    saved = max(path.parent.name for path in (folder / "out/checkpoints").glob("*/checkpoint.json"))
    last = int(saved.removeprefix("step-"))
    assert last == 11  # the step after the one that printed
    rest = train(settings)
    assert rest.steps[0].step == last + 1
    whole = train(given(folder, steps=16, out=str(folder / "whole")))
    logged = [json.loads(line) for line in (folder / "out/log.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in logged] == [(line.step, line.loss) for line in whole.steps]


def test_weights_are_written_in_the_hugging_face_layout(folder: Path) -> None:
    trained = train(given(folder, steps=2, save_dtype="float32"))
    assert trained.weights is not None
    again = losses(folder, weights=str(trained.weights), out=str(folder / "again"), steps=1)
    assert again[0] == pytest.approx(losses(folder, steps=3)[2], abs=1.0)
    assert load_model(trained.weights).config.hidden == 32


def test_lora_trains_adapters_alone_and_merges_them(folder: Path) -> None:
    base = train(given(folder, steps=1, save_dtype="float32", optimizer={"lr": 1e-12}))
    trained = train(given(folder, out=str(folder / "tuned"), weights=str(base.weights), lora={"rank": 4},
                          save_dtype="float32", optimizer={"lr": 1e-2}))  # fmt: skip
    assert trained.steps[-1].loss < trained.steps[0].loss
    assert base.weights is not None and trained.weights is not None
    before, after = (HfFiles(w, ModelConfig.load(w)) for w in (base.weights, trained.weights))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(before.tensor(name), after.tensor(name))
    assert torch.equal(before.tensor("model.embed_tokens.weight"), after.tensor("model.embed_tokens.weight"))
    adapter = TensorFile(folder / "tuned/adapter/adapter_model.safetensors")
    assert adapter.shape("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight") == (4, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stepz": 3}, "no setting 'stepz'; did you mean 'steps'"),
        ({"optimizer": {"kind": "adam"}}, "did you mean 'adamw'"),
        ({"batch": {"micro": 3}}, "batch.sequences 4 does not divide .* 6 does"),
        ({"batch": {"length": 999}}, "max_position_embeddings 128"),
        ({"plan": {"tp": 3}}, "plan.tp 3 does not divide .*; 2 does"),
        ({"plan": {"dp": 2}}, "is for 2 processes and 1 run; dp=1 uses all"),
        ({"plan": {"pp": 2}}, "do not fill|is for 2 processes"),
        ({"plan": {"ep": 2}}, "the model has no experts"),
        ({"plan": {"tq": 2}}, "no choice 'tq'.*did you mean 'tp'"),
        ({"data": {"tokens": ""}}, "set one of data.tokens"),
        ({"steps": "many"}, "steps is int, not 'many'"),
        ({"model": "nowhere/config.json"}, "no model configuration at"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_first_step(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RidgelineError, match=message):
        Trainer(Settings.of(given(folder, **changes)))


def test_a_checkpoint_of_another_model_and_data_of_another_tokenizer_are_refused(folder: Path) -> None:
    train(given(folder, steps=1))
    (folder / "config.json").write_text(json.dumps({**LLAMA, "intermediate_size": 64}))
    with pytest.raises(InputError, match="its intermediate is 48 and this one's 64"):
        Trainer(Settings.of(given(folder)))
    (folder / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 32}))
    with pytest.raises(InputError, match="made by another tokenizer"):
        Trainer(Settings.of(given(folder, out=str(folder / "new"))))
    short = folder / "data.bin"
    short.write_bytes(short.read_bytes()[:-2])
    with pytest.raises(InputError, match="tokenize again"):
        TokenFile(short)


def test_a_plan_of_ridgeline_plan_is_a_configuration(folder: Path) -> None:
    from ridgeline.plan import Plan

    made = {"best": [{"plan": Plan(micro_batch=2, global_batch=8, zero=1).to_dict()}]}
    (folder / "plan.json").write_text(json.dumps(made))
    found = given(folder, plan="plan.json")
    del found["batch"]["sequences"], found["batch"]["micro"]
    settings = Settings.of(found, folder)
    assert (settings.batch.sequences, settings.batch.micro, settings.plan.zero) == (8, 2, 1)
    with pytest.raises(InputError, match=r"batch.micro is 4 and the plan's micro_batch 2"):
        Settings.of({**found, "batch": {"micro": 4}}, folder)


def test_a_biased_router_favors_experts_that_got_less_and_steps_tell_of_the_busiest(folder: Path) -> None:
    of_experts = {"n_routed_experts": 8, "n_group": 2, "topk_group": 2, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 16, "first_k_dense_replace": 1}  # fmt: skip
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    deepseek = {**LLAMA, "model_type": "deepseek_v3", "num_key_value_heads": 4, **latent, **of_experts}
    (folder / "config.json").write_text(json.dumps(deepseek))
    trainer = Trainer(Settings.of(given(folder, bias_rate=0.25)))
    line, _ = trainer.run_step()
    (block,) = trainer.parts[0].moe_blocks()
    load, bias = block.load, block.gate.e_score_correction_bias
    assert int(load.sum()) == 2 * 4 * 32  # every token goes to two experts
    assert line.busiest == pytest.approx(float(load.max()) / 32)
    assert torch.equal(bias, 0.25 * (load.float().mean() - load).sign())
    assert "busiest expert" in str(line)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_are_converted_from_checkpoints_and_from_other_types(folder: Path) -> None:
    from ridgeline.llm.train.convert import convert

    trained = train(given(folder, steps=2, save_dtype="float32", lora={"rank": 2}, optimizer={"lr": 1e-2}))
    assert trained.weights is not None
    notes = convert(folder / "out", folder / "whole", "float32")
    assert notes == ["weights after step 2"]
    exported, converted = (TensorFile(f / "model.safetensors") for f in (trained.weights, folder / "whole"))
    assert all(torch.equal(exported[name], converted[name]) for name in exported)
    convert(folder / "whole", folder / "half", "float16")
    assert TensorFile(folder / "half/model.safetensors")["lm_head.weight"].dtype == torch.float16
    convert(folder / "out/checkpoints/step-00000002", folder / "dcp", "float32", "dcp")
    from torch.distributed import checkpoint

    read = {"lm_head.weight": torch.empty(64, 32)}
    checkpoint.load(read, checkpoint_id=folder / "dcp", no_dist=True)
    assert torch.equal(read["lm_head.weight"], exported["lm_head.weight"])
    with pytest.raises(InputError, match="not empty"):
        convert(folder / "out", folder / "whole")
