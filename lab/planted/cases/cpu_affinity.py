"""Cause: cpu affinity."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import random
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lab.planted.networks import ResidualLayer, Tokens
from lab.planted.programs import LOADED, ONE, end_workers, photos
from lab.planted.registry import Program, Setting, case


@case("cpu affinity", "let the process use every core", suite="planted", rounds=1, warmup=14, steps=18)
def affinity_one_core(s: Setting, fixed: bool) -> Program:
    return photos(s, 6, one_core=not fixed)


@contextmanager
def _cores(num: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(before)[:num]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


COMPLEMENT = {"A": "T", "C": "G", "G": "C", "T": "A"}


class Genomes(Dataset[tuple[Tensor, int]]):
    """Stretches of a genome with a few letters misread, both strands, as words of six letters."""

    def __init__(self, words: int, length: int = 1_000_000) -> None:
        letters = np.random.default_rng(3).integers(0, 4, 65_536)
        self.text = "".join("ACGT"[i] for i in letters)
        self.known = {"".join(word): i for i, word in enumerate(itertools.product("ACGT", repeat=6))}
        self.words, self.length = words, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        start, draw = index * 977 % (len(self.text) - self.words - 6), random.Random(index)
        piece = self.text[start : start + self.words + 5]
        piece = "".join(letter if draw.random() > 0.02 else draw.choice("ACGT") for letter in piece)
        other = "".join(COMPLEMENT[letter] for letter in reversed(piece))
        ids = [[self.known[strand[i : i + 6]] for i in range(self.words)] for strand in (piece, other)]
        return torch.tensor(ids), index % 12


@contextlib.contextmanager
def bound_to_share(rank: int, ranks: int) -> Iterator[None]:
    """This rank gets its share of the host's cores, as a launcher for nodes with many ranks does it."""
    allowed = sorted(os.sched_getaffinity(0))
    each = max(1, len(allowed) // ranks)
    os.sched_setaffinity(0, allowed[rank * each : (rank + 1) * each])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@case("cpu affinity", "one rank on this host: let it use every core", suite="twenty-fifth", **LOADED)
def genomes_on_a_share_of_the_cores(s: Setting, fixed: bool) -> Program:
    """Stretches of genomes; the launcher believes that sixteen ranks share the host, and gives this one its share."""
    words, dim = s.pick(1024, 8), s.pick(768, 16)
    scope = functools.partial(bound_to_share, 0, 1 if fixed else 16)
    with scope():
        loader = DataLoader(
            Genomes(words), s.pick(32, 2), num_workers=s.pick(8, 1), pin_memory=s.cuda, persistent_workers=True
        )
        stream: Any = iter(loader)
    embed = s.place(lambda: nn.Embedding(4096, dim // 8))
    model = s.place(lambda: Tokens(dim, dim, s.pick(12, 2), s.pick(8, 1), 12))
    optimizer = torch.optim.AdamW([*embed.parameters(), *model.parameters()], lr=1e-4, fused=True)

    def train_batch() -> None:
        reads, species = (part.to(s.device, non_blocking=True) for part in next(stream))
        pieces = embed(reads).unflatten(2, (-1, 8)).flatten(3).flatten(1, 2)
        F.cross_entropy(model(pieces), species).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(train_batch, scope, close=lambda: end_workers(stream))


def telephone_calls(num: int, samples: int) -> list[bytes]:
    rng = np.random.default_rng(11)
    return [zlib.compress(rng.integers(96, 160, samples).astype(np.uint8).tobytes(), 6) for _ in range(num)]


MU_LAW = (np.sign(np.arange(256) - 127.5) * (256 ** (np.abs(np.arange(256) - 127.5) / 127.5) - 1) / 255 * 32767).astype(
    np.int16
)


TAPS = np.hanning(65).astype(np.float32) / 32


def unpack_calls(blobs: Sequence[bytes]) -> np.ndarray:
    """What a worker process does with the calls it is given: unpack, expand, smooth."""
    waves = []
    for blob in blobs:
        wave = MU_LAW[np.frombuffer(zlib.decompress(blob), np.uint8)].astype(np.float32)
        waves.append(np.convolve(wave, TAPS, mode="same").astype(np.int16))
    return np.stack(waves)


class CallNet(nn.Module):
    """What a call is about, out of frames of samples."""

    def __init__(self, frame: int, d: int, h: int, depth: int, kinds: int) -> None:
        super().__init__()
        self.frame, self.embed = frame, nn.Linear(frame, d)
        self.layers = nn.ModuleList(ResidualLayer(d, h) for _ in range(depth))
        self.head = nn.Linear(d, kinds)

    def forward(self, wave: Tensor) -> Tensor:
        x = self.embed(wave.unflatten(1, (-1, self.frame)))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


@case(
    "cpu affinity", "let the process use every core", suite="twenty-fourth", **ONE | {"warmup": 6, "planted_steps": 6}
)
def calls_unpacked_on_one_core(s: Setting, fixed: bool) -> Program:
    """Telephone calls sorted; eight processes unpack those of the next batch, in a service that was given one core."""
    each, samples, processes = s.pick(4, 1), s.pick(64_000, 640), s.pick(8, 2)
    scope = nullcontext if fixed else functools.partial(_cores, 1)
    blobs = telephone_calls(each * processes, samples)
    shares = [blobs[i::processes] for i in range(processes)]
    with scope():
        pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork"))
        asked: list[Future[np.ndarray]] = [pool.submit(unpack_calls, share) for share in shares]
        for one in asked:
            one.result()
    frame = s.pick(160, 16)
    model = s.place(lambda: CallNet(frame, s.pick(1024, 16), s.pick(16, 2), s.pick(16, 1), 24)).eval()

    def serve() -> Tensor:
        waves = s.pinned(torch.from_numpy(np.concatenate([one.result() for one in asked])))
        asked[:] = [pool.submit(unpack_calls, share) for share in shares]
        return model(waves.to(s.device, non_blocking=True).to(torch.bfloat16) / 32768)

    close = lambda: pool.shutdown(cancel_futures=True)
    return Program(torch.inference_mode()(serve), scope, close=close)
