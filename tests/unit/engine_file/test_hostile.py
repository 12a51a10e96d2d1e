"""Engine files of somebody else's: whatever is in them, only our errors, and no memory beyond the limit."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from ridgeline.engine.file import container
from ridgeline.engine.file.container import Container, from_json, to_json
from ridgeline.engine.file.engine import Engine
from ridgeline.errors import EngineError, RidgelineError


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def resealed(path: Path, changed: dict[str, bytes]) -> Path:
    """The file with other members, and a manifest that agrees with them."""
    found = {**members(path), **changed}
    manifest = json.loads(found.pop("manifest.json"))
    manifest["members"] = {n: {"bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in found.items()}
    target = path.with_name("changed.ridge")
    container.write(target, {"manifest.json": to_json(manifest), **found})
    return target


def with_program(path: Path, change) -> Path:
    program = json.loads(members(path)["program.json"])
    change(program)
    return resealed(path, {"program.json": to_json(program)})


def test_a_file_with_a_flipped_bit_is_refused(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    start = Container.open(saved).places["weights.safetensors"][0]
    data[start + 2000] ^= 1
    saved.write_bytes(data)
    with pytest.raises(EngineError, match=r"weights\.safetensors is not what the manifest says"):
        Engine.load(saved)


def test_a_file_of_another_machine_is_not_trusted(saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Engine.load(saved).trusted
    monkeypatch.setenv("RIDGELINE_ENGINES", str(tmp_path / "other"))
    assert not Engine.load(saved).trusted
    assert Engine.load(saved, trust=True).trusted


@pytest.mark.parametrize(
    ("op", "said"),
    [
        ("aten::from_file.default", "not in op set"),
        ("aten::set_.source_Storage", "not in op set"),
        ("aten::add.out", "writes to its arguments"),
        ("os::system", "not in op set"),
        ("aten::linear.__class__", "has no aten::linear"),
        ("size::__import__", "size::__import__"),
        ("engine::exec", "no op engine::exec"),
        ("aten::linear.default\x1b[31m", "not in op set"),
    ],
)
def test_ops_outside_of_the_op_set_are_refused(saved: Path, op: str, said: str) -> None:
    def change(program) -> None:
        program["programs"][0]["steps"][0]["op"] = op

    with pytest.raises(EngineError, match=said) as caught:
        Engine.load(with_program(saved, change))(torch.randn(2, 16))
    assert "\x1b" not in str(caught.value)


def test_a_program_that_asks_for_terabytes_is_refused_before_it_runs(saved: Path) -> None:
    def change(program) -> None:
        steps = program["programs"][0]["steps"]
        steps.append({"op": "aten::full.default", "args": [[1 << 20, 1 << 20], 0.0], "out": [90]})
        program["programs"][0]["outputs"] = {"v": 90}

    with pytest.raises(EngineError, match="memory"):
        Engine.load(with_program(saved, change), memory_limit="1 GB")(torch.randn(2, 16))


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p["steps"][0]["args"].__setitem__(0, {"v": 77}),
        lambda p: p["steps"][0]["args"].__setitem__(1, {"w": "nobody"}),
        lambda p: p["steps"][0].__setitem__("out", [0]),
        lambda p: p["steps"][0].__setitem__("args", [1 << 70]),
        lambda p: p["steps"][0].__setitem__("args", [{"dtype": "object"}]),
        lambda p: p["steps"][0].__setitem__("kwargs", {"a=b": 1}),
        lambda p: p["steps"][0].__setitem__("kwargs", {"nobody": 1}),
        lambda p: p.__setitem__("outputs", {"v": 99}),
        lambda p: p.__setitem__("inputs", []),
        lambda p: p.__setitem__("dims", {"batch": [5, 1]}),
        lambda p: p["inputs"][0].__setitem__("shape", ["batch", -1]),
        lambda p: p["steps"][0].__setitem__("several", True),
        lambda p: p["steps"].clear(),
    ],
)
def test_programs_that_are_none_are_refused(saved: Path, change) -> None:
    with pytest.raises(EngineError):
        Engine.load(with_program(saved, lambda program: change(program["programs"][0])))(torch.randn(2, 16))


def zipped(path: Path, entries: list[tuple[zipfile.ZipInfo | str, bytes]], kind: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return path


def test_bombs_links_and_names_outside_of_the_folder_are_refused(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.ridge"
    with pytest.raises(EngineError, match="compressed"):
        Container.open(zipped(path, [("manifest.json", bytes(1 << 20))], zipfile.ZIP_DEFLATED))
    for name in ("../../etc/passwd", "/etc/passwd", "a/../b.json", "C:\\x.json", "a\nb.json"):
        with pytest.raises(EngineError, match="name"):
            Container.open(zipped(path, [(name, b"x")]))
    link = zipfile.ZipInfo("link.json")
    link.external_attr = 0o120777 << 16
    with pytest.raises(EngineError, match="link"):
        Container.open(zipped(path, [(link, b"/etc/passwd")]))
    with pytest.warns(UserWarning, match="Duplicate"), pytest.raises(EngineError, match=r"twice|aligned"):
        Container.open(zipped(path, [("a.json", b"x"), ("a.json", b"y")]))
    for data in (b"", b"PK", b"PK\x03\x04", b"\x80\x02pickle", saved.read_bytes()[:-30], saved.read_bytes()[:1000]):
        path.write_bytes(data)
        with pytest.raises(EngineError):
            Engine.load(path)
    with pytest.raises(EngineError, match="cannot read"):
        Engine.load(tmp_path / "nobody.ridge")


def test_members_that_overlap_are_refused(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    end = data.rfind(b"PK\x05\x06")
    count, _, start = struct.unpack("<HII", data[end + 10 : end + 20])
    offsets, at = [], start
    for _ in range(count):
        offsets.append(at)
        name, extra, comment = struct.unpack("<HHH", data[at + 28 : at + 34])
        at += 46 + name + extra + comment
    data[offsets[1] + 42 : offsets[1] + 46] = data[offsets[0] + 42 : offsets[0] + 46]
    saved.write_bytes(data)
    with pytest.raises(EngineError):
        Container.open(saved)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":1,"a":2}', b"NaN", b'{"a":', b"\xff\xfe", b'"' + b"\\" * 9])
def test_json_of_others_is_bounded(text: bytes) -> None:
    with pytest.raises(EngineError):
        from_json(text, "x")


def test_mutated_files_raise_only_our_errors(saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sample of ``lab/engine/mutate.py``, which does ten thousand."""
    from lab.engine.mutate import mutations, tried

    monkeypatch.setenv("RIDGELINE_ENGINES", str(tmp_path / "other"))
    rng = random.Random(0)
    outcomes = [tried(path) for path in mutations(saved, rng, 150, tmp_path / "mutated.ridge")]
    assert all(outcome in ("ran", "refused") for outcome in outcomes)
    assert outcomes.count("refused") > 50


def test_errors_of_engines_are_of_the_error_tree() -> None:
    assert issubclass(EngineError, RidgelineError)
