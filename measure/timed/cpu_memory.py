"""Freed memory stays with a process of a CPU: a first touch of pages is not what is measured.

On a virtual machine a page that nothing has used yet may cost forty times as much as one that was,
and a C library gives large blocks back. Two settings of glibc, mallopt(3) and its tunables: nothing
is given back, and freed slivers are joined to their neighbours at once. Else an aligned block does
not fit where the one before it was freed, and every copy of the gradients is of fresh pages.
Elsewhere nothing happens.
"""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
TUNABLES = "GLIBC_TUNABLES"


def prepare() -> None:
    """For processes that this one starts, unless the user has set it: glibc reads it at a start."""
    os.environ.setdefault(TUNABLES, "glibc.malloc.tcache_count=0")


def keep() -> None:
    """In this process, from now on."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_ARENA_MAX, 1)
