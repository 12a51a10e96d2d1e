"""A plain liveness count over flat graphs, with nothing forgiven: the oracle of the memory tests."""

from __future__ import annotations

from ridgeline.graph import RESIDENT, Graph, expand

EVERYTHING = 10**9


def resident_bytes(graph: Graph) -> int:
    return sum(v.num_bytes * v.count for v in graph.values if v.kind in RESIDENT)


def full_peak_bytes(graph: Graph) -> tuple[int, int]:
    """Peak and final live bytes, every iteration laid out; a use after free or a double free fails."""
    live_bytes = peak = resident_bytes(graph)
    alive: set[tuple[int, int]] = set()
    freed: set[tuple[int, int]] = set()
    values = graph.values
    for flat in expand(graph, EVERYTHING):
        for s in flat.inputs:
            assert s not in freed, f"{flat.node.op} at {flat.node.module} reads freed {s} {values[s[0]]}"
            assert s in alive or values[s[0]].kind in RESIDENT, (
                f"{flat.node.op} at {flat.node.module} reads unborn {s} {values[s[0]]}"
            )
        for s in flat.outputs:
            if s not in alive and values[s[0]].kind not in RESIDENT:
                assert s not in freed, f"{flat.node.op} at {flat.node.module} revives {s}"
                alive.add(s)
                live_bytes += values[s[0]].num_bytes
        peak = max(peak, live_bytes)
        for s in flat.frees:
            assert s not in freed, f"{flat.node.op} at {flat.node.module} frees {s} twice"
            assert s in alive or s[0] in graph.meta.get("donated", ()), (
                f"{flat.node.op} at {flat.node.module} frees unborn {s}"
            )
            freed.add(s)
            alive.discard(s)
            live_bytes -= values[s[0]].num_bytes
    return peak, live_bytes


def short_peak_bytes(graph: Graph) -> tuple[int, int]:
    """The same from three iterations of each block, the middle one standing for the rest."""
    values = graph.values
    live_bytes = peak = resident_bytes(graph)
    seen: set[tuple[int, int]] = set()
    bodies: dict[int, list] = {}
    order: list[int] = []
    for at, flat in enumerate(expand(graph, 3)):
        key = flat.body or -at - 1
        if key not in bodies:
            order.append(key)
        bodies.setdefault(key, []).append(flat)
    for key in order:
        start = live_bytes
        highest = start
        for flat in bodies[key]:
            for s in flat.outputs:
                if s not in seen and values[s[0]].kind not in RESIDENT:
                    seen.add(s)
                    live_bytes += values[s[0]].num_bytes
            highest = max(highest, live_bytes)
            live_bytes -= sum(values[s[0]].num_bytes for s in flat.frees)
        times, delta = bodies[key][0].times, live_bytes - start
        peak = max(peak, highest, highest + (times - 1) * delta)
        live_bytes = start + times * delta
    return peak, live_bytes
