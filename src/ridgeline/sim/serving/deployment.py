"""A deployment: which model on which devices, how it is cut, in what precision, under which engine."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.errors import InputError, nearest
from ridgeline.hardware import Device
from ridgeline.sim.serving.anatomy import Anatomy


@dataclass(frozen=True, slots=True)
class Format:
    """How weights are stored and multiplied: bytes of a weight, the matrix dtype, whether activations are quantized."""

    name: str
    weight_bytes: float
    dtype: str
    quantizes: bool = False


FORMATS = {
    "bf16": Format("bf16", 2.0, "bf16"),
    "fp16": Format("fp16", 2.0, "fp16"),
    "fp8": Format("fp8", 1.0, "fp8", True),
    "fp8_block": Format("fp8_block", 1.0, "fp8", True),
    "int8": Format("int8", 1.0, "int8", True),
    "int8_wo": Format("int8_wo", 1.0, "bf16"),
    "int4_wo": Format("int4_wo", 0.53, "bf16"),
    "nvfp4": Format("nvfp4", 0.5625, "fp4", True),
    "mxfp4": Format("mxfp4", 0.53, "bf16"),
}
KV_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}


@dataclass(frozen=True, slots=True)
class Precision:
    """The formats of a deployment: dense products, experts, and the cache."""

    dense: Format
    experts: Format
    kv: str

    @property
    def name(self) -> str:
        return self.experts.name


def precision(name: str, kv: str = "", *, sparse: bool = False) -> Precision:
    """Formats by the name of a quantization mode; ``kv`` is the cache's, by default that of the activations."""
    if name not in FORMATS:
        raise InputError(f"no precision {name!r}{nearest(name, FORMATS)}")
    made = FORMATS[name]
    # Published four-bit checkpoints of sparse models quantize the experts and leave the rest in 16 bits
    dense = FORMATS["bf16"] if sparse and name in ("nvfp4", "mxfp4", "int4_wo") else made
    cache = kv or ("fp16" if name == "fp16" else "bf16")
    if cache not in KV_BYTES:
        raise InputError(f"no precision {cache!r} for the key-value cache{nearest(cache, KV_BYTES)}")
    return Precision(dense, made, cache)


@dataclass(frozen=True, slots=True)
class Layout:
    """How one replica is spread: ``tp`` ranks share a layer's attention, ``attention_dp`` groups of them split the
    requests, experts are cut ``ep`` ways by expert and the rest of the ranks by width, ``pp`` stages by layer."""

    tp: int = 1
    pp: int = 1
    attention_dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "attention_dp", "ep"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        if self.width % self.ep:
            raise InputError(
                f"ep={self.ep} does not divide the {self.width} ranks of a stage (tp × attention_dp): "
                f"choose one of {', '.join(str(n) for n in range(1, self.width + 1) if self.width % n == 0)}"
            )

    @property
    def width(self) -> int:
        """Ranks that hold one layer."""
        return self.tp * self.attention_dp

    @property
    def moe_tp(self) -> int:
        return self.width // self.ep

    @property
    def num_devices(self) -> int:
        return self.width * self.pp


def check(anatomy: Anatomy, layout: Layout) -> None:
    """Refuse a layout the model cannot be cut by, with the nearest that works."""
    if layout.pp > anatomy.num_layers:
        raise InputError(f"pp={layout.pp} is more than the {anatomy.num_layers} layers of {anatomy.name}")
    for group in anatomy.layers:
        heads = group.mixer.heads
        if heads % layout.tp:
            legal = [n for n in range(1, heads + 1) if heads % n == 0]
            best = min(legal, key=lambda n: abs(n - layout.tp))
            raise InputError(
                f"tp={layout.tp} does not divide the {heads} heads of {anatomy.name}; the nearest is {best}"
            )
        if group.experts and group.experts.num % layout.ep:
            raise InputError(f"ep={layout.ep} does not divide the {group.experts.num} experts of {anatomy.name}")
    if layout.ep > 1 and not anatomy.is_sparse:
        raise InputError(f"ep={layout.ep}: {anatomy.name} has no experts; leave it at 1")


def weight_bytes(anatomy: Anatomy, layout: Layout, precision: Precision) -> float:
    """Bytes of weights on the fullest rank."""
    total = 0.0
    for group in anatomy.layers:
        total += group.count * anatomy.mixer_params(group.mixer) * precision.dense.weight_bytes / layout.tp
        e = group.experts
        if e is None:
            total += group.count * anatomy.ffn_params(group) * precision.dense.weight_bytes / layout.width
        else:
            sides = 3 if anatomy.gated else 2
            routed = sides * anatomy.hidden * e.num * e.ffn * precision.experts.weight_bytes
            shared = sides * anatomy.hidden * e.shared * precision.dense.weight_bytes
            total += group.count * (routed + shared) / layout.width
    return total / layout.pp + 2 * anatomy.hidden * anatomy.vocab * 2.0 / layout.tp


def cache_bytes_per_token(anatomy: Anatomy, layout: Layout, precision: Precision) -> float:
    """Bytes a token takes in the cache of one rank, over the layers of its stage; windows are counted in full."""
    size = KV_BYTES[precision.kv]
    total = sum(g.count * g.mixer.cache_bytes_per_token(size, layout.tp) for g in anatomy.layers)
    return total / layout.pp


RESERVED_BYTES = 2.5e9
"""What the runtime, its graphs and workspaces take beside weights and cache."""


def cache_tokens(
    anatomy: Anatomy, layout: Layout, precision: Precision, device: Device, memory_frac: float, counts_free: bool,
    state_slots: int,
) -> int:  # fmt: skip
    """Tokens that fit the cache of one attention group beside the weights; none is an error."""
    taken = RESERVED_BYTES + weight_bytes(anatomy, layout, precision)
    taken += state_slots * sum(g.count * g.mixer.state_bytes(layout.tp) for g in anatomy.layers) / layout.pp
    whole = device.dram.capacity_bytes
    room = (whole - taken) * memory_frac if counts_free else whole * memory_frac - taken
    # How far people raise an engine's share of the memory when the model fits no other way
    room = room if room > 0 else whole * 0.97 - taken
    per_token = cache_bytes_per_token(anatomy, layout, precision)
    tokens = int(room / per_token) if per_token else 10**9
    if tokens < 1:
        need = weight_bytes(anatomy, layout, precision) / 1e9
        raise InputError(
            f"{anatomy.name} in {precision.name} does not fit {layout.num_devices} × {device.name}: {need:.0f} GB of "
            f"weights a device, {device.dram.capacity_bytes / 1e9:.0f} GB of memory; raise tp, pp or ep, or quantize"
        )
    return tokens
