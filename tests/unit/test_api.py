"""The verbs as a person calls them: names, graphs, devices with changes, and helpful refusals."""

from __future__ import annotations

import pytest

import ridgeline
from ridgeline.api import predict, validate
from ridgeline.cost.analyses.timeline import timeline
from ridgeline.errors import CostError, HardwareError, InputError, ModelError
from ridgeline.graph import Builder, tensor
from ridgeline.hardware import device
from ridgeline.models import build


def test_a_name_of_the_zoo_and_its_graph_are_predicted_alike() -> None:
    named, built = predict("llama3-8b", batch=2, seq=512), predict(build("llama3-8b", batch=2, seq=512))
    assert named.to_dict() == built.to_dict()


def test_the_default_is_an_eager_h200() -> None:
    p = predict("bert-large")
    assert (p.device.name, p.execution) == ("h200", "eager")


def test_a_device_may_be_given_as_a_value() -> None:
    assert predict("bert-large", on=device("a100-sxm-80gb")).busy_s == predict("bert-large", on="a100-sxm-80gb").busy_s


def test_a_device_may_be_changed_in_its_name() -> None:
    plain, doubled = (predict("llama3-8b", mode="decode", on=f"h200{more}") for more in ("", " hbm_bandwidth=2x"))
    assert doubled.device.is_imagined and doubled.busy_s < 0.8 * plain.busy_s


def test_options_are_for_names_and_a_graph_refuses_them() -> None:
    with pytest.raises(InputError, match=r"batch, seq: a captured graph has its sizes already"):
        predict(build("bert-large"), batch=4, seq=128)


def test_a_module_is_not_a_graph_and_the_error_says_how_to_make_one() -> None:
    with pytest.raises(InputError, match=r"not int: capture the model first with ridgeline\.capture"):
        predict(42)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"model": "lama3-8b"}, ModelError, "did you mean .*'llama3-8b'"),
        ({"model": "llama3-8b", "on": "h20O"}, HardwareError, "did you mean .*'h200'"),
        ({"model": "llama3-8b", "execution": "eagre"}, CostError, "did you mean 'eager'"),
        ({"model": "llama3-8b", "mode": "trian"}, ModelError, "did you mean 'train'"),
        ({"model": "llama3-8b", "seqlen": 5}, ModelError, "no option 'seqlen'; did you mean 'seq'"),
        ({"model": "llama3-8b", "on": "h200 hbm_bandwith=2x"}, HardwareError, "hbm_bandwidth"),
        ({"model": "bert-large", "seq": 513}, ModelError, "513 is 1 more than"),
    ],
)
def test_a_word_nobody_knows_suggests_the_nearest(kwargs, error, match) -> None:
    with pytest.raises(error, match=match):
        predict(**kwargs)


def test_the_package_offers_the_verb() -> None:
    assert ridgeline.predict is predict
    p = ridgeline.predict("resnet50", batch=8)
    row = p.rows()[0]
    for column in "name module op bound flops bytes floor_s expected_s basis".split():
        assert hasattr(row, column)


def test_a_405b_model_costs_what_one_layer_does(num_calls) -> None:
    assert num_calls(lambda: predict("llama3-405b", mode="train", seq=4096)) < 150_000  # 73,000 of the first; 0.1 s


def test_a_timeline_holds_kernels_calls_and_memory() -> None:
    p = predict("resnet50")
    trace = timeline(p)
    assert {"device", "host"} <= set(trace.lanes())
    assert trace.busy_s("device") == pytest.approx(p.busy_s)
    assert trace.end_s == pytest.approx(p.expected_s, rel=0.02)


def test_a_long_timeline_is_cut_and_says_so() -> None:
    cut = timeline(predict("llama3-8b"), max_spans=50)
    assert any("50 spans" in note for note in cut.notes)


def test_measured_operators_are_judged(tmp_path) -> None:
    path = tmp_path / "measured.csv"
    path.write_text(
        "kind,dtype,phase,library,shape,measured_s\n"
        "gemm,bf16,fwd,cublas,m=4096;n=4096;k=4096,0.000215\n"
        "softmax,bf16,fwd,aten,n=8192;c=1024,0.000013\n"
    )
    checked = validate(path, on="h200")
    assert checked.all.n == 2 and set(checked.by()) == {"gemm", "softmax"}
    assert checked.by()["gemm"].mape < 0.3


def test_a_hand_written_graph_is_predicted() -> None:
    b = Builder("hand")
    x, w = b.input("x", tensor((128, 256))), b.param("w", tensor((512, 256)))
    (y,) = b.node("matmul", [x, w], [tensor((128, 512))], b=1, m=128, n=512, k=256, trans_b=True)
    p = predict(b.finish([y]), on="l40s")
    assert p.flops == 2 * 128 * 512 * 256 and p.num_kernels == 1 and p.expected_s > p.busy_s > 0


def test_a_device_without_the_units_says_what_stands_in() -> None:
    notes = predict("llama3-8b", on="v100-sxm2-32gb").notes
    assert any("no bf16 matrix units" in note and "fp32" in note for note in notes)
    assert not any("matrix units" in note for note in predict("llama3-8b", on="h200").notes)
