"""What the categories and names of Chrome traces mean, for every dialect since 2021."""

from __future__ import annotations

import re

from ridgeline.trace.kind import Kind

#: Category, in lower case, to kind. Those of 2021 (Operator, Kernel, Runtime) differ in nothing but the words.
CATEGORIES = {
    "kernel": Kind.KERNEL,
    "hpu_op": Kind.KERNEL,
    "mtia_ccp_events": Kind.KERNEL,
    "mtia_workloadd": Kind.KERNEL,
    "collective_comm": Kind.COMMUNICATION,
    "communication": Kind.COMMUNICATION,
    "gpu_memcpy": Kind.MEMCPY,
    "memcpy": Kind.MEMCPY,
    "gpu_memset": Kind.MEMSET,
    "memset": Kind.MEMSET,
    "cuda_runtime": Kind.RUNTIME,
    "cuda_driver": Kind.RUNTIME,
    "hip_runtime": Kind.RUNTIME,
    "hip_driver": Kind.RUNTIME,
    "xpu_runtime": Kind.RUNTIME,
    "xpu_driver": Kind.RUNTIME,
    "mtia_runtime": Kind.RUNTIME,
    "glow_runtime": Kind.RUNTIME,
    "privateuse1_runtime": Kind.RUNTIME,
    "privateuse1_driver": Kind.RUNTIME,
    "runtime": Kind.RUNTIME,
    "cpu_op": Kind.OP,
    "operator": Kind.OP,
    "op": Kind.OP,
    "user_annotation": Kind.ANNOTATION,
    "gpu_user_annotation": Kind.ANNOTATION,
    "cuda_profiler_range": Kind.ANNOTATION,
    "annotation": Kind.ANNOTATION,
    "nvtx": Kind.ANNOTATION,
    "python_function": Kind.PYTHON,
    "pythonfunction": Kind.PYTHON,
    "python": Kind.PYTHON,
    "step": Kind.STEP,
    "cuda_sync": Kind.SYNC,
    "sync": Kind.SYNC,
    "gc": Kind.GC,
    "python_gc": Kind.GC,
    "dataloader": Kind.DATALOADER,
    "overhead": Kind.OVERHEAD,
    "bubble": Kind.BUBBLE,
    "allocation": Kind.ALLOCATION,
    "other": Kind.OTHER,
}
#: Marks of the recording itself, which are no spans.
WINDOWS = frozenset({"trace"})

STEP_NAME = re.compile(r"(?:ProfilerStep|rl\.step)\s*#\s*(\d+)")
_COMMUNICATION = re.compile(
    r"(?:^|[^a-z])(?:nccl|rccl|msccl|oneccl|hccl)|cross_device_reduce|(?:one|two)_shot_all_?reduce|multimem_all|nvshmem"
    r"|deep_ep::|lamport.{0,20}all_?reduce|allreduce_fusion_kernel",
    re.IGNORECASE,
)
_LOADER = re.compile(r"^enumerate\(DataLoader\)#|DataLoaderIter\.__next__|^DataLoader\b")
_GC = re.compile(r"garbage collection|^python gc\b|^gc\.collect|<built-in (?:method|function) collect\b", re.IGNORECASE)
_COPY = re.compile(r"\b(HtoD|DtoH|DtoD|PtoP|HtoH|HtoA|AtoH|AtoD|DtoA)\b", re.IGNORECASE)
_LONG_COPY = re.compile(r"(Host|Device)\s*To\s*(Host|Device)", re.IGNORECASE)
_COPY_NAME = re.compile(r"^(?:mem ?cpy|copy(?:host|device|buffer)|dma\b)", re.IGNORECASE)
_SET_NAME = re.compile(r"^(?:mem ?set|fillbuffer)", re.IGNORECASE)


def kind_of(category: str, name: str, *, on_device: bool) -> Kind:
    """What an event is, by its category, then by its name."""
    kind = CATEGORIES.get(category.strip().lower())
    if kind is None:
        kind = Kind.KERNEL if on_device else Kind.OTHER
    if kind is Kind.KERNEL:
        # Collectives are kernels by category; copies are told apart by name only where no category does
        told = category.strip().lower() == "kernel"
        if _COMMUNICATION.search(name):
            return Kind.COMMUNICATION
        if told:
            return Kind.KERNEL
        if _COPY_NAME.search(name):
            return Kind.MEMCPY
        return Kind.MEMSET if _SET_NAME.search(name) else Kind.KERNEL
    if kind in (Kind.OP, Kind.ANNOTATION, Kind.PYTHON, Kind.OTHER) and not on_device:
        if kind is not Kind.PYTHON:
            if STEP_NAME.match(name):
                return Kind.STEP
            if _LOADER.search(name):
                return Kind.DATALOADER
        return Kind.GC if _GC.search(name) else kind
    return kind


def copy_of(name: str) -> str:
    """A copy's direction and host memory: ``HtoD pageable``, ``DtoH pinned``, ``DtoD``; empty if the name says none."""
    found = _COPY.search(name)
    if found:
        direction = found.group(1)[0].upper() + "to" + found.group(1)[-1].upper()
    else:
        long = _LONG_COPY.search(name)
        if not long:
            return ""
        direction = long.group(1)[0].upper() + "to" + long.group(2)[0].upper()
    lowered = name.lower()
    memory = " pageable" if "pageable" in lowered else " pinned" if "pinned" in lowered else ""
    return direction + memory


_FRAME = re.compile(r"^(.*?)\((\d+)\): (.*)$")
_MODULE_FRAME = re.compile(r"^nn\.Module: (.+)$")
_MODULE_RANGE = re.compile(r"^rl\.module:\s*(.+)$")


def source_of(frame: str) -> str:
    """``file:line`` of a recorded Python frame ``file(line): function``; empty for built-ins."""
    found = _FRAME.match(frame)
    return f"{found.group(1)}:{found.group(2)}" if found else ""


_FRAMEWORK = re.compile(
    r"^(?:torch|torchvision|triton|functorch|numpy)/|(?:site|dist)-packages/torch/|/lib/python3[^/]*/[^/]+$"
)
_LIBRARY = re.compile(
    r"^(?:transformers|timm|diffusers|accelerate|lightning|pytorch_lightning|vllm|deepspeed|megatron|torchrec|ignite)/"
    r"|(?:site|dist)-packages/|/lib/python3|^(?:contextlib|threading|runpy|selectors|queue|concurrent/\S+)\b|^<"
)


def library_tier(source: str) -> int:
    """0 for a line of the user's own, 1 for one of an installed package, 2 for the framework and Python itself."""
    place = source.replace("\\", "/")
    if _FRAMEWORK.search(place):
        return 2
    return 1 if _LIBRARY.search(place) else 0


def module_part(frame: str) -> tuple[str, bool]:
    """(module a frame or range enters, whether that is a full path)."""
    found = _MODULE_RANGE.match(frame)
    if found:
        return found.group(1).strip(), True
    found = _MODULE_FRAME.match(frame)
    return (found.group(1).strip(), False) if found else ("", False)


#: Bytes of an element, by the names that traces give types.
ELEMENT_BYTES = {
    "float": 4, "float32": 4, "c10::half": 2, "half": 2, "float16": 2, "bfloat16": 2, "c10::bfloat16": 2, "double": 8,
    "float64": 8, "int": 4, "int32": 4, "long": 8, "long int": 8, "int64": 8, "short": 2, "int16": 2, "char": 1,
    "signed char": 1, "int8": 1, "byte": 1, "unsigned char": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1, "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1, "c10::complex<float>": 8, "complexfloat": 8,
    "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip
