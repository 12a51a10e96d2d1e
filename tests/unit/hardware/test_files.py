"""A device file with a mistake in it is refused with the file, the field and the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.errors import HardwareError
from ridgeline.hardware.files import load_device
from ridgeline.resources import data_dir

GOOD = (data_dir() / "devices" / "h200.toml").read_text(encoding="utf-8")


def broken(tmp_path: Path, old: str, new: str) -> Path:
    assert old in GOOD
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(old, new, 1), encoding="utf-8")
    return path


def test_a_good_file_is_named_by_its_stem(tmp_path: Path) -> None:
    assert load_device(broken(tmp_path, 'kind = "gpu"', 'kind = "gpu"')).name == "mine"


@pytest.mark.parametrize(("old", "new", "complaint"), [
    ('tdp = ["700W", "ml"]', 'tdp = "700W"', r"mine.toml: chip.tdp: a number needs its source"),
    ('tdp = ["700W", "ml"]', 'tdp = ["700W", "mi"]', r"chip.tdp: source 'mi' is not in \[sources\]"),
    ('tdp = ["700W", "ml"]', 'tdp = [700, "ml"]', r"chip.tdp: 700 has no unit; .*'700W'"),
    ('tdp = ["700W", "ml"]', 'tdp = ["700GB", "ml"]', r"chip.tdp: cannot read '700GB' as a power"),
    ('tdp = ["700W", "ml"]', 'tdp = ["-700W", "ml"]', r"chip.tdp: '-700W' cannot be a power"),
    ('tdp = ["700W", "ml"]', 'tpd = ["700W", "ml"]', r"chip.tpd: is not a field of a device file; did you mean 'tdp'"),
    ('tdp = ["700W", "ml"]\n', "", r"chip.tdp: is missing; add tdp = "),
    ('vendor = "NVIDIA"', "vendor = 3", r"vendor: must be text"),
    ('vendor = "NVIDIA"', 'vendor = "NVIDIA"\ncolor = "green"', r"color: is not a field"),
    ('kind = "gpu"', 'kind = "toaster"', r"kind: 'toaster' is not one of gpu, cpu"),
    ("release_year = 2024", 'release_year = "2024"', r"release_year: must be a year"),
    ('ml = ["datasheet"', 'ml = ["hearsay"', r"sources.ml: must be a pair .*measured\|fitted\|datasheet\|assumed"),
    ("[tensor]\n", '[tensor]\nfp12 = ["1TFLOP/s", "ml"]\n', r"tensor.fp12: unknown dtype"),
    ("[tensor]\n", '[tensor]\nhalf = ["1TFLOP/s", "ml"]\n', r"tensor.half: write the dtype as 'fp16'"),
    ('fp32 = ["66.9TFLOP/s", "klockwood"]\n', "", r"vector.fp32: is missing"),
    ("[memory.l2]", "[memory.l3]", r"memory.l3: is not a field"),
    ("[links.pcie]", "[links.usb]", r"links.usb: is not a field"),
    ('kind = "NVLink 4"\n', "", r"links.scale_up.kind: must be text"),
    ("[chip]", "[chip", r"mine.toml: not valid TOML"),
])  # fmt: skip
def test_a_mistake_is_named_with_its_cure(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    with pytest.raises(HardwareError, match=complaint):
        load_device(broken(tmp_path, old, new))


def test_a_whole_missing_table_is_named(tmp_path: Path) -> None:
    start, end = GOOD.index("[memory.shared]"), GOOD.index("[links.scale_up]")
    with pytest.raises(HardwareError, match=r"memory.shared: is missing; add a table \[memory.shared\]"):
        load_device(broken(tmp_path, GOOD[start:end], ""))
