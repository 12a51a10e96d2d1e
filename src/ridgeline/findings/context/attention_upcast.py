"""Products of attention's reference form, which casts queries of 16 bits to fp32."""

from __future__ import annotations

import numpy as np

from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.shapes import first_dtype, product_of, shaped_ops
from ridgeline.findings.replay.replay import Index, Mask
from ridgeline.trace.kind import Kind


def cast_up(context: TraceContext) -> Mask:
    """Works that are products in fp32 of queries that came in 16 bits: inside of the reference form, and those of its
    gradient, which have the same sizes."""
    trace, found = context.trace, np.zeros(len(context.rows), dtype=bool)
    dtypes = trace.optional("dtypes")
    spans = context.host_spans(r"^aten::_scaled_dot_product_attention_math$", Kind.OP)
    half = [first_dtype(trace.words[int(dtypes[span])]) in ("bf16", "fp16") for span in spans.tolist()]
    spans = spans[np.array(half, dtype=bool)]
    if not len(spans):
        return found
    works = np.flatnonzero(context.family("gemm"))
    sizes = _sizes(context, works)
    inside = context.launched_in(context.time_of(spans))[works].tolist()
    known = {given for given, is_inside in zip(sizes, inside, strict=True) if is_inside and given}
    found[works] = [given in known for given in sizes]
    return found


def _sizes(context: TraceContext, works: Index) -> list[tuple[int, ...]]:
    """How many products each op in fp32 makes, and their sides by length; nothing of others."""
    trace, found = context.trace, list[tuple[int, ...]]()
    shapes, dtypes = trace.optional("shapes"), trace.optional("dtypes")
    for op in shaped_ops(trace, context.rows[works]).tolist():
        single = op >= 0 and first_dtype(trace.words[int(dtypes[op])]) == "fp32"
        product = product_of(trace.words[int(trace.name[op])], trace.words[int(shapes[op])]) if single else None
        found.append(() if product is None else (product.b, *sorted(product[1:])))
    return found
