"""Calibrates the 90 % intervals on measurements that no fit has seen, and says how many of them the intervals hold.

    python -m lab.fit intervals [--write] [--models] [--device h200]

Split-conformal: the score of a measurement is its error (a logarithm) over the half-width it was promised, and a
group's widths are scaled by the score that nine in ten of the group stay under. Each sample of operators, and each
recorded network, is left out in turn to count how many lie inside. Point predictions stay as they are. ``--write``
scales the calibration's widths of operators by family; ``--models`` captures the recorded networks (minutes), and
prints what ``MODEL_WIDTH`` and ``HOST_SPREAD`` of ``cost/interval.py`` should be.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lab.fit.interval_widths import untold
from lab.fit.recordings import DATA, load_models, load_operators, update_calibration
from lab.planted.interval_slack import Promise, promises
from lab.planted.recordings import suite_folder, suites
from lab.validate.operators import errors
from ridgeline.basis import Basis
from ridgeline.bench.fitting import family_of
from ridgeline.cost.interval import HOST_SPREAD, MODEL_WIDTH, SHARED_FRAC
from ridgeline.cost.price import pricer_of
from ridgeline.hardware import device

COVER = 0.9
SAMPLES = ("blind_seed6053", "blind_seed6063", "blind_seed6073", "blind_seed6093")
"""The last four: earlier ones have been read since by fits and by people, and their errors are smaller."""
FEW = 40
"""Calls of a family below which its widths stay as they are."""
OTHER_PROGRAMS = ("t5-large-8x512", "qwen3moe-4l-prefill-2x1024")
"""transformers 5.22, with which networks are captured, runs other kernels here than 5.17, with which they were recorded
(attention of T5 fused, experts in one product): the two times are of different programs."""


class Score(NamedTuple):
    group: str
    left_out: str  # what is left out together
    error: float
    width: float


def quantile(values: Sequence[float], wanted: float = COVER) -> float:
    """What a next value stays under with this chance, if all are alike."""
    ordered = sorted(values)
    return ordered[min(len(ordered), math.ceil(wanted * (len(ordered) + 1))) - 1]


def operators(device_name: str) -> list[Score]:
    """Calls of all samples that no fit has seen, with the widths that the calibration promises."""
    pricer = pricer_of(device(device_name))
    return [
        Score(error["family"], str(error["row"]["seed"]), abs(error["log"]), error["width"])
        for pattern in SAMPLES
        for error in errors(load_operators(device_name, pattern), pricer)
        if not untold(error["row"])
    ]


def coverage(scores: Sequence[Score]) -> float:
    return sum(score.error <= score.width for score in scores) / len(scores)


def crossed(scores: Sequence[Score]) -> float:
    """The share inside when each sample's widths are scaled by what the others ask for."""
    inside = 0
    for name in {score.left_out for score in scores}:
        scale = quantile([score.error / score.width for score in scores if score.left_out != name])
        inside += sum(score.error <= scale * score.width for score in scores if score.left_out == name)
    return inside / len(scores)


def gains(suite_names: Sequence[str]) -> list[Promise]:
    """Gains that rules promised of cases they had not seen, where the fix brought more than noise."""
    found = [promise for suite in suite_names for promise in promises(suite_folder(suite))]
    return [promise for promise in found if promise.counts and promise.high_ms > 0]


class Network(NamedTuple):
    name: str
    family: str
    busy: float  # logarithm of predicted over recorded
    wall: float
    of_calls: float  # half-width of the sum of calls, without what a model adds
    host_share: float
    is_artifact: bool


