"""A bound on the memory that one piece of work may take in a worker process. It must not know what the work is."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class OutOfBoundError(Exception):
    """The work asked for more memory than its bound."""


@contextmanager
def memory_bound(num_bytes: int) -> Iterator[None]:
    """What runs inside may add `num_bytes` to the address space of this process; the next allocation fails.

    The whole process is bound meanwhile, so this is for processes that do one thing at a time. Linux only.

    Raises:
        OutOfBoundError: an allocation of Python's or torch's failed. Libraries may tell it in a way of their own.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bound = pages * resource.getpagesize() + num_bytes
    if hard != resource.RLIM_INFINITY:
        bound = min(bound, hard)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    try:
        yield
    except MemoryError as error:
        raise OutOfBoundError from error
    except RuntimeError as error:  # torch's allocator has no type of its own for it
        if "not enough memory" in str(error) or "can't allocate memory" in str(error):
            raise OutOfBoundError from error
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
