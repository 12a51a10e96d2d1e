"""Profiler files that are read after a conversion: the exact command for each."""

from __future__ import annotations

from pathlib import Path

from ridgeline.errors import InputError

#: What a name ends with: what the file is, and the command that makes a trace of it.
CONVERSIONS = {
    ".nsys-rep": ("a Nsight Systems report", "nsys export --type sqlite --output {stem}.sqlite {name}"),
    ".qdrep": ("a Nsight Systems report", "nsys export --type sqlite --output {stem}.sqlite {name}"),
    ".ncu-rep": (
        "a Nsight Compute report, which has counters of kernels and no timeline",
        "nsys profile --output {stem} --export sqlite PROGRAM; for its counters, ncu --import {name} --csv --page raw",
    ),
    ".pftrace": ("a Perfetto trace (rocprofv3 writes them)", "traceconv json {name} {stem}.json"),
    ".perfetto-trace": ("a Perfetto trace", "traceconv json {name} {stem}.json"),
    ".rocpd": (
        "a rocprofv3 database",
        "rocpd2pftrace -i {name} -o {stem} && traceconv json {stem}.pftrace {stem}.json",
    ),
    "_results.db": (
        "a rocprofv3 database",
        "rocpd2pftrace -i {name} -o {stem} && traceconv json {stem}.pftrace {stem}.json",
    ),
    ".vtune": (
        "a VTune result, which keeps no timeline that can be exported",
        "unitrace --chrome-kernel-logging --chrome-call-logging PROGRAM, which writes JSON",
    ),
    ".trace.json.pb": ("a TensorFlow trace", "tensorboard --logdir, and download it as trace.json.gz"),
}


def refuse_foreign(path: Path) -> None:
    """Say how to convert a file that its name shows to be another profiler's own."""
    for ending, (what, command) in CONVERSIONS.items():
        if path.name.endswith(ending):
            stem = path.name.removesuffix(ending)
            said = command.format(stem=stem, name=path.name)
            raise InputError(f"{path} is {what}; convert it: {said}")
