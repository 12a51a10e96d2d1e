"""Triton kernels to cubins: one variant at a time, for any device of the same architecture, with or without a GPU."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton

from ridgeline.errors import KernelError

SM_90 = 90
POINTER_ALIGNMENT_BYTES = 16
LEAVES = "LEAVES"
"""The constant by which a kernel says that what the copy engine reads leaves the L2 first."""

_COPY = re.compile(r"(cp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global[\w.:]*) (\[[^;]*);")


@dataclass(frozen=True, slots=True)
class Variant:
    """One specialization of a kernel: everything the compiler needs to know besides the source."""

    kernel: str
    types: tuple[tuple[str, str], ...]  # run-time arguments in order: ("x_ptr", "*bf16"), ("cols", "i32")
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[tuple[str, int], ...]  # arguments known to be multiples of a power of two: wide loads need it
    num_warps: int
    num_stages: int = 1
    arch: int = SM_90
    max_registers: int = 0  # of a thread before warps are specialized; 0: as the compiler likes

    def key(self) -> str:
        """What a stored cubin is filed under: compiler, source, and this value."""
        text = json.dumps([toolchain(), source_hash(), asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin and what a launch of it needs."""

    name: str
    cubin: bytes
    num_warps: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What the compiler made of a variant, read from its resource report and its disassembly."""

    num_registers: int
    stack_bytes: int
    shared_bytes: int
    instructions: Counter[str]

    def num(self, prefix: str) -> int:
        """How many instructions start so: ``num("LDG.E.128")``."""
        return sum(count for name, count in self.instructions.items() if name.startswith(prefix))

    @property
    def num_spills(self) -> int:
        return self.num("LDL") + self.num("STL")


@cache
def toolchain() -> str:
    """Compiler versions that decide what comes out; a ptxas of the user's own is part of it."""
    own = os.environ.get("TRITON_PTXAS_PATH")
    ptxas = f"wheel of triton {triton.__version__}" if own is None else _version_of(own)
    return f"triton {triton.__version__}; ptxas {ptxas}"


def _version_of(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()


@cache
def source_hash() -> str:
    """A hash of every kernel source of this room, and of what edits them: a change makes stored cubins stale."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    names = ("kernel", "gradient", "streamed", "links", "tickets", "order", "roles", "tall", "narrow")
    for path in sorted(
        [*(path for name in names for path in here.glob(f"*/{name}.py")),
         *(here / name for name in ("arrival_counter.py", "compiler.py", "device.py", "row_stream.py"))]
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compile_variant(function: Any, variant: Variant) -> Compiled:
    """Compile with Triton, on any machine; Triton's own cache is used."""
    made = triton_kernel(function, variant)
    if made.metadata.global_scratch_size or made.metadata.profile_scratch_size:
        raise KernelError(f"kernel {variant.kernel} asks for scratch memory, which the launcher does not provide")
    cubin = made.asm["cubin"]
    if dict(variant.constants).get(LEAVES):
        cubin = _assembled(hinted(made.asm["ptx"]), variant.arch)
    return Compiled(made.metadata.name, cubin, made.metadata.num_warps, made.metadata.shared)


def hinted(ptx: str) -> str:
    """The copy engine's copies with the policy "evict first", which Triton has for loads only.

    Not those of threads (``cp.async``): ptxas 12.8 and 12.9 make an instruction of them that Hopper calls illegal.
    """
    body = ptx.index("{", ptx.index(".visible .entry"))
    first = ptx.index("ld.param", body)
    policy = "createpolicy.fractional.L2::evict_first.b64 %leaves, 1.0;\n\t"
    ptx = f"{ptx[: body + 1]}\n\t.reg .b64 %leaves;{ptx[body + 1 : first]}{policy}{ptx[first:]}"
    return _COPY.sub(r"\1.L2::cache_hint \2, %leaves;", ptx)


def _assembled(ptx: str, arch: int) -> bytes:
    """PTX to a cubin, as Triton has it done."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        chip = f"--gpu-name={sm_arch_from_capability(arch)}"
        command = [get_ptxas(arch).path, "-lineinfo", chip, str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise KernelError(f"ptxas refused a kernel: {done.stderr.strip()[-500:]}")
        return target.read_bytes()


def triton_kernel(function: Any, variant: Variant) -> Any:
    """Triton's own compiled object, with every intermediate form."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict(variant.types)
    constants: dict[Any, Any] = dict(variant.constants)
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    missing = [name for name, kind in signature.items() if kind == "constexpr" and name not in constants]
    if missing or set(types) & set(constants):
        raise KernelError(f"kernel {variant.kernel}: arguments {missing or set(types) & set(constants)} not given once")
    attrs = {(function.arg_names.index(name),): [["tt.divisibility", by]] for name, by in variant.divisible}
    options: dict[str, Any] = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    make_source: Any = ASTSource
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        make_source = GluonASTSource
        constants = {(function.arg_names.index(name),): value for name, value in constants.items()}
        options["sanitize_overflow"] = False
    if variant.max_registers:
        options["maxnreg"] = variant.max_registers
    source = make_source(function, signature, constants, attrs)
    return triton.compile(source, target=GPUTarget("cuda", variant.arch, 32), options=options)


def facts_of(function: Any, variant: Variant) -> Facts:
    """Compile, then read the resource report and the disassembly."""
    return facts_of_cubin(compile_variant(function, variant))


def facts_of_cubin(compiled: Compiled) -> Facts:
    """What the tools in Triton's wheel say of a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.cubin)
        usage = _tool("cuobjdump", "-res-usage", str(path))
        sass = _tool("nvdisasm", "-c", str(path))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise KernelError(f"no resource report for {compiled.name} in: {usage[:200]}")
    instructions = Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", sass, re.MULTILINE))
    return Facts(int(found[1]), int(found[2]), compiled.shared_bytes, instructions)


def _tool(name: str, *args: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *args], capture_output=True, text=True, check=True).stdout
