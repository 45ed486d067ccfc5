"""The vision encoder as a library: `Encoder.from_checkpoint(path).encode(images)`.

Names are resolved on first use, so that the ingress can import `encoder.images.size` and `encoder.images.identity`
without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.encoder_config import EncoderConfig
    from encoder.encoder import Embedding, Encoder

__all__ = ["Embedding", "Encoder", "EncoderConfig"]


def __getattr__(name: str) -> object:
    if name == "EncoderConfig":
        from configs.encoder_config import EncoderConfig

        return EncoderConfig
    if name in ("Embedding", "Encoder"):
        from encoder import encoder

        return getattr(encoder, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
