"""Graphs as files: versioned JSON, the same bytes for the same graph, nothing in them ever executed."""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ridgeline.dtypes import dtype
from ridgeline.errors import GraphError, RidgelineError
from ridgeline.graph.types import Block, Carry, Graph, Item, Kind, Node, Phase, TensorType, Value
from ridgeline.graph.verify import verify

FORMAT = "ridgeline-graph"
VERSION = 1
MAX_BYTES = 1 << 29
"""A 405B model in train mode takes under 1 MB; half a gigabyte is a mistake or an attack."""
_LAYOUTS = frozenset({"contiguous", "channels_last", "strided", "transposed"})
_E = TypeVar("_E", Kind, Phase)


def save(graph: Graph, path: str | os.PathLike[str]) -> Path:
    """Write the graph as JSON, compressed when the name ends in ``.gz``; an existing file is replaced in one move."""
    target = Path(path)
    content = dumps(graph)
    if target.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(content)
        beside.replace(target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise GraphError(f"cannot write {target}: {error.strerror}; choose a folder you may write to") from error
    return target


def load(path: str | os.PathLike[str]) -> Graph:
    """Read a graph that ``save`` wrote; anything else is a GraphError that says what is wrong and where."""
    source = Path(path)
    try:
        with source.open("rb") as file:
            packed = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise GraphError(f"cannot read {source}: {error.strerror}") from error
    content = _unpacked(packed, source) if packed[:2] == b"\x1f\x8b" else packed
    if len(content) > MAX_BYTES:
        raise GraphError(f"{source} holds more than {MAX_BYTES:,} bytes: no graph is that large; save it again")
    return loads(content, where=str(source))


def _unpacked(packed: bytes, source: Path) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise GraphError(f"{source} is not a whole gzip file ({error}): save or copy it again") from error


def dumps(graph: Graph) -> bytes:
    """The graph as canonical JSON."""
    verify(graph)
    types: dict[TensorType, int] = {}
    for v in graph.values:
        types.setdefault(v.type, len(types))
    document = {
        "format": FORMAT,
        "version": VERSION,
        "name": graph.name,
        "mode": graph.mode,
        "meta": {key: _packed(value, f"meta {key!r}") for key, value in graph.meta.items()},
        "types": [[t.dtype.name, list(t.shape), t.layout] for t in types],
        "values": [[types[v.type], str(v.kind), v.alias, v.count, v.name, v.storage_bytes] for v in graph.values],
        "items": [_item_out(item) for item in graph.items],
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
    }
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"


def _item_out(item: Item) -> dict[str, Any]:
    if isinstance(item, Node):
        return _node_out(item)
    return {
        "repeat": item.repeat,
        "reverse": item.reverse,
        "module": item.module,
        "carries": [[c.init, c.inner, c.next] for c in item.carries],
        "nodes": [_node_out(n) for n in item.nodes],
    }


def _node_out(node: Node) -> dict[str, Any]:
    out: dict[str, Any] = {"op": node.op, "in": list(node.inputs), "out": list(node.outputs), "phase": str(node.phase)}
    if node.attrs:
        out["attrs"] = {key: _packed(value, f"attribute {key!r} of {node.op}") for key, value in node.attrs.items()}
    texts = {"module": node.module, "source": node.source, "target": node.target}
    out |= {key: text for key, text in texts.items() if text}
    return out | ({"frees": list(node.frees)} if node.frees else {})


def _packed(value: Any, where: str) -> Any:
    """JSON has no tuples: one is written ``{"tuple": […]}``, and a mapping ``{"map": {…}}``."""
    if isinstance(value, tuple):
        return {"tuple": [_packed(v, where) for v in value]}
    if isinstance(value, list):
        return [_packed(v, where) for v in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"map": {key: _packed(v, where) for key, v in value.items()}}
    if isinstance(value, float) and value - value != 0:
        raise GraphError(f"{where} is {value}, which JSON cannot hold: leave it out or write it as text")
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise GraphError(f"{where} is a {type(value).__name__}: only numbers, text, lists, tuples and maps can be saved")


def loads(content: bytes, where: str = "the text") -> Graph:
    """A graph from the bytes that ``dumps`` made."""
    try:
        document = json.loads(content.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        brief = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise GraphError(f"{where} is not JSON ({brief}): it was cut short or is not a saved graph") from error
    reader = _Reader(where)
    try:
        return verify(reader.graph(document))
    except GraphError as error:
        message = str(error)
        raise error if message.startswith(where) else GraphError(f"{where}: {message}") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number JSON may hold")


class _Reader:
    """Takes a document apart and trusts none of it."""

    def __init__(self, where: str) -> None:
        self.where = where

    def wrong(self, path: str, wanted: str, got: object) -> NoReturn:
        shown = repr(got)
        shown = shown if len(shown) <= 60 else shown[:57] + "…"
        raise GraphError(f"{self.where}: {path} must be {wanted}, not {shown}: save the graph again")

    def graph(self, document: Any) -> Graph:
        self.check_format(document)
        keys = {"format", "version", "name", "mode", "meta", "types", "values", "items", "inputs", "outputs"}
        self.keys(document, keys, keys, "the file")
        types = [self.tensor_type(t, f"types[{i}]") for i, t in enumerate(self.entries(document["types"], "types"))]
        values = self.entries(document["values"], "values")
        return Graph(
            self.text(document["name"], "name"),
            tuple(self.value(v, i, types) for i, v in enumerate(values)),
            tuple(self.item(x, f"items[{i}]") for i, x in enumerate(self.entries(document["items"], "items"))),
            self.ids(document["inputs"], "inputs"),
            self.ids(document["outputs"], "outputs"),
            self.text(document["mode"], "mode"),
            self.mapping(document["meta"], "meta"),
        )

    def check_format(self, document: Any) -> None:
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise GraphError(f'{self.where} is JSON but not a saved graph: it lacks "format": "{FORMAT}"')
        version = document.get("version")
        if version != VERSION or isinstance(version, bool):
            raise GraphError(
                f"{self.where} is version {version!r} of the graph format and this Ridgeline reads "
                f"{VERSION}: save it again, or install the Ridgeline that wrote it"
            )

    def keys(self, got: dict[str, Any], known: set[str], required: set[str], path: str) -> None:
        if lacking := sorted(required - got.keys()):
            raise GraphError(f"{self.where}: {path} lacks {', '.join(lacking)}: save the graph again")
        if unknown := sorted(got.keys() - known):
            raise GraphError(f"{self.where}: {path} has unknown {', '.join(map(repr, unknown))}: save the graph again")

    def entries(self, got: Any, path: str, length: int | None = None) -> list[Any]:
        if not isinstance(got, list) or (length is not None and len(got) != length):
            self.wrong(path, "a list" if length is None else f"a list of {length}", got)
        return got

    def text(self, got: Any, path: str) -> str:
        return got if isinstance(got, str) else self.wrong(path, "text", got)

    def size(self, got: Any, path: str) -> int:
        # max int
        if not isinstance(got, int) or isinstance(got, bool) or not 0 <= got < 2**63:
            self.wrong(path, "a whole number from 0 up", got)
        return got

    def ids(self, got: Any, path: str) -> tuple[int, ...]:
        return tuple(self.size(i, f"{path}[{at}]") for at, i in enumerate(self.entries(got, path)))

    def tensor_type(self, got: Any, path: str) -> TensorType:
        name, shape, layout = self.entries(got, path, 3)
        if self.text(layout, f"{path} layout") not in _LAYOUTS:
            self.wrong(f"{path} layout", "one of " + ", ".join(sorted(_LAYOUTS)), layout)
        try:
            return TensorType(self.ids(shape, f"{path} shape"), dtype(self.text(name, f"{path} dtype")), layout)
        except RidgelineError as error:
            raise GraphError(f"{self.where}: {path}: {error}") from error

    def value(self, got: Any, at: int, types: list[TensorType]) -> Value:
        path = f"values[{at}]"
        of, kind, alias, count, name, storage = self.entries(got, path, 6)
        if self.size(of, f"{path} type") >= len(types):
            self.wrong(f"{path} type", f"below {len(types)}", of)
        return Value(
            at,
            types[of],
            self.one_of(Kind, kind, f"{path} kind"),
            None if alias is None else self.size(alias, f"{path} alias"),
            self.size(count, f"{path} count"),
            self.text(name, f"{path} name"),
            None if storage is None else self.size(storage, f"{path} storage_bytes"),
        )

    def one_of(self, kinds: type[_E], got: Any, path: str) -> _E:
        try:
            return kinds(got)
        except ValueError:
            self.wrong(path, "one of " + ", ".join(kinds), got)

    def item(self, got: Any, path: str) -> Item:
        if not isinstance(got, dict):
            self.wrong(path, "a node or a block", got)
        return self.block(got, path) if "repeat" in got else self.node(got, path)

    def block(self, got: dict[str, Any], path: str) -> Block:
        keys = {"repeat", "reverse", "module", "carries", "nodes"}
        self.keys(got, keys, keys, path)
        carries = [self.entries(c, f"{path} carries", 3) for c in self.entries(got["carries"], f"{path} carries")]
        nodes = self.entries(got["nodes"], f"{path} nodes")
        if not isinstance(got["reverse"], bool):
            self.wrong(f"{path} reverse", "true or false", got["reverse"])
        return Block(
            tuple(self.node(n, f"{path} nodes[{i}]") for i, n in enumerate(nodes)),
            self.size(got["repeat"], f"{path} repeat"),
            tuple(Carry(*self.ids(c, f"{path} carries")) for c in carries),
            got["reverse"],
            self.text(got["module"], f"{path} module"),
        )

    def node(self, got: Any, path: str) -> Node:
        if not isinstance(got, dict):
            self.wrong(path, "a node", got)
        required = {"op", "in", "out", "phase"}
        self.keys(got, required | {"attrs", "module", "source", "target", "frees"}, required, path)
        module, source, target = (self.text(got.get(k, ""), f"{path} {k}") for k in ("module", "source", "target"))
        return Node(
            self.text(got["op"], f"{path} op"),
            self.ids(got["in"], f"{path} in"),
            self.ids(got["out"], f"{path} out"),
            self.mapping(got.get("attrs", {}), f"{path} attrs"),
            self.one_of(Phase, got["phase"], f"{path} phase"),
            module,
            source,
            target,
            self.ids(got.get("frees", []), f"{path} frees"),
        )

    def mapping(self, got: Any, path: str) -> dict[str, Any]:
        if not isinstance(got, dict):
            self.wrong(path, "a map", got)
        return {key: self.plain(value, f"{path} {key}") for key, value in got.items()}

    def plain(self, got: Any, path: str) -> Any:
        if isinstance(got, list):
            return [self.plain(v, path) for v in got]
        if not isinstance(got, dict):
            return got
        if set(got) == {"tuple"}:
            return tuple(self.plain(v, path) for v in self.entries(got["tuple"], path))
        if set(got) == {"map"}:
            return self.mapping(got["map"], path)
        self.wrong(path, "a plain value", got)
