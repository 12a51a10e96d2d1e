"""Where sequences come from: every token once, any position found again, documents kept apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ridgeline.errors import InputError
from ridgeline.llm.data.batch import micro_batch
from ridgeline.llm.data.loader import TextLoader, TokenLoader
from ridgeline.llm.data.permutation import Permutation
from ridgeline.llm.data.tokens import TokenFile, write_token_file
from ridgeline.llm.model.loss import IGNORED
from ridgeline.llm.model.tensor_file import TensorFile, write_tensors


@pytest.mark.parametrize("num", [1, 2, 7, 64, 1000])
def test_a_permutation_has_every_index_once_and_is_decided_by_its_seed(num: int) -> None:
    found = [Permutation(num, "a")[i] for i in range(num)]
    assert sorted(found) == list(range(num))
    if num > 8:
        assert found != list(range(num))
        assert found != [Permutation(num, "b")[i] for i in range(num)]


def test_an_epoch_reads_every_window_of_a_token_file_once(tmp_path: Path) -> None:
    write_token_file(tmp_path / "a.bin", [list(range(1, 400))], vocab_size=512, eos=0)
    loader = TokenLoader(TokenFile(tmp_path / "a.bin"), length=13, global_batch=5, seed=3)
    first = [row[0] for step in range(6) for row in loader.rows(step, range(5))]
    assert sorted(first) == [1 + 13 * i for i in range(30)]
    assert (loader.rows(4, [2])[0] == loader.rows(4, range(5))[2]).all()  # whoever asks, in whatever order


def _shards(folder: Path) -> list[str]:
    texts = [f"{shard}{line:02d}" * (3 + line % 7) for shard in "ab" for line in range(40)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[:40]))
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table({"text": texts[40:]}), folder / "b.parquet", row_group_size=9)
    return texts


def _loader(folder: Path, length: int = 16) -> TextLoader:
    patterns = [str(folder / "*.jsonl"), str(folder / "*.parquet")]
    return TextLoader(patterns, lambda text: [ord(c) for c in text], 0, length, global_batch=4, seed=1, unit_bytes=300)


def test_streamed_text_goes_on_from_any_position_with_any_share_of_its_lanes(tmp_path: Path) -> None:
    _shards(tmp_path)
    whole = _loader(tmp_path)
    rows = [whole.rows(step, range(4)) for step in range(20)]
    for start in (0, 1, 7, 13):
        before, again = _loader(tmp_path), _loader(tmp_path)
        for step in range(start):
            before.rows(step, range(4))
        again.restore(json.loads(json.dumps(before.state())) if start else {"lanes": {}})
        for step in range(start, 20):  # two ranks, each with lanes of its own
            assert (np.concatenate((again.rows(step, [0, 1]), again.rows(step, [2, 3]))) == rows[step]).all()


def test_every_document_of_the_shards_is_read_in_an_epoch(tmp_path: Path) -> None:
    texts = _shards(tmp_path)
    loader = _loader(tmp_path, length=8)
    tokens: list[list[int]] = [[] for _ in range(4)]
    for step in range(80):
        for lane, row in enumerate(loader.rows(step, range(4))):
            tokens[lane] += row[:-1].tolist()
    seen = {text for lane in tokens for text in "".join(map(chr, lane)).split("\0")}
    assert set(texts) <= seen


def test_a_lane_streams_for_as_many_steps_as_there_are(tmp_path: Path) -> None:
    _shards(tmp_path)
    loader = _loader(tmp_path, length=4)
    for step in range(1500):
        loader.rows(step, [0])
    epoch, *_ = loader.state()["lanes"]["0"]
    assert epoch > 1


def test_text_without_enough_pieces_or_without_the_column_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(InputError, match=r"set data\.unit_bytes"):
        TextLoader([str(tmp_path / "*.jsonl")], list, 0, 8, global_batch=4, seed=0)  # type: ignore[arg-type]
    loader = TextLoader([str(tmp_path / "*.jsonl")], list, 0, 8, global_batch=1, seed=0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no JSON object with 'text'"):
        loader.rows(0, [0])


def test_documents_restart_positions_and_their_ends_have_no_target() -> None:
    rows = np.array([[5, 6, 0, 7, 8, 9, 1, 2, 3]])
    found = micro_batch(rows, 0)
    assert found.arrays["positions"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert found.arrays["starts"].tolist() == [0, 3, 8]
    assert found.arrays["targets"].tolist() == [6, 0, IGNORED, 8, 9, 1, 2, 3]
    assert found.num_targets == 7
    whole = micro_batch(rows, 0, document_mask=False)
    assert whole.arrays["starts"].tolist() == [0, 8]
    assert whole.num_targets == 8


def test_context_ranks_see_exactly_the_keys_of_their_documents() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 4, size=(3, 33))
    alone = micro_batch(rows, 0)
    ranks = [micro_batch(rows, 0, context_rank=r, context_size=2) for r in range(2)]
    gathered = np.concatenate([rank.arrays["x"] for rank in ranks])
    assert sum(rank.num_targets for rank in ranks) == alone.num_targets
    for rank in ranks:
        arrays = rank.arrays
        starts, keys = arrays["starts"], arrays["key_starts"]
        for a, b, c, d in zip(starts, starts[1:], keys, keys[1:], strict=False):
            seen = gathered[arrays["key_index"][c:d]]
            assert d - c == arrays["positions"][b - 1] + 1  # from the document's first token to the piece's last
            assert (seen[len(seen) - (b - a) :] == arrays["x"][a:b]).all()
            assert not (seen[:-1] == 0).any()


def test_tensor_files_are_those_of_safetensors(tmp_path: Path) -> None:
    library: Any = pytest.importorskip("safetensors.torch")
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(4), "c": torch.randn(2).bfloat16(), "empty": torch.empty(0, 2)}
    write_tensors(tmp_path / "ours.safetensors", tensors, {"format": "pt"})
    library.save_file(tensors, tmp_path / "theirs.safetensors")
    theirs, ours = library.load_file(tmp_path / "ours.safetensors"), TensorFile(tmp_path / "theirs.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(theirs[name], tensor)
        assert torch.equal(ours[name], tensor)
    for damage in (b"", b"{}", (tmp_path / "ours.safetensors").read_bytes()[:-3], b"\xff" * 40):
        (tmp_path / "bad.safetensors").write_bytes(damage)
        with pytest.raises(InputError, match="no whole safetensors file"):
            TensorFile(tmp_path / "bad.safetensors")
