"""Parts of a sequence that the programs of a cluster have, joined through each other's shared memory.

Every program owns some columns of the result: it is told the sums of all programs over these columns, and what each
has seen. Nothing is written to memory but the result, nobody counts and nobody is launched.

Warps are specialized here, and a cluster's barrier waits for all warps of all programs: those without work arrive too
(``arrive_in_cluster``). It is waited for once, before anybody writes into a neighbor's shared memory; what comes is
counted in bytes by a barrier of the one that it comes to. So a program that has all of it is written to no more, and
may end, and so may one that has told all of its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ridgeline.kernels.function import gluon_jit

GROUPS = gl.constexpr(16)
"""Stripes of columns that are given out to the programs of a cluster."""

SEEN_AT = gl.constexpr(64)
"""Where in a room begins what programs have seen, 16 heads each; before it is the barrier, behind it are parts."""


@gluon_jit
def arrive_in_cluster():
    """Says that this warp has begun."""
    arrive: gl.constexpr = "barrier.cluster.arrive.relaxed.aligned; // $0"
    gl.inline_asm_elementwise(arrive, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def wait_for_cluster():
    """Until all warps of all programs of the cluster have begun."""
    wait: gl.constexpr = "barrier.cluster.wait.acquire.aligned; // $0"
    gl.inline_asm_elementwise(wait, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def attend_cluster():
    """A warp without work: its cluster waits for all warps of all programs to begin."""
    arrive_in_cluster()
    wait_for_cluster()


@gluon.constexpr_function
def even_heads(R):
    """Heads are told two at a time."""
    return (R + 1) // 2 * 2


@gluon.constexpr_function
def most_columns(D, TOGETHER):
    """Columns of a program of the cluster, at most."""
    return -(-GROUPS.value // TOGETHER) * (D // GROUPS.value)


@gluon.constexpr_function
def parts_at(TOGETHER):
    """Where in a room parts begin."""
    return SEEN_AT.value + TOGETHER * 64


@gluon.constexpr_function
def room_bytes(R, D, TOGETHER):
    """Of a room: whole kilobytes, since what is allocated behind it is to be as well aligned as it would be alone."""
    return -(-(parts_at(TOGETHER) + TOGETHER * most_columns(D, TOGETHER) * even_heads(R) * 4) // 1024) * 1024


@gluon.constexpr_function
def room_asm(R, D, TOGETHER):
    return (
        f"{{ .shared .align 1024 .b8 told[{room_bytes(R, D, TOGETHER)}]; .reg .pred %first; .reg .b32 %t; .reg .b64 %s;"
        """
        mov.u32 $0, told; mov.u32 %t, %tid.x; setp.eq.u32 %first, %t, 0;
        @%first mbarrier.init.shared::cta.b64 [$0], 1;
        @%first mbarrier.arrive.expect_tx.shared::cta.b64 %s, [$0], $1;
        @%first fence.mbarrier_init.release.cluster; }"""
    )


@gluon_jit
def first_group(rank, TOGETHER: gl.constexpr):
    """The first stripe of columns that a program of the cluster owns."""
    return (rank * GROUPS + TOGETHER - 1) // TOGETHER


@gluon_jit
def owner_of(col, D: gl.constexpr, TOGETHER: gl.constexpr):
    """The program of the cluster that is told of a column."""
    return col // (D // GROUPS) * TOGETHER // GROUPS


@gluon_jit
def place_of(rank, within, head, R: gl.constexpr, D: gl.constexpr, TOGETHER: gl.constexpr):
    """Where in a room the number of a program, a column (of the owner's) and a head lies, in bytes."""
    return ((rank * most_columns(D, TOGETHER) + within) * even_heads(R) + head) * 4 + parts_at(TOGETHER)


@gluon_jit
def bytes_told(rank, R: gl.constexpr, D: gl.constexpr, TOGETHER: gl.constexpr):
    """Of all parts and what they have seen, to one program."""
    groups = ((rank + 1) * GROUPS + TOGETHER - 1) // TOGETHER - (rank * GROUPS + TOGETHER - 1) // TOGETHER
    return (groups * (D // GROUPS) + 1) * (TOGETHER * even_heads(R) * 4)


@gluon_jit
def room_for_parts(rank, R: gl.constexpr, D: gl.constexpr, TOGETHER: gl.constexpr):
    """Where a program is told the parts of all, R heads of its own columns, and a barrier that waits for their bytes.
    To be called before this program arrives in its cluster."""
    asm: gl.constexpr = room_asm(R, D, TOGETHER)
    expected = bytes_told(rank, R, D, TOGETHER)
    return gl.inline_asm_elementwise(asm, "=&r,r", [expected], gl.int32, is_pure=False, pack=1)


@gluon_jit
def anew(number):
    """The number, as if nobody had known it before: what is worked out from it stays where it is used."""
    return gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def pairs_of(x):
    """The first and the second of every two neighbors in a row."""
    return gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@gluon_jit
def tell_pairs(room, place, low, high):
    """Writes pairs of numbers into the rooms of programs of the cluster, and tells their barriers. A place has a
    program's number in its upper half and bytes in its lower one; nothing is written where it is negative (places are
    worked out all the same: numbers that only some threads have would be spilled)."""
    tell: gl.constexpr = """{ .reg .pred %p; .reg .b32 %at, %bar, %to;
        setp.ge.s32 %p, $2, 0; bfe.u32 %to, $2, 16, 4; and.b32 %at, $2, 0xffff; add.u32 %at, $1, %at;
        mapa.shared::cluster.u32 %at, %at, %to;
        mapa.shared::cluster.u32 %bar, $1, %to;
        @%p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%at], {$3, $4}, [%bar];
        mov.u32 $0, 0; }"""
    given = [place * 0 + room, place, low, high]
    gl.inline_asm_elementwise(tell, "=r,r,r,f,f", given, gl.int32, is_pure=False, pack=1)


@gluon_jit
def tell_part(room, rank, o, top, total, R: gl.constexpr, TOGETHER: gl.constexpr):
    """Tells every program of the cluster its columns of this part, o [D, heads], and what the part has seen: the
    logarithm of its sums. Sums are divided first."""
    D: gl.constexpr = o.shape[0]
    COLS: gl.constexpr = o.shape[1]
    S: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    wait_for_cluster()
    rank = anew(rank)  # places are worked out here, and not kept through a loop around this
    inverse = 1.0 / gl.where(total == 0.0, 1.0, total)
    seen = gl.where(total == 0.0, float("-inf"), top + gl.log2(total))
    all_seen = gl.expand_dims(gl.convert_layout(seen, gl.SliceLayout(0, S)), 0) + gl.zeros([16, COLS], gl.float32, S)
    low, high = pairs_of(all_seen)
    L: gl.constexpr = low.type.layout
    head = gl.expand_dims(gl.arange(0, COLS // 2, gl.SliceLayout(0, L)), 0) * 2
    to = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, L)), 1)
    place = gl.where((head < even_heads(R)) & (to < TOGETHER), to * 65536 + (SEEN_AT + rank * 64 + head * 4), -1)
    tell_pairs(room, place, low, high)
    low, high = pairs_of(o * gl.expand_dims(inverse, 0))
    K: gl.constexpr = low.type.layout
    head = gl.expand_dims(gl.arange(0, COLS // 2, gl.SliceLayout(0, K)), 0) * 2
    col = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(1, K)), 1)
    to = owner_of(col, D, TOGETHER)
    place = place_of(rank, col - first_group(to, TOGETHER) * (D // GROUPS), head, R, D, TOGETHER)
    tell_pairs(room, gl.where(head < even_heads(R), to * 65536 + place, -1), low, high)


@gluon_jit
def shared_at(place):
    """Numbers in this program's own shared memory."""
    read: gl.constexpr = "ld.shared.f32 $0, [$1];"
    return gl.inline_asm_elementwise(read, "=f,r", [place], gl.float32, is_pure=False, pack=1)


@gluon.constexpr_function
def power(x):
    return 1 << (x - 1).bit_length()


@gluon.constexpr_function
def owned_layout(cols, num_warps):
    """Columns side by side in lanes, then heads."""
    lanes = min(32, cols)
    return gl.BlockedLayout([1, 1], [lanes, 32 // lanes], [1, num_warps], [0, 1])


@gluon_jit
def join_told(room, rank, to_ptr, d, heads, R: gl.constexpr, D: gl.constexpr, TOGETHER: gl.constexpr):
    """Waits until all parts are told, joins them and writes this program's columns of ``heads`` heads (at most R)."""
    wait: gl.constexpr = """{ .reg .pred %done;
        again: mbarrier.try_wait.parity.shared::cta.b64 %done, [$1], 0;
        @!%done bra again; mov.u32 $0, $1; }"""
    room = gl.inline_asm_elementwise(wait, "=r,r", [room], gl.int32, is_pure=False, pack=1)
    MOST: gl.constexpr = most_columns(D, TOGETHER)
    EACH: gl.constexpr = MOST * even_heads(R) * 4
    L: gl.constexpr = owned_layout(power(MOST), 4)
    begins = first_group(rank, TOGETHER) * (D // GROUPS)
    num = first_group(rank + 1, TOGETHER) * (D // GROUPS) - begins
    head = gl.arange(0, power(R), gl.SliceLayout(0, L))
    col = gl.expand_dims(gl.arange(0, power(MOST), gl.SliceLayout(1, L)), 1)
    at_seen = room + SEEN_AT + gl.minimum(head, R - 1) * 4
    at = room + place_of(0, gl.minimum(col, MOST - 1), gl.expand_dims(gl.minimum(head, R - 1), 0), R, D, TOGETHER)
    top = shared_at(at_seen)
    for i in gl.static_range(1, TOGETHER):
        top = gl.maximum(top, shared_at(at_seen + i * 64))
    shift = gl.where(top == float("-inf"), 0.0, top)
    whole = gl.zeros_like(top)
    acc = gl.zeros([power(MOST), power(R)], gl.float32, L)
    for i in gl.static_range(TOGETHER):
        weight = gl.exp2(shared_at(at_seen + i * 64) - shift)
        whole += weight
        acc += shared_at(at + i * EACH) * gl.expand_dims(weight, 0)
    out = acc / gl.expand_dims(gl.where(whole == 0.0, 1.0, whole), 0)
    there = gl.expand_dims(head < heads, 0) & (col < num)
    place = gl.expand_dims(head * d, 0) + begins + col
    gl.store(to_ptr + place, out.to(to_ptr.dtype.element_ty), mask=there)
