"""How one vision encoder computes: the operator's switches, checked by arithmetic and by the standard library alone.

An encoder runs where only torch is installed, so this needs nothing else; `schema.py` puts it into the application's
settings. It must not know what a device can do: "auto" is resolved where the device is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

Dtype = Literal["auto", "float32", "bfloat16"]
AttentionName = Literal["auto", "sdpa", "varlen", "triton", "flash_attn", "fa4", "fa3"]
Capture = Literal["eager", "lazy", "hybrid"]
Packing = Literal["cost", "greedy"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": get_args(Dtype),
    "attention_backend": get_args(AttentionName),
    "capture": get_args(Capture),
    "packing": get_args(Packing),
}


@dataclass(frozen=True)
class EncoderConfig:
    """How one vision encoder computes. Names follow vLLM's encoder graph settings; budgets count merged tokens."""

    # Read by pydantic where it is installed.
    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "allow_inf_nan": False}

    dtype: Dtype = "auto"
    """ "auto" is the checkpoint's own dtype."""
    fusion: Literal["auto"] | bool = "auto"
    """Fused kernels. "auto": where the device is a GPU, Triton is there and the result equals the plain tower's, unless
    `compile_mm_encoder` is set; true fails where they cannot be had."""
    fp8: bool = False
    """Matrix products of large batches in 8 bits (e4m3): beside fused kernels, with dtype bfloat16, on GPUs of compute
    capability 9.0 (Hopper) and newer. At the start the tower is compared with itself in bfloat16 on trial images: parts
    that move the embeddings past the next two limits stay in bfloat16, and where all do, this is an error."""
    fp8_min_token_cosine: float = 0.99
    """Lowest cosine that a token's embedding may have with that in bfloat16; the main part and each deepstack level
    count apart."""
    fp8_min_image_cosine: float = 0.999
    """The same for an image's embeddings as a whole."""
    compile_mm_encoder: bool = False
    """Run the tower's blocks through torch.compile. Of no effect beside fused kernels."""
    attention_backend: AttentionName = "auto"
    """ "auto" measures what is installed, for each class of lengths; one that is named and missing is an error."""
    cudagraph_mm_encoder: Literal["auto"] | bool = "auto"
    """Replay CUDA graphs. "auto": where the device is a GPU and attention reads its borders there; true fails where
    they cannot be had."""
    capture: Capture = "eager"
    """When graphs are captured. "eager": all at the start. "lazy": the most wanted ones in idle moments. "hybrid": some
    at the start, the others and those that the traffic asks for in idle moments."""
    packing: Packing = "cost"
    """Which images run together. "cost": by measured time, graph or not; "greedy": ascending, as many as fit the
    largest budget. Without measured times it is "greedy" either way."""
    encoder_cudagraph_token_budgets: Literal["auto"] | tuple[int, ...] = "auto"
    """Batch capacities in merged tokens, ascending. "auto": 29 from 64 to 8192, four an octave; without
    graphs 2048, 4096, 8192, 13824. An image over the largest runs alone, without a graph."""
    encoder_cudagraph_max_images_per_batch: int = 16
    """Images that one batch may hold."""
    encoder_cudagraph_memory_bytes: int = 2 * 1024**3
    """Bound of the graphs' memory, buffers included; a graph that would pass it is not captured."""
    encoder_cudagraph_verbose: bool = False
    """Log every batch: images, tokens, budget, padding."""
    staging_pinned_bytes: int = 128 * 1024**2
    """Pinned host memory through which images go to the GPU and embeddings come back, taken at the start."""
    warm_grids: tuple[tuple[int, int], ...] = ((224, 224), (448, 448), (512, 512), (1024, 768), (1024, 1024))
    """Widths and heights in pixels of common images, whose positions are computed at the start."""
    state_folder: str | None = None
    """Folder that outlives a replica, for compiled kernels and for what the traffic asks for. Unset: compilers use
    their own folders, and nothing is learnt over a restart."""

    def __post_init__(self) -> None:
        """Raises `ValueError`, naming the value and its limit."""
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        for name in ("fusion", "cudagraph_mm_encoder"):
            if getattr(self, name) not in ("auto", True, False):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be auto, true or false")
        for name in (
            "encoder_cudagraph_max_images_per_batch",
            "encoder_cudagraph_memory_bytes",
            "staging_pinned_bytes",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be greater than 0")
        if self.fp8 and (self.fusion is False or (self.fusion == "auto" and self.compile_mm_encoder)):
            beside = " beside compile_mm_encoder" if self.compile_mm_encoder else ""
            raise ValueError(f"fp8 is true, and fusion is {self.fusion!r}{beside}; 8 bits need fusion to be true")
        for name in ("fp8_min_token_cosine", "fp8_min_image_cosine"):
            if not -1 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a cosine lies between -1 and 1")
        self._check_budgets(self.encoder_cudagraph_token_budgets)
        for size in self.warm_grids:
            if len(size) != 2 or min(size) < 1:
                raise ValueError(f"warm_grids holds {list(size)}; it must hold pairs of a width and a height above 0")

    def _check_budgets(self, budgets: str | tuple[int, ...]) -> None:
        name = "encoder_cudagraph_token_budgets"
        if isinstance(budgets, str):
            if budgets != "auto":
                raise ValueError(f"{name} is {budgets!r}; it must be auto or a list of tokens")
            return
        if not budgets:
            raise ValueError(f"{name} is empty: give at least one budget in tokens")
        if min(budgets) < 1:
            raise ValueError(f"{name} holds {min(budgets)}; a budget must be greater than 0")
        if list(budgets) != sorted(set(budgets)):
            raise ValueError(f"{name} must ascend without repeats, got {list(budgets)}")
        object.__setattr__(self, name, tuple(budgets))
