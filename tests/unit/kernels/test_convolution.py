"""Convolutions without a GPU: what is refused, what the compiler makes of them, how factors are rounded."""

from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.kernels import convolution, launcher, long_norm, matmul, scan, supports
from ridgeline.kernels.compiler import facts_of
from ridgeline.kernels.convolution.config import tiles, turned
from ridgeline.kernels.convolution.links import coded, followed, links_of
from ridgeline.kernels.convolution.op import planned, turn
from ridgeline.kernels.long_norm.op import in_registers


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def made(call, *args, **given):
    """What the compiler makes of every kernel of a call, by name."""
    with launcher.collecting() as found:
        call(*args, **given)
    return {v.kernel: facts_of(launcher.kernel(v.kernel).function, v) for v in found}


def meta(*shape):
    return torch.empty(*shape, device="meta")


def test_it_is_a_convolution_and_what_follows():
    x, w, b, v = drawn(2, 3, 9, 8), drawn(5, 3, 3, 3), drawn(5), drawn(1, 5)
    found = convolution(x, w, b, v, padding=[1], chain="relu shifts@0")
    meant = torch.relu(torch.nn.functional.conv2d(x, w, b, padding=1)) + v.view(1, 5, 1, 1)
    torch.testing.assert_close(found, meant)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((drawn(1, 3, 8).half(), drawn(4, 3, 3).half(), None, None, [1], [0], [1], [0], 1, False, ""), "float32"),
        ((drawn(1, 3, 8), drawn(4, 3, 3), None, None, [1], [0], [1], [0], 1, False, "cosine"), "no link 'cosine'"),
        ((drawn(1, 3, 8), drawn(4, 3, 3), None, None, [1], [0], [1], [0], 1, False, "scales@0"), "reads vectors"),
        ((drawn(1, 3, 2), drawn(4, 3, 3), None, None, [1], [0], [1], [0], 1, False, ""), "no pixels"),
    ],
)
def test_what_no_kernel_takes_is_said(args, words):
    assert words in supports("convolution", *args).reason


def test_images_come_by_asynchronous_copies_and_meet_the_weights_in_registers():
    found = made(convolution, meta(4, 64, 128, 128), meta(128, 64, 3, 3), meta(128), chain="mish")["convolution_tile"]
    assert found.num_spills == 0 and found.num("HGMMA") > 0 and found.num("LDGSTS") > 0 and found.num("HMMA") == 0


def test_few_rows_meet_a_weight_that_is_read_once():
    found = made(matmul, meta(128, 16384), meta(16384, 16384).t())["matmul_thin"]
    assert found.num_spills < 16 and found.num("HGMMA") % 3 == 0 and found.num("HGMMA") > 0  # sums are carried twice
    assert found.num("LDGSTS.E.BYPASS.128") == found.num("LDGSTS") > 0


def test_scans_read_and_write_sixteen_bytes_at_a_time():
    found = made(scan, meta(1024, 32768))["scan_rows"]
    assert found.num_spills == 0 and found.num("STG.E.128") == found.num("STG") > 0


def test_four_programs_that_share_long_rows_fit_on_a_processor():
    for cols, name, stores in ((262144, "long_norm_held", "STG.E.EF.128"), (4194304, "long_norm_rows", "STG.E.128")):
        found = made(in_registers, meta(16, cols), "norm", cols, None, None, 0, 1e-5)[name]
        assert found.num_registers <= 64 and found.num_spills < 16 and found.num(stores) == found.num("STG") > 0


@pytest.mark.parametrize(("kind", "cols"), [("softmax", 393216), ("norm", 262144), ("l2", 65536), ("norm", 2097152)])
def test_long_rows_come_to_shared_memory_in_whole_accesses_and_two_programs_fit_on_a_processor(kind, cols):
    found = made(long_norm, meta(600, cols), kind, cols)["long_norm_streamed"]
    assert found.num_spills == 0 and found.num_registers <= 255 and 2 * found.shared_bytes <= 227 << 10
    assert found.num("LDGSTS.E.BYPASS.128") == found.num("LDGSTS") > 0
    assert found.num("STG.E.128") == found.num("STG") > 0


def test_long_rows_that_cannot_be_copied_in_whole_accesses_are_held_in_registers():
    assert "long_norm_held" in made(long_norm, meta(600, 65535), "l2", 65535)
    channels = made(long_norm, meta(64, 65536), "norm", 65536, meta(1024), None, 1024)  # 64 pixels of each
    assert "long_norm_streamed" not in channels


def test_a_chain_is_links_with_numbers_or_places():
    assert links_of("relu scale=2.0 shifts@1") == (("relu", None), ("scale", 2.0), ("shifts", 1))
    assert len(coded("relu scale=2.0")) == 4
    x = drawn(2, 3, 4)
    torch.testing.assert_close(followed(x, "least=-1.0 most=1.0", ()), x.clamp(-1, 1))
    for wrong in ("relu=1", "scale", "scales", "shift@1"):
        with pytest.raises(ValueError, match="no link"):
            links_of(wrong)


