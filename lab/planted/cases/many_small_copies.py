"""Cause: many small copies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.planted.networks import Trunk
from lab.planted.programs import TRIED, bf16, fused_adamw, tower
from lab.planted.registry import Program, Setting, case


@case("many small copies", "pack the features into one pinned tensor and copy it once", suite="planted")
def small_copies(s: Setting, fixed: bool) -> Program:
    model, optimizer, _ = tower(s, 4096, 4096, 10)
    features, rows, width = s.pick(256, 4), s.pick(4096, 8), s.pick(4096, 32)
    columns = [torch.randn(rows, width // features) for _ in range(features)]
    packed = s.pinned(torch.stack(columns))
    y = torch.randn(rows, 8, dtype=torch.bfloat16, device=s.device)

    def step() -> None:
        if fixed:
            parts = list(packed.to(s.device, non_blocking=True).unbind(0))
        else:
            parts = [column.to(s.device) for column in columns]
        model(torch.cat(parts, dim=1), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


def cameras(num: int) -> list[dict[str, Tensor]]:
    """What is known of each view of a scene, as a reader of scenes gives it."""
    draw = torch.Generator().manual_seed(0)
    return [
        {
            "pose": torch.randn(3, 4, generator=draw),
            "intrinsics": torch.rand(3, 3, generator=draw) + torch.eye(3),
            "range": torch.rand(2, generator=draw) + 1.0,
        }
        for _ in range(num)
    ]


class ViewsToScene(nn.Module):
    """A scene out of views: every patch is told along which ray it was seen."""

    def __init__(self, piece: int, dim: int, heads: int, depth: int, answers: int) -> None:
        super().__init__()
        self.enter, self.camera = nn.Linear(piece, dim), nn.Linear(23, dim)
        self.trunk, self.answer = Trunk(dim, heads, depth), nn.Linear(dim, answers)

    def forward(self, pieces: Tensor, pose: Tensor, intrinsics: Tensor, near_far: Tensor) -> Tensor:
        known = torch.cat([pose.flatten(1), intrinsics.flatten(1), near_far], dim=1).to(pieces.dtype)
        x = self.enter(pieces) + self.camera(known)[:, None]
        return self.answer(self.trunk(x))


@case(
    "many small copies",
    "stack what is known of the cameras, and copy it in three pinned tensors",
    suite="twenty-fifth",
    **TRIED,
)
def cameras_moved_one_by_one(s: Setting, fixed: bool) -> Program:
    """A scene out of many views; what is known of each camera goes to the device field by field."""
    views, places, piece = s.pick(192, 3), s.pick(64, 4), s.pick(768, 12)
    known = cameras(views)
    model = s.place(lambda: ViewsToScene(piece, s.pick(768, 16), s.pick(12, 2), s.pick(8, 1), 32))
    pictures, wanted, optimizer = bf16(s, views, places, piece), bf16(s, views, places, 32), fused_adamw(model)

    def moved(name: str) -> Tensor:
        if fixed:
            return s.pinned(torch.stack([view[name] for view in known])).to(s.device, non_blocking=True)
        return torch.stack([view[name].to(s.device) for view in known])

    def step() -> None:
        scene = model(pictures, moved("pose"), moved("intrinsics"), moved("range"))
        F.l1_loss(scene, wanted).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)
