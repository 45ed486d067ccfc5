"""Where compiled kernels are kept, so that a new process on the same folder compiles nothing.

Compilers read their folders from the environment, most of them when they are imported: whoever starts the process sets
these. Pure Python. It must not know what is compiled.
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


def environment(state_folder: str | None) -> dict[str, str]:
    """Variables for the process of an encoder with this folder; none without a folder.

    Without them, Triton keeps its kernels in the user's home and QuACK in a temporary folder, and FlashAttention-4
    keeps none over a restart.
    """
    if state_folder is None:
        return {}
    folders = {variable: str(PurePath(state_folder) / name) for variable, name in _FOLDERS.items()}
    return {**folders, "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