@pytest.mark.parametrize("back", [False, True])
def test_images_are_turned_with_dense_memory_on_both_sides(back):
    x = meta(2, 128, 126, 126)
    found = made(turn, x, x, None, "mish" if back else "", back=back)["convolution_turn"]
    assert found.num("LDG.E.128") == found.num("LDG") > 0 and found.num("STG.E.128") == found.num("STG") > 0


def test_three_products_make_a_convolution_as_accurate_as_float32():
    tile = replace(tiles(128, 1 << 14)[0], rounding="exact")
    args = (meta(4, 64, 128, 128), meta(128, 64, 3, 3), None, None, [1, 1], [0, 0], [1, 1], [0, 0], 1, False, "")
    with launcher.collecting() as found:
        planned(*args, tile=tile)(*args[:4])
    facts = facts_of(launcher.kernel("convolution_tile").function, found[-1])
    assert facts.num_spills == 0 and facts.num("HGMMA") % 3 == 0 and facts.num("HGMMA") > 0


def test_short_sums_are_tried_with_several_tiles_on_a_processor():
    args = (meta(4, 8, 256, 256), meta(64, 8, 3, 3), None, None, [1, 1], [0, 0], [1, 1], [0, 0], 1, False, "gelu")
    for tile in tiles(64, 1 << 16, terms=72)[:-1]:
        with launcher.collecting() as found:
            planned(*args, tile=replace(tile, rounding="exact"))(*args[:4])
        facts = facts_of(launcher.kernel("convolution_tile").function, found[-1])
        assert facts.num_spills == 0
        assert facts.num_registers * tile.num_warps * 32 <= 65536 // 2 and facts.shared_bytes <= 227 * 1024 // 2
    assert all(tile.channels >= 100 for tile in tiles(100, 1 << 16, pooled=True, terms=72))
    assert tiles(64, 1 << 16) == tiles(64, 1 << 16, terms=1000) != tiles(64, 1 << 16, terms=72)


def test_windows_that_go_on_by_one_are_read_together():
    from ridgeline.kernels.pooling.op import pool

    facts = made(pool, meta(64, 128, 65536), (8,), (1,), (4,), mean=True)["pool_lines"]
    assert facts.num_spills == 0 and facts.num("LDG.E.128") == facts.num("LDG") == 6, "three for four results"
    facts = made(pool, meta(64, 128, 65536).half(), (8,), (1,), (4,), mean=True)["pool_lines"]
    assert facts.num_spills == 0 and facts.num("LDG.E.64") == facts.num("LDG") == 6, "half as wide"
    for shape, window, stride, padding in (
        ((2, 3, 72), (8,), (2,), (4,)), ((2, 3, 72), (8,), (1,), (3,)), ((2, 3, 70), (8,), (1,), (4,)),
        ((2, 3, 9, 72), (3, 8), (1, 1), (0, 4)),
    ):  # fmt: skip
        assert list(made(pool, meta(*shape), window, stride, padding)) == ["pool_windows"]


def test_turned_images_go_from_shared_memory_to_the_tensor_cores_in_whole_accesses():
    (tile, *_) = turned(tiles(128, 126 * 126, False, 576), 64, 1, 576, 3e11)
    assert tile.last
    given = meta(4, 64, 128, 128), meta(128, 64, 3, 3), None, None
    run = partial(planned, *given, (1, 1), (0, 0), (1, 1), (0, 0), 1, False, "relu", tile=tile)
    found = made(lambda: run()(*given))
    facts = found["convolution_tile"]
    assert facts.num_spills == 0 and facts.num("HGMMA") > 0
    assert facts.num("LDGSTS.E.BYPASS.128") == facts.num("LDGSTS") > 0, "whole accesses alone"
    assert "convolution_turn" in found


def test_images_are_turned_only_where_blocks_of_terms_are_of_one_tap():
    plain = tiles(64, 1000, False, 576)
    (tile,) = turned(plain, 64, 1, 576, 3e11)
    assert tile.last and tile.depth == 32
    assert not turned(plain, 48, 1, 576, 3e11) and not turned(plain, 64, 2, 576, 3e11)
    assert not turned(plain, 32, 1, 32, 3e11) and not turned(plain, 64, 1, 576, 1e10)
    x, w = meta(1, 48, 9, 9), meta(16, 48, 3, 3)
    settings = (1, 1), (0, 0), (1, 1), (0, 0), 1, False, ""
    with launcher.collecting():
        assert not planned(x, w, None, None, *settings, tile=replace(plain[0], last=True)).last
        assert planned(x, w, None, None, *settings, tile=replace(plain[0], last=True, depth=16)).last
