"""``ridgeline kernels``: lists, packs, and says why it cannot race here."""

import json
import math

import pytest

torch = pytest.importorskip("torch")

from ridgeline.bench.race import Row, standings
from ridgeline.bench.tune import neighbors
from ridgeline.cli.app import run
from ridgeline.cli.kernels import race_table
from ridgeline.kernels.rms_norm.config import Backward, Forward


def row(contender, seconds, phase="fwd", sizes="rows=1"):
    return Row("rms_norm", "bfloat16", sizes, phase, contender, seconds, seconds, seconds, 3, 1000)


def test_the_list_names_every_function(capsys):
    assert run(["kernels"]) == 0
    shown = capsys.readouterr().out
    assert "rms_norm" in shown and "cross_entropy" in shown


def test_the_list_is_json_when_asked_and_says_what_is_supported(capsys):
    assert run(["kernels", "list", "softmax", "scan", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["functions"]
    assert set(found) == {"softmax", "scan"} and found["softmax"]["types"] == ["float32", "float16", "bfloat16"]
    assert found["softmax"]["gradient"] and not found["scan"]["gradient"] and found["scan"]["types"] == ["float32"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_race_without_a_gpu_says_so(capsys):
    assert run(["kernels", "race"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_a_misspelt_action_or_kernel_suggests_the_right_one(capsys):
    assert run(["kernels", "rase"]) == 2
    assert "race" in capsys.readouterr().err
    assert run(["kernels", "list", "rms_nrom"]) == 2
    assert "rms_norm" in capsys.readouterr().err


def test_a_pack_is_written_where_asked(tmp_path, capsys, monkeypatch):
    import ridgeline.kernels.variants as variants

    monkeypatch.setattr(variants, "default_cases", lambda trial: trial.checks[:1])
    assert run(["kernels", "pack", "relu2", "--out", str(tmp_path / "pack")]) == 0
    assert (tmp_path / "pack" / "index.json").exists()
    assert "RIDGELINE_KERNEL_PACK" in capsys.readouterr().out


def test_standings_compare_with_the_best_contender_of_each_case():
    rows = [row("ridgeline", 1.0), row("eager", 4.0), row("liger", 2.0), row("compiled", math.nan)]
    rows += [row("ridgeline", 1.0, sizes="rows=2"), row("eager", 0.5, sizes="rows=2")]
    (found,) = standings(rows)
    assert found.num_cases == 2 and found.num_lost == 1
    assert found.speedup == pytest.approx(1.0)


def test_the_table_shows_who_could_not_run():
    made = race_table("rms_norm", [row("ridgeline", 1.0), row("eager", 2.0), row("liger", math.nan)], 4e12)
    cells = [list(column.cells)[0] for column in made.columns]
    assert str(cells[-1]) == "2.00×" and cells[-2] == "–"


def test_neighbors_are_valid_and_differ():
    found = neighbors(Backward(1, 2, 2048, 8, 3, 2, True))
    assert len(found) == 26 and all(config.num_stages >= 1 for config in found)
    assert {config.num_warps for config in neighbors(Forward(1, 2, 2048, 8))} == {4, 16}