def networks(device_name: str) -> list[Network]:
    import torch

    import ridgeline as rl
    from lab.validate.models import captured

    torch.set_default_dtype(torch.bfloat16)
    graphs: dict[str, rl.Graph] = {}
    found = []
    for row in load_models(device_name):
        name = row["name"]
        if name in OTHER_PROGRAMS:
            continue
        if name not in graphs:
            graphs[name] = captured(name)
        p = rl.predict(graphs[name], on=device_name, execution=row["execution"])
        shared, own = defaultdict[str, float](float), 0.0
        for line in p.lines:
            width_s = line.width * line.busy_s * line.times
            shared[line.family] += SHARED_FRAC * width_s
            own += ((1 - SHARED_FRAC) * width_s) ** 2
        of_calls = math.sqrt(sum(v * v for v in shared.values()) + own) / p.busy_s
        wall = math.log(p.expected_s / min(row["wall_s"], row["loop_s"]))
        share = max(0.0, p.expected_s - p.busy_s) / p.expected_s
        found.append(Network(f"{name} {row['execution']}", name.split("-")[0], math.log(p.busy_s / row["busy_s"]), wall,
                             of_calls, share, "artifact" in row))  # fmt: skip
    return found


def fitted(found: Sequence[Network], score: Callable[[Network], float]) -> tuple[float, int]:
    """The coefficient that nine in ten ask for, and how many are inside with what the other families ask for."""
    inside = 0
    for family in {network.family for network in found}:
        others = quantile([score(network) for network in found if network.family != family])
        inside += sum(score(network) <= others for network in found if network.family == family)
    return quantile([score(network) for network in found]), inside


def show_networks(found: Sequence[Network]) -> None:
    model, inside = fitted(found, lambda one: math.sqrt(max(0.0, one.busy**2 - one.of_calls**2)))
    held = sum(abs(one.busy) <= math.hypot(one.of_calls, MODEL_WIDTH[Basis.FITTED]) for one in found)
    print(f"busy time: MODEL_WIDTH {model:.3f}, {inside} of {len(found)} inside, families left out; {held} as shipped")
    clean = [one for one in found if not one.is_artifact]

    def beyond(one: Network) -> float:
        left = abs(one.wall) - math.hypot(one.of_calls, MODEL_WIDTH[Basis.FITTED])
        return max(0.0, left) / max(one.host_share, 1e-9)

    host, inside = fitted(clean, beyond)
    held = sum(beyond(one) <= HOST_SPREAD for one in clean)
    print(f"wall time: HOST_SPREAD {host:.3f}, {inside} of {len(clean)} inside, families left out; {held} as shipped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--models", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    scores, scales = operators(options.device), dict[str, float]()
    print(f"{'family':14} {'calls':>6} inside  scale  inside, each sample left out")
    for family in sorted({score.group for score in scores}):
        own = [score for score in scores if score.group == family]
        scales[family] = quantile([score.error / score.width for score in own]) if len(own) >= FEW else 1.0
        told = f"{crossed(own):.1%}" if len(own) >= FEW else "few: kept"
        print(f"{family:14} {len(own):6} {coverage(own):6.1%} {scales[family]:6.3f}  {told}")
    print(f"{'all':14} {len(scores):6} {coverage(scores):6.1%}")
    if options.write:
        write(options.device, scales)
    every = gains(suites(options.device))
    for name, chosen in (("host", [p for p in every if p.of_host]), ("device", [p for p in every if not p.of_host])):
        inside = sum(p.low_ms <= p.case.gain_s * 1e3 <= p.high_ms for p in chosen)
        print(f"gains of {name} time, promised before a case was seen: {inside} of {len(chosen)} inside")
    if options.models:
        show_networks(networks(options.device))


def write(device_name: str, scales: dict[str, float]) -> None:
    """Every width of a family times its scale."""
    known: dict[str, Any] = json.loads((DATA / "calibrations" / f"{device_name}.json").read_text())["intervals"]
    kinds = {}
    for key, entry in known["kinds"].items():
        scale = scales.get(family_of(key.split("/")[0]).name, 1.0)
        kinds[key] = {**entry, **{name: round(entry[name] * scale, 4) for name in ("short", "long")}}
    families = {name: round(width * scales.get(name, 1.0), 4) for name, width in known["families"].items()}
    update_calibration(device_name, intervals={"kinds": kinds, "families": families})


if __name__ == "__main__":
    main()
