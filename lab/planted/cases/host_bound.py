"""Cause: host-bound."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.planted.networks import Generator, NextWord
from lab.planted.programs import SHORT, TRIED, adamw, fused_adamw, graphed, ints, language, precision, training
from lab.planted.registry import Program, Setting, case


@case("host-bound", "capture the step in a CUDA graph", suite="planted")
def tiny_kernels_train(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=256, layers=12, heads=4, vocab=4096)
    model, batches = language(s, shape, 4, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=s.cuda)
    x, y = (t.clone() for t in next(batches))

    def run() -> None:
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    again = graphed(run) if fixed and s.cuda else run

    def step() -> None:
        for into, new in zip((x, y), next(batches), strict=True):
            into.copy_(new)
        again()

    return Program(step)


@case("host-bound", "replay the decode step from a CUDA graph", suite="planted")
def tiny_kernels_decode(s: Setting, fixed: bool) -> Program:
    batch, room = s.pick(8, 2), s.pick(512, 8)
    model = s.place(lambda: Generator(s.shape(width=1024, layers=24, heads=16, vocab=32000), batch, room)).eval()
    ids = torch.zeros(batch, 1, dtype=torch.long, device=s.device)
    place = torch.zeros(1, dtype=torch.long, device=s.device)

    @torch.no_grad()
    def token() -> None:
        ids.copy_(model(ids, place).argmax(-1, keepdim=True))

    again = graphed(token) if fixed and s.cuda else token

    def step() -> None:
        for _ in range(4):
            again()

    return Program(step)


@case("host-bound", "torch._foreach_lerp_ over all weights", suite="planted")
def ema_loop(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=12, heads=16, vocab=16384)
    model, batches = language(s, shape, 8, 1024)
    train, params = training(model, adamw(s, model), batches), list(model.parameters())
    averages = [[p.detach().clone() for p in params] for _ in range(3)]

    @torch.no_grad()
    def step() -> None:
        with torch.enable_grad():
            train()
        for average, decay in zip(averages, (0.9, 0.99, 0.999), strict=True):
            if fixed:
                torch._foreach_lerp_(average, params, 1.0 - decay)
                continue
            for kept, p in zip(average, params, strict=True):
                kept.mul_(decay).add_(p * (1.0 - decay))

    return Program(step)


def negative_log_likelihood(first: Tensor, second: Tensor, x: Tensor, minus_y: Tensor) -> Tensor:
    """For each chain: how unlikely what was seen is, given its small network."""
    found = torch.matmul(torch.tanh(torch.matmul(x, first)), second)
    return F.softplus(minus_y * found).sum((1, 2))


def hamiltonian_step(weights: tuple[Tensor, ...], x: Tensor, minus_y: Tensor, rounds: int, far: float) -> None:
    """New weights for all chains, some way along where they are drawn to; each chain moves or stays."""

    def kicked(share: float) -> Tensor:
        """Momentum after a pull of the data and of a normal prior."""
        with torch.enable_grad():
            here = [w.detach().requires_grad_() for w in at]
            unlikely = negative_log_likelihood(*here, x, minus_y)
            grads = torch.autograd.grad(unlikely.sum(), here)
        torch._foreach_add_(momentum, grads, alpha=-far * share)
        torch._foreach_add_(momentum, at, alpha=-far * share)
        return unlikely.detach()

    halves = lambda parts: sum(0.5 * part.square().sum((1, 2)) for part in parts)
    at, momentum = [w.clone() for w in weights], [torch.randn_like(w) for w in weights]
    before = halves(momentum) + halves(at)
    before = before + kicked(0.5)
    for i in range(rounds):
        torch._foreach_add_(at, momentum, alpha=far)
        unlikely = kicked(1.0 if i < rounds - 1 else 0.5)
    moves = torch.rand_like(before).log() < before - unlikely - halves(momentum) - halves(at)
    for w, new in zip(weights, at):
        w.copy_(torch.where(moves[:, None, None], new, w))


@case("host-bound", "the whole move out of a CUDA graph", suite="twenty-fifth", **SHORT)
def chains_moved_eagerly(s: Setting, fixed: bool) -> Program:
    """Weights of small networks drawn by Hamiltonian Monte Carlo, many chains at once, an op at a time."""
    chains, rows, seen, hidden, rounds = s.pick((64, 512, 64, 32, 80), (2, 8, 4, 3, 3))
    draw = functools.partial(torch.randn, device=s.device)
    weights = (draw(chains, seen, hidden) * 0.1, draw(chains, hidden, 1) * 0.1)
    x, minus_y = draw(rows, seen), -draw(rows, 1).sign()
    move = torch.no_grad()(lambda: hamiltonian_step(weights, x, minus_y, rounds, 0.01))
    with precision("high"):
        run = graphed(move) if fixed and s.cuda else move
    return Program(run, functools.partial(precision, "high"))


class SlowGradients:
    """Adds to each slope what it was like for long, so that a network generalizes earlier."""

    def __init__(self, model: nn.Module, alpha: float = 0.98, weight: float = 2.0) -> None:
        self.params = dict(model.named_parameters())
        self.alpha, self.weight = alpha, weight
        self.slow = {name: torch.zeros_like(p) for name, p in self.params.items()}

    @torch.no_grad()
    def one_by_one(self) -> None:
        for name, p in self.params.items():
            self.slow[name] = self.slow[name] * self.alpha + p.grad * (1 - self.alpha)
            p.grad = p.grad + self.slow[name] * self.weight

    @torch.no_grad()
    def together(self) -> None:
        slow, grads = list(self.slow.values()), [p.grad for p in self.params.values()]
        torch._foreach_lerp_(slow, grads, 1 - self.alpha)
        torch._foreach_add_(grads, slow, alpha=self.weight)


@case("host-bound", "torch._foreach_ over all slopes", suite="twenty-fifth", **SHORT)
def slow_slopes_one_by_one(s: Setting, fixed: bool) -> Program:
    """Sums learned by a small transformer; what slopes were like for long is added to each of them by itself."""
    vocab, batch, length = s.pick(1024, 16), s.pick(32, 2), s.pick(256, 4)
    model = s.place(lambda: NextWord(vocab, s.pick(512, 16), s.pick(8, 2), s.pick(24, 2)))
    ids, optimizer, slow = ints(s, vocab, batch, length), fused_adamw(model), SlowGradients(model)
    amplify = slow.together if fixed else slow.one_by_one

    def step() -> None:
        F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
        amplify()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)


def forward_algorithm(start: Tensor, moves: Tensor, heard: Tensor, every: int = 16) -> Tensor:
    """How likely each utterance is: states followed frame by frame, rescaled now and then."""
    alpha, total = start, torch.zeros(len(start), 1, device=start.device)
    for t, likelihood in enumerate(heard.unbind(0)):
        alpha = torch.mm(alpha, moves).mul_(likelihood)
        if t % every == every - 1:
            scale = alpha.sum(1, keepdim=True)
            total, alpha = total + scale.log(), alpha / scale
    return total


@case("host-bound", "the whole recursion out of a CUDA graph", suite="twenty-fourth", **TRIED)
def states_followed_frame_by_frame(s: Setting, fixed: bool) -> Program:
    """How likely many utterances are under a hidden Markov model, states followed from frame to frame."""
    batch, states, frames = s.pick(64, 2), s.pick(256, 4), s.pick(800, 20)
    start = torch.full((batch, states), 1 / states, device=s.device)
    moves = torch.softmax(torch.randn(states, states, device=s.device), dim=1)
    heard = torch.rand(frames, batch, states, device=s.device) + 0.5
    told = torch.zeros(batch, 1, device=s.device)

    @torch.no_grad()
    def score() -> None:
        told.copy_(forward_algorithm(start, moves, heard))

    scope = functools.partial(precision, "high")
    with scope():
        run = graphed(score) if fixed and s.cuda else score
    return Program(run, scope)
