"""The search for a deployment: loads by halving, prompts apart, users, and the command that starts the winner."""

from __future__ import annotations

import shlex

import pytest

from ridgeline.sim.serving.command import launch_command
from ridgeline.sim.serving.compose import Wanted, deployment_of
from ridgeline.sim.serving.metrics import Slo
from ridgeline.sim.serving.search import CONCURRENCIES, Need, search

NEED = Need(isl=256, osl=64, slo=Slo(ttft_s=1.0, tpot_s=0.02))


@pytest.fixture(scope="module")
def found():
    return search("llama3-8b", "h200*2", NEED, Wanted(precision="bf16"))


def test_the_load_is_found_between_the_powers_of_two(found):
    best = found.best
    assert best.keeps and best.concurrency not in CONCURRENCIES
    alike = [c for c in found.candidates if c.found and c.title == best.title and c.concurrency > best.concurrency]
    assert alike and not min(alike, key=lambda c: c.concurrency).keeps
    assert min(c.concurrency for c in alike) <= 1.1 * best.concurrency + 1


def test_prompts_apart_are_among_the_candidates(found):
    assert any("apart" in c.title and c.found and c.num_devices == 2 for c in found.candidates)


def test_more_users_need_no_fewer_devices():
    least = []
    for users in (50, 400):
        need = Need(isl=256, osl=64, slo=Slo(tpot_s=0.012), users=users)
        best = search("llama3-8b", "h200*8", need, Wanted(tp=1, precision="bf16", disaggregated="")).best
        least.append(best.num_devices)
    assert least[0] < least[1]


@pytest.mark.parametrize(("engine", "program", "flag"), [
    ("vllm", "vllm serve", "--tensor-parallel-size 4"),
    ("sglang", "python -m sglang.launch_server", "--tp 4"),
    ("trtllm", "trtllm-serve", "--tp_size 4"),
])  # fmt: skip
def test_the_command_starts_what_was_simulated(engine, program, flag):
    wanted = Wanted(tp=4, precision="fp8", kv="fp8", engine=engine)
    command = launch_command(deployment_of("llama3-70b", "h200*4", wanted))
    assert command.startswith(program) and flag in command and shlex.split(command)
    assert "llama3-70b" not in command and "meta-llama/Meta-Llama-3-70B" in command  # what an engine can load


def test_prompts_apart_are_started_by_two_commands():
    wanted = Wanted(precision="bf16", disaggregated="1x2+1x2")
    prefill, decode = launch_command(deployment_of("llama3-8b", "h200*4", wanted)).split(" & ")
    assert "kv_producer" in prefill and "kv_consumer" in decode
