"""Builds candidates, and reuses what was compiled for earlier ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ridgeline.optimizer.search.candidate import Built, Candidate, Traces, build, capture_again
from ridgeline.optimizer.search.facts import (
    Proposal,
)
from ridgeline.optimizer.search.prices import CAPTURE_S
from ridgeline.optimizer.search.problem import why_failed
from ridgeline.optimizer.search.timing import held_bytes, reserved_bytes

if TYPE_CHECKING:
    from ridgeline.optimizer.search.search import Search


def family_of(candidate: Candidate) -> Candidate:
    """The part of a candidate that determines compilation: everything but its capture."""
    return replace(candidate, name="", graphed=False, tries_convolutions=False, grows=False, guesses=False)


def _kept(device: torch.device) -> tuple[int, int]:
    """Bytes in use and reserved, without cuBLAS workspaces, which the next GEMM allocates again.

    Eager's workspaces are part of the baseline: counted twice, their 67 MB kept torch.compile from a small model.
    """
    reserved = reserved_bytes(device)  # also frees the workspaces
    return held_bytes(device), reserved


class Builds:
    """Everything compiled and traced so far in one search."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.families: dict[Candidate, Built] = {}
        self.traces = Traces()

    def built(self, candidate: Candidate) -> Built:
        """Build a candidate, reusing the compiled code of its family if only the capture differs."""
        family = family_of(candidate)
        if candidate.compiles and family not in self.families:
            self.families[family] = self.made(replace(candidate, graphed=False, tries_convolutions=False), None)
            if not candidate.graphed and not candidate.tries_convolutions:
                return self.families[family]
        built = self.made(candidate, self.families.get(family))
        built.build_s += self.families[family].build_s if candidate.compiles else 0.0
        return built

    def made(self, candidate: Candidate, base: Built | None) -> Built:
        """Build a candidate and measure the device memory it keeps."""
        problem = self.search.problem
        before = _kept(problem.device)
        built = build(candidate, problem.model, problem.inputs, problem.mode, base=base, loss=problem.loss,
                      traces=self.traces)  # fmt: skip
        self.search.track.restore()
        after = _kept(problem.device)
        kept, grown = (end - start for start, end in zip(before, after, strict=True))
        if candidate.graphed:  # a graph's pool stays reserved, and its blocks count as free between replays
            kept, built.reserved_bytes = max(kept, grown), self.search.memory.base_reserved + grown
        built.kept_bytes = max(0, kept) + (base.kept_bytes if base else 0)
        return built

    def recapture_expandable(self, built: Built) -> Built:
        """Capture again into expandable segments, which leave no gaps between segments of other sizes."""
        first, base = built.reserved_bytes, self.families.get(family_of(built.candidate))
        built.release()
        try:
            again = self.made(replace(built.candidate, grows=True), base)
        except Exception as error:  # the allocator has no expandable segments: capture as before
            self.search.notes.append(f"{built.candidate.name}: no expandable segments: {why_failed(error)}")
            self.search.track.restore()
            again = self.made(built.candidate, base)
        else:
            told = f"{first / 1e9:.2f} GB, {again.reserved_bytes / 1e9:.2f} in expandable segments"
            self.search.notes.append(f"{built.candidate.name}: captured once more to save memory: {told}")
        again.build_s = built.build_s
        return again

    def capture_again(self, built: Built) -> None:
        problem = self.search.problem
        try:
            capture_again(built, problem.model, problem.inputs, problem.mode, problem.loss)
        except Exception as error:  # the candidate then fails its race, with this as the reason
            self.search.notes.append(f"{built.candidate.name} could not be captured again: {why_failed(error)}")
        finally:
            self.search.track.restore()

    def captures_compiled(self, proposal: Proposal) -> bool:
        """Whether a candidate only captures what was compiled before or the best so far, which takes about a second.

        Such candidates are built whatever time is left: SegFormer compiled took 13.8 ms for 5.8 ms of kernels and lost
        to a candidate of 9.3 ms because it was not captured (H200). In training a capture takes memory and steps, so
        only the best is captured.
        """
        candidate = proposal.candidate
        made = candidate.graphed and candidate.compiles and family_of(candidate) in self.families
        made = made and self.search.problem.mode == "infer" and proposal.cost_s <= CAPTURE_S
        return made or self.captures_best(candidate)

    def captures_best(self, candidate: Candidate) -> bool:
        """Whether a candidate is the best so far, captured."""
        bare = replace(family_of(candidate), name=self.search.best.candidate.name)
        return candidate.graphed and bare == replace(self.search.best.candidate, tries_convolutions=False)
