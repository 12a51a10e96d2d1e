"""MLIR by jaxlib's bindings: the context with its dialects, and bytecode read in a process of its own.

jaxlib aborts the process on some damaged bytecode, so that bytecode becomes text in a child (this file run as a script,
without torch), and text is what importers parse.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

BYTECODE = b"ML\xefR"


def open_context() -> tuple[Any, Any, Any]:
    """(``ir``, the ``stablehlo`` dialect, a context in which StableHLO, CHLO and JAX's own dialects are known)."""
    from jaxlib.mlir import ir  # type: ignore[import-untyped]
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext  # type: ignore[import-untyped]
    from jaxlib.mlir.dialects import chlo, stablehlo  # type: ignore[import-untyped]

    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context = ir.Context()
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    stablehlo.register_dialect(context)
    chlo.register_dialect(context)
    return ir, stablehlo, context


def text_of(bytecode: bytes) -> str:
    """Bytecode as MLIR text with its locations; a ValueError says why not."""
    done = subprocess.run([sys.executable, "-P", __file__], input=bytecode, capture_output=True)
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip()
        raise ValueError(told if done.returncode == 1 and told else "it is damaged")
    return done.stdout.decode()


def main() -> None:
    """Text of the bytecode on standard input."""
    ir, stablehlo, context = open_context()
    data = sys.stdin.buffer.read()
    try:
        if b"StableHLO_v" in data[4:64].split(b"\0")[0]:
            module = stablehlo.deserialize_portable_artifact(context, data)
        else:
            module = ir.Module.parse(data, context)
    except (ir.MLIRError, ValueError, RuntimeError) as error:
        sys.exit(str(error))
    sys.stdout.write(module.operation.get_asm(enable_debug_info=True))


if __name__ == "__main__":
    main()
