"""Fingerprint of a whole checkpoint, for encoders of which only vLLM knows which tensors they use."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from encoder.checkpoint.files import CONFIG_FILE, PREPROCESSOR_FILES, CheckpointError, weight_files

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
SAMPLE_BYTES = 8192
"""Bytes read at the start and at the end of each tensor: to read a whole language model would delay each start."""


def checkpoint_fingerprint(path: Path) -> str:
    """Returns a SHA-256, 64 hex characters, of the configuration files, and of names, dtypes, shapes and samples of the
    bytes of all tensors in the folder `path`. Training changes every tensor that it trains, and so its samples.

    Raises CheckpointError if the folder has no safetensors files.
    """
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, *PREPROCESSOR_FILES, *TOKENIZER_FILES):
        data = (path / name).read_bytes() if (path / name).is_file() else b""
        digest.update(b"%s %d:" % (name.encode(), len(data)))
        digest.update(data)
    for file in sorted(weight_files(path, vision_only=False)):
        try:
            stored = np.memmap(file, np.uint8, mode="r")
            start = 8 + int.from_bytes(stored[:8].tobytes(), "little")
            digest.update(header := stored[:start].tobytes())
            for name, tensor in json.loads(header[8:]).items():
                if name != "__metadata__":
                    begin, end = tensor["data_offsets"]
                    part = stored[start + begin : start + end]
                    if len(part) != end - begin:
                        raise ValueError(f"{name} has {len(part)} of its {end - begin} bytes")
                    digest.update(part[:SAMPLE_BYTES].tobytes() + part[-SAMPLE_BYTES:].tobytes())
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} is not a complete safetensors file: {error}") from None
    return digest.hexdigest()
