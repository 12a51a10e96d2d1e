"""What cuDNN takes: the learned trees against kernels that ran."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from ridgeline.cost.time.conv.cudnn_choice import FILE, LEAF, VOTES, Shape, Tree, choice_of, choose, features, text_of
from ridgeline.resources import data_dir

from .test_conv import RECORDINGS

SHAPE = Shape("fwd", "bf16", True, 16, 128, 128, 1, 9, 3, 1, 1, 28, 28, 784)


def test_a_tree_is_walked_left_where_the_value_is_at_most_the_limit():
    tree = Tree((1, LEAF, 0, LEAF, LEAF), (5.0, 0.0, 2.0, 0.0, 0.0), (2, 7, 4, 8, 9))
    assert [tree.answer(v) for v in ((0.0, 5.0), (2.0, 6.0), (3.0, 6.0))] == [7, 8, 9]


def test_a_choice_is_read_back_from_its_text():
    choice = choice_of("tma 128 256 64 2 4 1")
    assert (choice.way, choice.rows, choice.columns, choice.depth) == ("tma", 128, 256, 64)
    assert (choice.cluster_rows, choice.cluster_columns, choice.shared) == (2, 4, True)
    assert text_of(choice) == "tma 128 256 64 2 4 1"


def test_features_do_not_depend_on_what_the_library_is_not_told():
    assert (
        len({len(features(s)) for s in (SHAPE, Shape("wgrad", "fp32", False, 1, 3, 64, 1, 49, 7, 2, 3, 9, 9, 25))}) == 1
    )


def test_the_trees_fit_into_the_repository():
    assert (data_dir() / FILE).stat().st_size < 700_000
    assert (data_dir() / VOTES).stat().st_size < 400_000


def test_trees_vote_where_a_single_one_is_often_wrong():
    def told(dtype, groups=1, taps=9, side=3):
        return choose(Shape("fwd", dtype, False, 24, 256, 256, groups, taps, side, 1, side // 2, 40, 40, 1600))

    assert len(told("bf16")) == 1  # right in 97 of a hundred
    assert all(len(votes) == 4 for votes in (told("fp32"), told("tf32"), told("bf16", 4), told("bf16", 1, 1, 1)))


def test_depthwise_weight_gradients_are_told_apart_in_single_precision_alone():
    def ways(dtype):
        shape = Shape("wgrad", dtype, True, 16, 64, 64, 64, 9, 3, 1, 1, 28, 28, 784)
        return {choice.way for choice in choose(shape)}

    assert ways("fp32") <= {"direct", "stencil", "atomic"} and ways("fp32")
    assert not ways("bf16")


def test_a_batch_that_fills_the_chip_takes_larger_tiles_than_one_image():
    one, many = choose(SHAPE), choose(Shape("fwd", "bf16", True, 100, 128, 128, 1, 9, 3, 1, 1, 28, 28, 784))
    assert many[0].rows * many[0].columns >= one[0].rows * one[0].columns
    assert many[0].way == "tma"


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason="the H200 recordings are not here")
def test_the_tile_that_ran_is_the_one_told_in_nine_of_ten_recordings():
    """Recordings nobody grew the trees from: forward, dense, 16 bits, tiles fed by TMA by the kernel's name."""
    right = total = 0
    with gzip.open(RECORDINGS / "operators_seed1.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines][1:]
    for row in rows:
        d = row["shape"]
        if row["kind"] != "conv2d" or row["phase"] != "fwd" or d.get("groups", 1) > 1 or "kernels" not in row:
            continue
        found = [re.search(r"sm90_xmma_fprop.*tilesize(\d+)x(\d+)x(\d+)", name) for name, _ in row["kernels"]]
        tiles = [tuple(map(int, match.groups())) for match in found if match]
        if not tiles or row["dtype"] not in ("bf16", "fp16"):
            continue
        pad, k, stride = d["k"] // 2, d["k"], d["stride"]
        out = ((d["h"] + 2 * pad - k) // stride + 1) * ((d["w"] + 2 * pad - k) // stride + 1)
        told = choose(Shape("fwd", row["dtype"], bool(d.get("nhwc", 0)), d["n"], d["c"], d["o"], 1, k * k, k, stride,
                            pad, d["h"], d["w"], out))  # fmt: skip
        right += (told[0].rows, told[0].columns, told[0].depth) == tiles[0]
        total += 1
    assert total > 60
    assert right / total > 0.88


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason="the H200 recordings are not here")
def test_gradients_from_shared_memory_are_told_as_a_device_answers():
    """Engines 16 and 19 of weight gradients in groups are the kernel with tiles in shared memory."""
    told = asked = false = 0
    with gzip.open(RECORDINGS / "cudnn_groups_recorded.jsonl.gz", "rt") as lines:
        for line in lines:
            op, dtype, x, w, y, stride, padding, last, (engine, _, _) = json.loads(line)[2]
            if op != "wgrad" or dtype not in ("bf16", "fp16") or len(x) != 4:
                continue
            choice = choose(Shape(op, dtype, bool(last), x[0], x[1], w[0], x[1] // w[1], w[2] * w[3], w[3], stride[1],
                                  padding[1], x[2], x[3], y[2] * y[3]))  # fmt: skip
            asked += engine in (16, 19)
            told += engine in (16, 19) and choice[0].way == "shared"
            false += engine not in (16, 19) and choice[0].way == "shared"
    assert asked > 40 and told > 0.7 * asked and false < 0.3 * asked
