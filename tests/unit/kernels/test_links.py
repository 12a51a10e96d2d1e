"""Parts told through the shared memory of a cluster, rehearsed: everything has a place, and everybody its bytes."""

import pytest

pytest.importorskip("triton")

from ridgeline.kernels.paged_attention import links

SIZES = [(d, r, c) for d in (64, 128, 256) for r in (1, 3, 4, 8, 16) for c in range(2, 17)]


def plain(function, *args):
    """What a device function makes of numbers."""
    found = function.fn(*args)
    return int(getattr(found, "value", found))


def rooms(d, r, c):
    """What lies where when everybody has told everything: by room, by byte."""
    found = [{} for _ in range(c)]
    for rank in range(c):
        for head in range(links.even_heads(r)):
            for to in range(c):
                assert found[to].setdefault(64 + rank * 64 + head * 4, (rank, head)) == (rank, head)
            for col in range(d):
                to = plain(links.owner_of, col, d, c)
                within = col - plain(links.first_group, to, c) * (d // 16)
                at = plain(links.place_of, rank, within, head, r, d, c)
                assert found[to].setdefault(at, (rank, col, head)) == (rank, col, head), "one number a place"
    return found


@pytest.mark.parametrize(("d", "r", "c"), [(64, 3, 2), (64, 4, 3), (64, 8, 5), (64, 1, 16), (128, 4, 11), (64, 16, 7)])
def test_every_number_has_a_place_of_its_own_and_every_barrier_waits_for_all_of_them(d, r, c):
    written = set()
    for rank, room in enumerate(rooms(d, r, c)):
        assert 4 * len(room) == plain(links.bytes_told, rank, r, d, c)
        assert max(room) + 4 <= links.room_bytes(r, d, c) < 65536, "places are told in sixteen bits"
        begins, ends = (plain(links.first_group, one, c) * (d // 16) for one in (rank, rank + 1))
        assert 0 < ends - begins <= links.most_columns(d, c)
        for col in range(begins, ends):
            for head in range(r):
                written.add((col, head))
                for i in range(c):
                    at = plain(links.place_of, 0, col - begins, head, r, d, c)
                    assert room[at + i * links.most_columns(d, c) * links.even_heads(r) * 4] == (i, col, head)
    assert len(written) == d * r, "somebody writes every column of every head"


def test_rooms_leave_what_is_behind_them_aligned():
    assert all(links.room_bytes(r, d, c) % 1024 == 0 for d, r, c in SIZES)
