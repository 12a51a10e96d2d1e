"""Hostile model files end in one of our errors, within bounded work."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper

import ridgeline as rl
from ridgeline.errors import ModelFileError, RidgelineError

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "lab" / "importers"))
import mutate


def saved(folder, nodes, weights=(), inputs=None, opset=18, output="y"):
    graph = helper.make_graph(list(nodes), "g", inputs or [helper.make_tensor_value_info("x", 1, ["n", 4])],
                              [helper.make_tensor_value_info(output, 1, None)], list(weights))  # fmt: skip
    path = folder / "model.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]).SerializeToString())
    return path


def external(name, location, shape, offset=0):
    tensor = TensorProto(name=name, data_type=1, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", str(offset))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return tensor


@pytest.mark.parametrize("form", list(mutate.SEEDS))
def test_mutated_files_are_loaded_or_refused(form, tmp_path):
    found, _ = mutate.campaign(form, 60, 1, tmp_path)
    assert set(found) <= {"loaded", "refused"}


def test_external_data_stays_inside_of_the_model_s_folder(tmp_path):
    secret = tmp_path / "secret.bin"
    secret.write_bytes(b"\0" * 64)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link.bin").symlink_to(secret)
    os.link(secret, folder / "hard.bin")
    (folder / "down").symlink_to(tmp_path)
    add = helper.make_node("Add", ["x", "w"], ["y"])
    for location in ("../secret.bin", str(secret), "link.bin", "hard.bin", "down/secret.bin", "missing.bin", ""):
        with pytest.raises(ModelFileError, match=r"external data|hard link|cannot read"):
            rl.load(saved(folder, [add], [external("w", location, [16])]))
    (folder / "own.bin").write_bytes(b"\0" * 64)
    assert rl.load(saved(folder, [add], [external("w", "own.bin", [4, 4])])).num_params == 16
    with pytest.raises(ModelFileError, match="past the end"):
        rl.load(saved(folder, [add], [external("w", "own.bin", [4, 4], offset=8)]))


def test_a_model_that_asks_for_four_terabytes_takes_none(tmp_path):
    shape = helper.make_tensor("s", TensorProto.INT64, [1], [1 << 40])
    path = saved(tmp_path, [helper.make_node("ConstantOfShape", ["s"], ["y"])], [shape],
                 inputs=[helper.make_tensor_value_info("x", 1, [1])])  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = rl.load(path)
    assert rl.predict(model, on="h200").peak_bytes > 1 << 42
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_cycles_unknown_names_and_names_made_twice_are_errors(tmp_path):
    node = helper.make_node
    cases = {
        "cyclic": [node("Relu", ["b"], ["a"]), node("Neg", ["a"], ["b"]), node("Add", ["a", "x"], ["y"])],
        "which nothing makes": [node("Add", ["x", "ghost"], ["y"])],
        "made twice": [node("Relu", ["x"], ["y"]), node("Neg", ["x"], ["y"])],
    }
    for told, nodes in cases.items():
        with pytest.raises(ModelFileError, match=told):
            rl.load(saved(tmp_path, nodes))


def test_unsupported_ops_opsets_and_shapes_from_data_are_named(tmp_path):
    model = rl.load(saved(tmp_path, [helper.make_node("Convv", ["x"], ["y"], name="body/conv")]))
    assert [row.op for row in model.survey if row.why] == ["Convv"]
    with pytest.raises(ModelFileError, match=r"body/conv.*Convv.*version 18.*did you mean 'Conv'"):
        rl.predict(model, on="h200", n=2)
    with pytest.raises(ModelFileError, match="op set 99"):
        rl.load(saved(tmp_path, [helper.make_node("Relu", ["x"], ["y"])], opset=99))


def test_loops_that_do_not_end_are_stopped(tmp_path):
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"])], "b",
        [helper.make_tensor_value_info("i", 7, []), helper.make_tensor_value_info("c", 9, [])],
        [helper.make_tensor_value_info("d", 9, [])])  # fmt: skip
    yes = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
    path = saved(
        tmp_path, [helper.make_node("Loop", ["", "yes"], [], body=body), helper.make_node("Relu", ["x"], ["y"])], [yes]
    )
    with pytest.raises(RidgelineError, match=r"10,000 times|100,000"):
        rl.predict(rl.load(path), on="h200", n=2)


def test_pickles_and_torchscript_are_refused_with_advice(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(torch.nn.Linear(2, 2), path)
    with pytest.raises(ModelFileError, match=r"pickle.*torch\.export"):
        rl.load(path)


def test_a_hundred_gigabytes_of_external_data_are_priced_without_being_read(tmp_path):
    width, layers = 65_536, 6
    data = tmp_path / "weights.bin"
    with data.open("wb") as file:
        file.truncate(layers * width * width * 4)  # 103 GB, none of it on the disk
    names = ["x", *[f"h{i}" for i in range(layers - 1)], "y"]
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(layers)]
    weights = [external(f"w{i}", "weights.bin", [width, width], i * width * width * 4) for i in range(layers)]
    path = saved(tmp_path, nodes, weights, inputs=[helper.make_tensor_value_info("x", 1, ["batch", width])])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = rl.load(path)
    assert model.num_params == layers * width * width
    assert rl.predict(model, on="h200", batch=8).expected_s > 0.01
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000
