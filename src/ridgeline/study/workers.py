"""Where chunks are evaluated: in this process, in processes beside it, or on a Ray cluster.

A chunk is a number and, for samplers that search, its points; evaluating it twice gives the same columns, so that a
chunk whose worker or node was lost is simply evaluated again.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any

from ridgeline.errors import InputError, MissingExtra
from ridgeline.study.space import Columns

Task = tuple[int, Any]  # number of a chunk, and its points where they do not follow from the number
Evaluate = Callable[[Mapping[str, Any], int, Any], Columns]


def here(evaluate: Evaluate, spec: Mapping[str, Any], tasks: Iterable[Task]) -> Iterator[tuple[int, Columns]]:
    """One chunk after another."""
    for number, points in tasks:
        yield number, evaluate(spec, number, points)


def processes(
    evaluate: Evaluate, spec: Mapping[str, Any], tasks: Iterable[Task], num: int
) -> Iterator[tuple[int, Columns]]:
    """In ``num`` processes; chunks of a process that died are evaluated again."""
    waiting, losses = list(tasks), 0
    while waiting:
        running: dict[Future[Columns], Task] = {}
        with ProcessPoolExecutor(num, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                while waiting or running:
                    while waiting and len(running) < 2 * num:
                        task = waiting.pop(0)
                        running[pool.submit(evaluate, spec, *task)] = task
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        columns = future.result()
                        yield running.pop(future)[0], columns
            except BrokenProcessPool as error:
                losses += 1
                if losses > 5:  # times that processes died
                    raise InputError(
                        f"{losses} worker processes died: is there enough memory? give fewer --workers, then --resume"
                    ) from error
                waiting = sorted([*running.values(), *waiting], key=lambda task: task[0])
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def on_ray(
    evaluate: Evaluate, spec: Mapping[str, Any], tasks: Iterable[Task], address: str, num: int
) -> Iterator[tuple[int, Columns]]:
    """On a Ray cluster: ``local`` starts one here, otherwise ``host:port`` or ``auto``; lost tasks run again."""
    refuse_without_token(address)
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("Ray", "ray", "--ray") from error
    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < (2, 52):
        raise InputError(f"Ray {ray.__version__} has no token authentication: install 2.52 or newer")
    started = not ray.is_initialized()
    if started:
        options: dict[str, Any] = {"include_dashboard": False, "num_cpus": num} if address == "local" else {
            "address": address}  # fmt: skip
        try:
            ray.init(**options, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            said = next(iter(str(error).splitlines()), "")
            raise InputError(f"no Ray cluster at {address!r}: {said}") from error
    try:
        remote = ray.remote(num_cpus=1, max_retries=-1)(evaluate)
        waiting, running = list(tasks), dict[Any, int]()
        while waiting or running:
            while waiting and len(running) < 4 * max(num, 1):
                number, points = waiting.pop(0)
                running[remote.remote(spec, number, points)] = number
            done, _ = ray.wait(list(running), num_returns=1)
            for reference in done:
                yield running.pop(reference), ray.get(reference)
    finally:
        if started:
            with suppress(Exception):
                ray.shutdown()


def refuse_without_token(address: str) -> None:
    """Whoever reaches a Ray cluster runs code on it: one beyond this machine must ask for a token."""
    host = address.removeprefix("ray://")
    if address in ("local", "auto") or host.startswith(("127.", "localhost", "::1", "[::1]")):
        return
    has_token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if os.environ.get("RAY_AUTH_MODE") != "token" or not has_token:
        raise InputError(
            f"Ray at {host} is not on this machine and no token is set: start it with RAY_AUTH_MODE=token, "
            "and set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here"
        )
