"""Memory limit for one task in a worker process."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class MemoryLimitError(Exception):
    """The task tried to allocate more memory than its limit."""


@contextmanager
def limit_memory(num_bytes: int) -> Iterator[None]:
    """Limits the growth of this process's address space within the context to `num_bytes`.

    Allocations beyond the limit fail. The limit holds for the whole process, so the process must run one task at a
    time. Linux only.

    Raises:
        MemoryLimitError: an allocation by Python or torch failed. Other libraries may raise their own errors.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    except MemoryError as error:
        raise MemoryLimitError from error
    except RuntimeError as error:  # torch's CPU allocator raises no more specific type
        if "not enough memory" in str(error) or "can't allocate memory" in str(error):
            raise MemoryLimitError from error
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
