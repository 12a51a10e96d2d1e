"""Write published rows in other people's spelling, or with cells of nonsense, and say how many are still understood.

    python benchmarks/respelled.py ../shared/published [--seed 0] [--broken 300]

Every cell of a row is respelled with some probability as another person would write the same thing (capitals, hyphens,
``8,192``, ``8K``, bfloat16, AllReduce, seconds in milliseconds); of the rows that were judged before, the table counts
those judged still, and those whose prediction and measurement are what they were. ``--broken`` rows get random cells
replaced by nonsense: none may raise.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path

from ridgeline.validation.measurements import read_table
from ridgeline.validation.registry import PUBLISHED, check_rows
from ridgeline.validation.verdict import Judged, Row, Unused

Respell = Callable[[str, random.Random], str]
NONSENSE = ("", "?", "n/a", "nan", "inf", "-1", "0", "1e999", "many", "8 or 16", "see notes", "\u03bc", "[]", "None",
            "1.5", "10**9", "=1+1", "a=b", "'", "99999999999999999999", "TPU v9", "fp2", "x" * 300)  # fmt: skip


def _capitals(text: str, rng: random.Random) -> str:
    return rng.choice((text, text.upper(), text.lower()))


def _count(text: str, rng: random.Random) -> str:
    if not re.fullmatch(r"\d+", text):
        return text
    ways = [text, f"{int(text):,}", f"{text}.0"]
    if int(text) >= 1024 and int(text) % 1024 == 0:
        ways.append(f"{int(text) // 1024}K")
    return rng.choice(ways)


def _hyphens(text: str, rng: random.Random) -> str:
    return _capitals(rng.choice((text, text.replace("-", " "), text.replace("-", "_"))), rng)


def _device(text: str, rng: random.Random) -> str:
    ways = [text, f"NVIDIA {text}", text.replace("-", " "), f"8x {text}", text.upper()]
    return text if re.search(r"AMD|TPU|Gaudi|Intel", text) else rng.choice(ways)


FORMATS = {
    "bf16": ("bfloat16", "BF16", "bf16 mixed"), "fp16": ("float16", "FP16", "half"), "fp32": ("FP32", "float32"),
    "fp16 mixed": ("FP16 mixed precision", "float16 mixed"), "FP8": ("fp8", "FP8 (E4M3)"), "MXFP8": ("mxfp8", "FP8-MX"),
    "amp": ("AMP", "mixed", "fp16"), "tf32": ("TF32",), "int8": ("INT8",), "NVFP4": ("nvfp4", "NVFP4 "),
}  # fmt: skip


def _format(text: str, rng: random.Random) -> str:
    return rng.choice((text, *FORMATS.get(text, (text,))))


METRICS = {
    "tokens_per_s_per_device": ("tokens/s/GPU", "tokens_per_sec_per_gpu", "Tokens_per_s_per_device"),
    "step_time_s": ("iteration_time_s", "step time (s)", "seconds_per_step", "Step_Time_s"),
    "tflops_per_device": ("TFLOPS_per_GPU", "tflops/GPU"), "all_reduce": ("AllReduce", "all-reduce", "allreduce"),
    "all_gather": ("AllGather", "all-gather"), "reduce_scatter": ("ReduceScatter", "reduce-scatter"),
    "alltoall": ("AllToAll", "all_to_all", "all-to-all"), "send_recv": ("SendRecv", "sendrecv"),
}  # fmt: skip
WORDS = {
    "none": ("None", "no", "off"), "full": ("Full", "full (all layers)"), "no": ("No", "False"), "yes": ("Yes", "True"),
    "selective": ("Selective", "selective (core attention)"),
}  # fmt: skip


def _listed(table: Mapping[str, tuple[str, ...]]) -> Respell:
    return lambda text, rng: rng.choice((text, *table.get(text, (text,))))


def _bytes(text: str, rng: random.Random) -> str:
    if not re.fullmatch(r"\d+", text):
        return text
    exact = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KB")]
    unit = next((f"{int(text) // size} {name}" for size, name in exact if int(text) % size == 0), text)
    return rng.choice((text, unit, f"{int(text):,}"))


COUNTS = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "num_devices", "tp", "pp", "vp",
                        "dp", "cp", "ep", "mbs", "gbs"), _count)  # fmt: skip
TRAINING: dict[str, Respell] = {
    **COUNTS, "device": _device, "precision": _format, "metric": _listed(METRICS), "recompute": _listed(WORDS),
    "seq_parallel": _listed(WORDS), "software": _capitals,
}  # fmt: skip
OTHER: dict[str, Respell] = {"model": _hyphens, "device": _device, "precision": _format, "num_devices": _count}
RESPELLED: dict[str, dict[str, Respell]] = {
    "training_llm": TRAINING, "training_other": OTHER, "inference_other": OTHER | {"engine": _capitals},
    "inference_llm": {"device": _device, "precision": _format, "engine": _capitals, "num_devices": _count},
    "collectives": {"collective": _listed(METRICS), "device": _device, "message_bytes": _bytes},
}  # fmt: skip


def respelled(row: Row, ways: Mapping[str, Respell], rng: random.Random, share: float = 0.5) -> Row:
    """The row as another person would have typed it."""
    changed = {name: way(row.text(name), rng) for name, way in ways.items() if rng.random() < share}
    return Row(row.line, {**row.columns, **changed})


def broken(row: Row, rng: random.Random) -> Row:
    """The row with one to four cells of nonsense."""
    names = rng.sample(sorted(row.columns), k=min(len(row.columns), rng.randint(1, 4)))
    return Row(row.line, {**row.columns, **{name: rng.choice(NONSENSE) for name in names}})


def answers(kind: str, rows: list[Row]) -> dict[tuple[int, str], tuple[float, float]]:
    found = check_rows(kind, rows)
    return {(v.row, v.unit): (v.measured, v.predicted) for v in found if isinstance(v, Judged)}


def table(folder: Path, seed: int) -> Iterator[str]:
    yield "| file | judged | respelled and judged | the same answer |\n|---|---|---|---|"
    for kind, ways in RESPELLED.items():
        rows = [Row(line, record) for line, record in read_table(folder / f"{kind}.csv")[1]]
        rng = random.Random(seed)
        before, after = answers(kind, rows), answers(kind, [respelled(row, ways, rng) for row in rows])
        kept = [key for key in before if key in after]
        same = [key for key in kept if all(abs(a / b - 1) < 1e-6 for a, b in zip(before[key], after[key], strict=True))]
        yield f"| {kind} | {len(before)} | {len(kept)} ({len(kept) / len(before):.1%}) | {len(same)} |"


def shaken(folder: Path, seed: int, num: int) -> Iterator[str]:
    for kind in (published.name for published in PUBLISHED):
        rows = [Row(line, record) for line, record in read_table(folder / f"{kind}.csv")[1]]
        rng = random.Random(seed)
        strange = [broken(row, rng) for row in rng.sample(rows, k=min(num, len(rows)))]
        found = check_rows(kind, strange)
        unused = sum(isinstance(v, Unused) for v in found)
        yield f"{kind}: {len(strange)} rows with nonsense, {unused} set aside, none raised"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("published", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--broken", type=int, default=300)
    options = parser.parse_args()
    for line in chain(table(options.published, options.seed), shaken(options.published, options.seed, options.broken)):
        print(line)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
