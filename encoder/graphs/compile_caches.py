"""Environment variables that put compilers' kernel caches into one folder, so that a new process compiles nothing.

Most compilers read them at import, so the parent process must set them. Pure Python.
"""

from __future__ import annotations

from pathlib import PurePath

_FOLDERS = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "QUACK_CACHE_DIR": "quack",
    "CUTE_DSL_CACHE_DIR": "cute-dsl",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash-attention-4",
}


def environment(cache_dir: str | None) -> dict[str, str]:
    """Returns the variables for an encoder process that caches kernels in `cache_dir`; none if that is None.

    By default, Triton caches kernels in the user's home and QuACK in a temporary folder, and FlashAttention-4 loses
    its kernels at a restart.
    """
    if cache_dir is None:
        return {}
    folders = {variable: str(PurePath(cache_dir) / name) for variable, name in _FOLDERS.items()}
    return {**folders, "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
