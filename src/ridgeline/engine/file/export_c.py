"""An engine as C: a source file and a file of weights, for float32 programs of fixed shapes, with libm alone.

For small networks in places without Python: loops as they are, no threads, no vector code but the compiler's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ridgeline.engine.file.execute import NO_EFFECT, interpret
from ridgeline.engine.file.program import Program, Step, leaves
from ridgeline.errors import EngineError

if TYPE_CHECKING:
    from ridgeline.engine.file.engine import Engine

UNARY = {
    "relu": "v > 0 ? v : 0", "sigmoid": "1 / (1 + expf(-v))", "tanh": "tanhf(v)", "silu": "v / (1 + expf(-v))",
    "gelu": "0.5f * v * (1 + erff(v * 0.70710678f))", "exp": "expf(v)", "sqrt": "sqrtf(v)", "neg": "-v",
    "erf": "erff(v)",
}  # fmt: skip
BINARY = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
ALIASES = ("reshape", "view", "flatten", "contiguous", "clone", "detach", "unsqueeze", "squeeze", "_unsafe_view")
KERNELS = """
static void linear(const float *x, const float *w, const float *b, float *y, long rows, long k, long n) {
  for (long i = 0; i < rows; i++)
    for (long j = 0; j < n; j++) {
      float sum = 0;
      for (long c = 0; c < k; c++) sum += x[i * k + c] * w[j * k + c];
      y[i * n + j] = sum + (b ? b[j] : 0);
    }
}
static void layer_norm(const float *x, const float *w, const float *b, float *y, long rows, long n, float eps) {
  for (long i = 0; i < rows; i++) {
    double mean = 0, square = 0;
    for (long c = 0; c < n; c++) mean += x[i * n + c];
    mean /= n;
    for (long c = 0; c < n; c++) square += (x[i * n + c] - mean) * (x[i * n + c] - mean);
    double scale = 1 / sqrt(square / n + eps);
    for (long c = 0; c < n; c++)
      y[i * n + c] = (float)((x[i * n + c] - mean) * scale) * (w ? w[c] : 1) + (b ? b[c] : 0);
  }
}
static void softmax(const float *x, float *y, long rows, long n) {
  for (long i = 0; i < rows; i++) {
    float most = x[i * n], sum = 0;
    for (long c = 1; c < n; c++) if (x[i * n + c] > most) most = x[i * n + c];
    for (long c = 0; c < n; c++) sum += y[i * n + c] = expf(x[i * n + c] - most);
    for (long c = 0; c < n; c++) y[i * n + c] /= sum;
  }
}
static void conv2d(const float *x, const float *w, const float *b, float *y, const long *s) {
  /* s: batch, in, height, width, out, kh, kw, stride h w, padding h w, dilation h w, groups, out height, out width */
  long in = s[1] / s[13], out = s[4] / s[13];
  for (long i = 0; i < s[0]; i++) for (long o = 0; o < s[4]; o++)
  for (long p = 0; p < s[14]; p++) for (long q = 0; q < s[15]; q++) {
    float sum = b ? b[o] : 0;
    for (long c = 0; c < in; c++) for (long u = 0; u < s[5]; u++) for (long v = 0; v < s[6]; v++) {
      long r = p * s[7] - s[9] + u * s[11], t = q * s[8] - s[10] + v * s[12];
      if (r >= 0 && r < s[2] && t >= 0 && t < s[3])
        sum += x[((i * s[1] + o / out * in + c) * s[2] + r) * s[3] + t] * w[((o * in + c) * s[5] + u) * s[6] + v];
    }
    y[((i * s[4] + o) * s[14] + p) * s[15] + q] = sum;
  }
}
static void batch_norm(const float *x, const float *w, const float *b, const float *m, const float *v, float *y,
                       long batch, long n, long inner, float eps) {
  for (long i = 0; i < batch; i++) for (long c = 0; c < n; c++) {
    float scale = (w ? w[c] : 1) / sqrtf(v[c] + eps), shift = (b ? b[c] : 0) - m[c] * scale;
    for (long k = 0; k < inner; k++) y[(i * n + c) * inner + k] = x[(i * n + c) * inner + k] * scale + shift;
  }
}
static void max_pool2d(const float *x, float *y, long planes, long h, long w, long k, long s, long pad,
                       long oh, long ow) {
  for (long i = 0; i < planes; i++) for (long p = 0; p < oh; p++) for (long q = 0; q < ow; q++) {
    float most = -INFINITY;
    for (long u = 0; u < k; u++) for (long v = 0; v < k; v++) {
      long r = p * s - pad + u, t = q * s - pad + v;
      if (r >= 0 && r < h && t >= 0 && t < w && x[(i * h + r) * w + t] > most) most = x[(i * h + r) * w + t];
    }
    y[(i * oh + p) * ow + q] = most;
  }
}
static void mean(const float *x, float *y, long rows, long n) {
  for (long i = 0; i < rows; i++) {
    double sum = 0;
    for (long c = 0; c < n; c++) sum += x[i * n + c];
    y[i] = (float)(sum / n);
  }
}
"""


def export_c(engine: Engine, folder: str | os.PathLike[str], example: Sequence[Tensor]) -> list[Path]:
    """Write ``engine.c`` and ``weights.bin`` for inputs of these shapes.

    ``int ridgeline_load(const char *weights)`` reads the weights and
    ``void ridgeline_run(const float *const *inputs, float **outputs)`` runs; with ``-DRIDGELINE_MAIN`` it reads
    inputs as raw float32 from stdin and writes outputs.
    """
    program = engine.contents.programs[-1]
    writer = _Writer(program, engine.contents.weights, example)
    source = writer.source(engine.name)
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        (target / "engine.c").write_text(source, encoding="ascii")
        with (target / "weights.bin").open("wb") as file:
            for name in writer.order:
                file.write(engine.contents.weights[name].detach().cpu().contiguous().numpy().tobytes())
    except OSError as error:
        raise EngineError(f"cannot write {target}: {error.strerror or error}") from error
    return [target / "engine.c", target / "weights.bin"]


class _Writer:
    """From steps to calls of C functions."""

    def __init__(self, program: Program, weights: Any, example: Sequence[Tensor]) -> None:
        self.program, self.weights = program, weights
        self.order = sorted(program.weight_names())
        self.places: dict[str, int] = {}
        at = 0
        for name in self.order:
            if weights[name].dtype != torch.float32:
                raise EngineError(f"weight {name} is {weights[name].dtype}: C is written for float32 alone")
            self.places[name], at = at, at + weights[name].numel()
        self.num_weights = at
        self.shapes: dict[int, tuple[int, ...]] = {i: tuple(x.shape) for i, x in enumerate(example)}
        self.names: dict[int, str] = {i: f"in[{i}]" for i in range(len(example))}
        if any(x.dtype != torch.float32 for x in example):
            raise EngineError("C is written for float32 inputs alone")

        def each(index: int, step: Step, results: list[Any]) -> None:
            for number, found in zip(step.out, results, strict=False):
                if isinstance(found, Tensor):
                    self.shapes[number] = tuple(found.shape)

        self.values: dict[int, Any] = {}

        def note(index: int, step: Step, args: list[Any]) -> None:
            self.values[index] = args

        with torch.no_grad():
            interpret(program, example, weights.__getitem__, torch.device("cpu"), each, note)
        self.arena = 0
        self.lines = [line for i, step in enumerate(program.steps) for line in self._step(i, step)]

    def _name(self, value: Any) -> str:
        if value is None:
            return "0"
        if isinstance(value, dict) and "w" in value:
            return f"(weights + {self.places[value['w']]})"
        return self.names[value["v"]]

    def _shape(self, value: Any) -> tuple[int, ...]:
        return tuple(self.weights[value["w"]].shape) if "w" in value else self.shapes[value["v"]]

    def _buffer(self, number: int) -> str:
        self.names[number] = f"(arena + {self.arena})"
        self.arena += -(-_count(self.shapes[number]) // 16) * 16
        return self.names[number]

    def _step(self, index: int, step: Step) -> list[str]:
        base = step.op.partition("::")[2].partition(".")[0]
        args, out = list(step.args), step.out[0]
        if step.op.startswith("size::") or base == "sym_size":
            return []
        x = args[0]
        if base in ALIASES or step.op in NO_EFFECT:
            self.names[out] = self._name(x)
            return []
        shape = self.shapes[out]
        made: Callable[[str], list[str]] | None = None
        if base == "linear":
            k, bias = self._shape(x)[-1], args[2] if len(args) > 2 else None
            call = f"{_count(shape) // shape[-1]}, {k}, {shape[-1]}"
            made = lambda y: [f"linear({self._name(x)}, {self._name(args[1])}, {self._name(bias)}, {y}, {call});"]
        elif base in UNARY and not step.kwargs and step.op.startswith("aten::"):
            loop = f"for (long i = 0; i < {_count(shape)}; i++)"
            made = lambda y: [f"{loop} {{ float v = {self._name(x)}[i]; {y}[i] = {UNARY[base]}; }}"]
        elif base in BINARY and not step.kwargs:
            parts = [self._operand(a, shape, step) for a in args[:2]]
            loop = f"for (long i = 0; i < {_count(shape)}; i++)"
            made = lambda y: [f"{loop} {y}[i] = {parts[0]} {BINARY[base]} {parts[1]};"]
        elif base == "layer_norm" and len(args[1]) == 1:
            eps = float(args[4]) if len(args) > 4 else 1e-5
            w, b = ((args[i] if len(args) > i else None) for i in (2, 3))
            made = lambda y: [f"layer_norm({self._name(x)}, {self._name(w)}, {self._name(b)}, {y}, "
                              f"{_count(shape) // shape[-1]}, {shape[-1]}, {eps!r}f);"]  # fmt: skip
        elif base == "softmax" and args[1] in (-1, len(shape) - 1):
            made = lambda y: [f"softmax({self._name(x)}, {y}, {_count(shape) // shape[-1]}, {shape[-1]});"]
        elif base == "conv2d":
            defaults = {3: (1, 1), 4: (0, 0), 5: (1, 1)}  # stride, padding, dilation
            pairs = [_pair(args[i]) if len(args) > i else default for i, default in defaults.items()]
            groups = args[6] if len(args) > 6 else 1
            w = self._shape(args[1])
            sizes = [*self._shape(x), w[0], w[2], w[3], *pairs[0], *pairs[1], *pairs[2], groups, *shape[2:]]
            bias = args[2] if len(args) > 2 else None
            text = ", ".join(map(str, sizes))
            made = lambda y: [f"{{ static const long s[] = {{{text}}}; "
                              f"conv2d({self._name(x)}, {self._name(args[1])}, {self._name(bias)}, {y}, s); }}"
                              ]  # fmt: skip
        elif base == "batch_norm" and args[5] is False:
            inner = _count(shape[2:])
            names = ", ".join(self._name(a) for a in args[1:5])
            rest = f"{shape[0]}, {shape[1]}, {inner}, {float(args[7])!r}f"
            made = lambda y: [f"batch_norm({self._name(x)}, {names}, {y}, {rest});"]
        elif base == "max_pool2d":
            (k, k2), (s, s2) = _pair(args[1]), _pair(args[2]) if len(args) > 2 and args[2] else _pair(args[1])
            pad = _pair(args[3]) if len(args) > 3 else (0, 0)
            if k == k2 and s == s2 and pad[0] == pad[1] and len(args) <= 4:
                h, w2 = self._shape(x)[-2:]
                planes = _count(shape[:-2])
                rest = f"{planes}, {h}, {w2}, {k}, {s}, {pad[0]}, {shape[-2]}, {shape[-1]}"
                made = lambda y: [f"max_pool2d({self._name(x)}, {y}, {rest});"]
        elif (base == "adaptive_avg_pool2d" and _pair(args[1]) == (1, 1)) or (
            base == "mean" and sorted(d % len(self._shape(x)) for d in args[1]) == list(
                range(len(self._shape(x)) - len(args[1]), len(self._shape(x))))
        ):  # fmt: skip
            num = _count(self._shape(x)) // _count(shape)
            made = lambda y: [f"mean({self._name(x)}, {y}, {_count(shape)}, {num});"]
        if made is None:
            raise EngineError(f"{step.op} ({step.module or 'top'}) is not written to C")
        return made(self._buffer(out))

    def _operand(self, value: Any, shape: tuple[int, ...], step: Step) -> str:
        if isinstance(value, (int, float)):
            return f"{float(value)!r}f"
        own = self._shape(value)
        if own == shape:
            return f"{self._name(value)}[i]"
        if _count(own) == 1:
            return f"{self._name(value)}[0]"
        if own == shape[len(shape) - len(own) :]:
            return f"{self._name(value)}[i % {_count(own)}]"
        raise EngineError(f"{step.op} broadcasts {own} to {shape}, which is not written to C")

    def source(self, name: str) -> str:
        outs = [x for x in leaves(self.program.outputs) if isinstance(x, dict) and ("v" in x or "w" in x)]
        ins = [_count(self.shapes[i]) for i in range(len(self.program.inputs))]
        sizes = [_count(self._shape(x)) for x in outs]
        pairs = enumerate(zip(outs, sizes, strict=True))
        copies = "\n  ".join(f"memcpy(out[{i}], {self._name(x)}, {4 * size});" for i, (x, size) in pairs)
        body = "\n  ".join(self.lines)
        functions = ["static void " + text for text in KERNELS.split("static void ")[1:]]
        used = "".join(text for text in functions if f"{text[12:].partition('(')[0]}(" in body)
        title = "".join(c if c.isalnum() else "_" for c in name.encode("ascii", "replace").decode())
        return f"""/* {title}: written by ridgeline; cc -O3 -DRIDGELINE_MAIN engine.c -lm */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static float *weights, arena[{max(1, self.arena)}];
{used}
int ridgeline_load(const char *path) {{
  FILE *file = fopen(path, "rb");
  if (!file) return 1;
  weights = malloc({4 * max(1, self.num_weights)});
  int ok = weights && fread(weights, 4, {self.num_weights}, file) == {self.num_weights};
  fclose(file);
  return !ok;
}}
void ridgeline_run(const float *const *in, float **out) {{
  {body}
  {copies}
}}
#ifdef RIDGELINE_MAIN
int main(int argc, char **argv) {{
  static const long ins[] = {{{", ".join(map(str, ins))}}}, outs[] = {{{", ".join(map(str, sizes))}}};
  const float *in[{len(ins)}];
  float *out[{len(sizes)}];
  if (ridgeline_load(argc > 1 ? argv[1] : "weights.bin")) {{ fprintf(stderr, "cannot read the weights\\n"); return 1; }}
  for (int i = 0; i < {len(ins)}; i++) {{
    float *held = malloc(4 * ins[i]);
    if (!held || fread(held, 4, ins[i], stdin) != (size_t)ins[i]) {{ fprintf(stderr, "too few inputs\\n"); return 1; }}
    in[i] = held;
  }}
  for (int i = 0; i < {len(sizes)}; i++) if (!(out[i] = malloc(4 * outs[i]))) return 1;
  ridgeline_run(in, out);
  for (int i = 0; i < {len(sizes)}; i++) fwrite(out[i], 4, outs[i], stdout);
  return 0;
}}
#endif
"""


def _count(shape: Sequence[int]) -> int:
    made = 1
    for size in shape:
        made *= size
    return made


def _pair(value: Any) -> tuple[int, int]:
    found = value if isinstance(value, (list, tuple)) else [value]
    return (int(found[0]), int(found[-1]))
