"""Packs: written without a GPU, found again by exactly what was packed, and never trusted when stale."""

import json

import pytest
import torch

from ridgeline import kernels
from ridgeline.errors import KernelError
from ridgeline.kernels import compiler, launcher, pack, tuning
from ridgeline.kernels.contract import case
from ridgeline.kernels.rms_norm.config import Forward
from ridgeline.kernels.variants import variants_of


@pytest.fixture
def packed(tmp_path):
    found = variants_of("relu2", [case("bfloat16", rows=4, cols=1024)])
    return tmp_path, found, pack.write(tmp_path, found[:1])


def test_a_packed_variant_is_found_and_another_is_not(packed, monkeypatch):
    folder, variants, _ = packed
    monkeypatch.setenv("RIDGELINE_KERNEL_PACK", str(folder))
    found = pack.find(variants[0])
    assert found == compiler.compile_variant(launcher.kernel(variants[0].kernel).function, variants[0])
    assert found.cubin[:4] == b"\x7fELF"
    assert pack.find(variants[1]) is None
    assert pack.launcher_path().exists()


@pytest.mark.parametrize("what", ["source", "toolchain", "format"])
def test_a_stale_pack_is_ignored(packed, what):
    folder, _, _ = packed
    index = json.loads((folder / pack.INDEX).read_text())
    index[what] = 0
    (folder / pack.INDEX).write_text(json.dumps(index))
    pack.opened.cache_clear()
    assert pack.opened(folder) is None


def test_a_broken_pack_says_how_to_make_another(packed):
    folder, _, _ = packed
    (folder / pack.INDEX).write_text("{]")
    pack.opened.cache_clear()
    with pytest.raises(KernelError, match="ridgeline kernels pack"):
        pack.opened(folder)


def test_the_key_holds_everything_that_changes_the_code():
    base = variants_of("relu2", [case("bfloat16", rows=4, cols=1024)])[0]
    from dataclasses import replace

    others = [
        replace(base, num_warps=8),
        replace(base, arch=80),
        replace(base, divisible=()),
        replace(base, constants=(("BLOCK", 64),)),
    ]
    assert len({base.key(), *(other.key() for other in others)}) == 5


def test_a_tuned_configuration_is_kept_and_used(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_KERNEL_TUNING", str(tmp_path / "tuning.json"))
    x = torch.empty(64, 4096, device="meta", dtype=torch.bfloat16)
    sizes = {"rows": 64, "cols": 4096, "dtype": x.dtype}
    tuning.record("rms_norm.forward", sizes, Forward(1, 4, 1024, 4))
    with launcher.collecting() as found:
        kernels.rms_norm(x, None, 1e-6)
        kernels.rms_norm(x[:32], None, 1e-6)
    assert [variant.num_warps for variant in found] == [4, 8]
    (tmp_path / "tuning.json").write_text(
        json.dumps({"rms_norm.forward rows=64 cols=4096 dtype=torch.bfloat16": {"x": 1}})
    )
    tuning._tuned.cache_clear()
    with pytest.raises(KernelError, match="tune again"), launcher.collecting():
        kernels.rms_norm(x, None, 1e-6)
    tuning._tuned.cache_clear()
