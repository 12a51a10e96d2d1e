"""Functions of JAX, exported as MLIR text and as artifacts, give what JAX gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ridgeline as rl
from ridgeline.errors import ModelFileError

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.filterwarnings("ignore")


def jnp() -> Any:
    import jax.numpy

    return jax.numpy


def mlp(x: Any, w1: Any, w2: Any) -> Any:
    return jax.nn.softmax(jax.nn.relu(x @ w1) @ w2 * 0.5 + 1.0)


def conv(x: Any, w: Any) -> Any:
    y = jax.lax.conv_general_dilated(
        x, w, (2, 1), [(0, 1), (2, 1)], rhs_dilation=(1, 2), dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=2)  # fmt: skip
    return jax.lax.reduce_window(jax.nn.gelu(y), -np.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp().einsum("bhqd,bhkd->bhqk", q, k) / 2.0
    mask = jnp().tril(jnp().ones(scores.shape[-2:], bool))
    return jnp().einsum("bhqk,bhkd->bhqd", jax.nn.softmax(jnp().where(mask, scores, -1e9)), v)


def loop(x: Any) -> Any:
    return jax.lax.fori_loop(0, 5, lambda i, c: c.at[i].add(1.0) * 1.5, x)


def counted(x: Any) -> Any:
    return jax.lax.while_loop(lambda c: c[1].sum() < 100.0, lambda c: (c[0] + 1, c[1] * 2.0), (0, x))


def gather(table: Any, ids: Any) -> Any:
    return table[ids], table[:, ids[0] % 3], jax.ops.segment_sum(table, ids[:, 0] % 3, 3)


def ordered(x: Any) -> Any:
    places = jnp().argsort(x, axis=1), jax.lax.top_k(x, 2)[1], jnp().argmax(x, 1)
    return jnp().sort(x, axis=0), jnp().cumsum(x, 1), *places


def draws(seed: Any) -> Any:
    return jax.random.normal(jax.random.wrap_key_data(seed, impl="threefry2x32"), (4, 5))


def given(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal(shape).astype(np.float32) for shape in shapes]


IDS = np.array([[0, 1], [4, 2], [3, 3], [2, 0], [1, 1]], np.int32)
CASES = {
    mlp: given((3, 8), (8, 16), (16, 4)),
    conv: given((2, 9, 8, 4), (3, 2, 2, 6)),
    attention: given((2, 2, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)),
    loop: given((5,)),
    counted: [np.abs(given((4,))[0])],
    gather: [given((5, 6))[0], IDS],
    ordered: given((4, 5)),
    draws: [np.array([7, 11], np.uint32)],
}


@pytest.mark.parametrize("form", ["text", "artifact", "export"])
@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_an_imported_function_gives_what_jax_gives(function: Any, form: str, tmp_path: Path) -> None:
    args = CASES[function]
    exported = jax.export.export(jax.jit(function))(*args)
    file = tmp_path / {"text": "f.mlir", "artifact": "f.mlirbc", "export": "f.bin"}[form]
    file.write_bytes({"text": lambda: str(exported.mlir_module()).encode(),
                      "artifact": lambda: exported.mlir_module_serialized,
                      "export": lambda: bytes(exported.serialize())}[form]())  # fmt: skip
    model = rl.load(file)
    assert not [row for row in model.survey if row.why]
    got = model(*[torch.from_numpy(a) for a in args])
    wanted = jax.tree.leaves(jax.jit(function)(*args))
    for mine, theirs in zip(got if isinstance(got, tuple) else (got,), wanted, strict=True):
        np.testing.assert_allclose(mine.numpy(), np.asarray(theirs), rtol=2e-5, atol=2e-6)
        assert mine.numpy().dtype == theirs.dtype


def test_an_imported_function_is_captured_and_predicted(tmp_path: Path) -> None:
    file = tmp_path / "mlp.mlir"
    file.write_text(str(jax.export.export(jax.jit(mlp))(*CASES[mlp]).mlir_module()))
    model = rl.load(file)
    assert list(model.inputs) == ["x", "w1", "w2"]
    rl.capture(model)
    assert rl.predict(model, on="h200").expected_s > 0


def test_open_dims_are_given_at_capture(tmp_path: Path) -> None:
    batch = jax.export.symbolic_shape("b")[0]
    weights = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in CASES[mlp][1:]]
    exported = jax.export.export(jax.jit(mlp))(jax.ShapeDtypeStruct((batch, 8), np.float32), *weights)
    file = tmp_path / "mlp.jax"
    file.write_bytes(exported.serialize())
    model = rl.load(file)
    assert len(model.dims) == 1
    got = model(*map(torch.from_numpy, CASES[mlp]))
    np.testing.assert_allclose(got.numpy(), np.asarray(mlp(*CASES[mlp])), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("text", "told"), [
    ('%0 = stablehlo.custom_call @evil(%a) : (tensor<2xf32>) -> tensor<2xf32>', "'evil'"),
    ("%1, %0 = stablehlo.rng_bit_generator %b, algorithm = THREE_FRY : "
     "(tensor<2xui64>) -> (tensor<2xui64>, tensor<2xf32>)", "random bits"),
    ("%0 = stablehlo.", "cannot be read"),
])  # fmt: skip
def test_what_is_refused_is_named(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "f.mlir"
    file.write_text(f"func.func @main(%a: tensor<2xf32>, %b: tensor<2xui64>) -> tensor<2xf32> {{\n{text}\n"
                    "return %0 : tensor<2xf32>\n}")  # fmt: skip
    with pytest.raises(ModelFileError, match=told):
        rl.load(file)(torch.zeros(2), torch.zeros(2, dtype=torch.uint64))


def test_bytecode_that_aborts_its_reader_is_our_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = tmp_path / "reader.py"
    reader.write_text("import os\nos.abort()\n")
    monkeypatch.setattr("ridgeline.capture.importers.mlir.__file__", str(reader))
    (tmp_path / "net.mlirbc").write_bytes(b"ML\xefR" + bytes(100))
    with pytest.raises(ModelFileError, match="cannot be read as StableHLO: it is damaged"):
        rl.load(tmp_path / "net.mlirbc")


def test_truncated_artifacts_are_our_errors(tmp_path: Path) -> None:
    data = bytes(jax.export.export(jax.jit(loop))(*CASES[loop]).serialize())
    for size in (66, 100, 300, len(data) // 2):
        file = tmp_path / f"{size}.mlirbc"
        file.write_bytes(data[:size])
        with pytest.raises(ModelFileError):
            rl.load(file)
