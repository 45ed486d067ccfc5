"""The operator's settings of a vision encoder. `schema.py` includes them in the application's settings.

This module imports only the standard library: an encoder also runs where only torch is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args, get_origin, get_type_hints

Dtype = Literal["auto", "float32", "bfloat16"]
AttentionName = Literal["auto", "sdpa", "varlen", "triton", "flash_attn", "fa4", "fa3"]

MIN_STAGING_BYTES = 1024**2
"""Each of four buffers holds at least one token of the widest towers, 131 kB in float32."""
MAX_ASPECT_RATIO = 200
"""As for all images (`encoder.images.size`), which this module does not import."""


@dataclass(frozen=True)
class EncoderConfig:
    """Settings of one vision encoder. Names follow vLLM's encoder graph settings; token budgets count merged tokens."""

    # pydantic reads this if it is installed.
    __pydantic_config__: ClassVar[dict[str, object]] = {
        "extra": "forbid",
        "allow_inf_nan": False,
        "use_attribute_docstrings": True,
    }

    implementation: Literal["auto", "vitray", "vllm", "none"] = "auto"
    """Which code encodes. "vitray": our own tower. "vllm": vLLM's processor and model class, for every other
    architecture ([models](models.md)); of the settings below, only `dtype`, `cudagraph_mm_encoder`, `packing`, the
    token budgets, the images per batch and `cache_dir` apply to it. "auto": our own tower, if there is one for the
    checkpoint. "none": no encoders; language models get the image files and run vLLM's own tower
    ([no split](tune.md#no-split)). No other setting below applies then."""
    dtype: Dtype = "auto"
    """ "auto" is the checkpoint's own dtype."""
    fused_kernels: Literal["auto"] | bool = "auto"
    """Fused kernels. "auto": on a GPU with Triton, if their error is not much larger than the eager tower's and
    neither `compile_mm_encoder` nor `attention_backend: sdpa` is set. true: an error if they cannot be used."""
    fp8: bool = False
    """GEMMs in 8 bits (e4m3), with fused kernels and dtype bfloat16, on GPUs of compute capability 9.0 (Hopper) and
    newer. At start-up the tower is compared with itself in float32 on trial images, and each image in a batch with the
    same image alone; layers that exceed the limit below stay in bfloat16, and if all would, the start fails."""
    fp8_max_error: float = 3.0
    """Largest error of an image in fp8, as a multiple of the same image's error in bfloat16, both against float32 on
    trial images; also of what an image differs by between a batch and alone. The main part and each deepstack level are
    compared separately."""
    compile_mm_encoder: bool = False
    """Run the tower's blocks through torch.compile. It has no effect with fused kernels."""
    attention_backend: AttentionName = "auto"
    """Attention backend. "auto" measures the installed ones for each class of sequence lengths. A named one that is
    missing is an error."""
    cudagraph_mm_encoder: Literal["auto"] | bool = "auto"
    """Replay CUDA graphs. "auto": on a GPU with an attention backend that reads sequence boundaries on the device.
    true: an error if they cannot be used."""
    graph_capture: Literal["startup", "on_demand", "hybrid"] = "startup"
    """When CUDA graphs are captured. "startup": all before the replica is ready. "on_demand": while the GPU is idle,
    those that save most time first. "hybrid": some at start-up, the rest on demand."""
    packing: Literal["cost", "greedy"] = "cost"
    """How images are packed into batches. "cost": by measured time, with graphs and eagerly. "greedy": in ascending
    order, as many as fit the largest budget. Without measured times, "greedy" is used."""
    encoder_cudagraph_token_budgets: Literal["auto"] | tuple[int, ...] = "auto"
    """Batch capacities in visual tokens, ascending. "auto": 37 from 64 to 8192, four per octave and eight from 512 to
    2048; without graphs 2048, 4096, 8192 and 13824. A larger image runs alone and eagerly."""
    encoder_cudagraph_max_images_per_batch: int = 32
    """Images that one batch may hold. A graph of fewer than 16 tokens per image holds fewer, but at least 16."""
    encoder_cudagraph_memory_bytes: int = 2 * 1024**3
    """Bound on the graphs' memory with their buffers; a graph beyond it is not captured. The driver's own memory for
    graphs is not included; 256 MiB of the device stay free."""
    encoder_cudagraph_verbose: bool = False
    """Log every batch: images, tokens, budget, padding."""
    staging_pinned_bytes: int = 128 * 1024**2
    """Pinned host memory for copies of images to the GPU and of embeddings back, allocated at start-up; at least
    1 MiB."""
    warm_image_sizes: tuple[tuple[int, int], ...] = ((224, 224), (448, 448), (512, 512), (1024, 768), (1024, 1024))
    """Widths and heights in pixels of common images, whose positions are computed at start-up."""
    cache_dir: str | None = None
    """Directory that outlives a replica, for compiled kernels. If unset, compilers use their own directories."""

    def __post_init__(self) -> None:
        """Validates the settings. Raises ValueError that names the value and its limit."""
        for name, hint in get_type_hints(EncoderConfig).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(get_args(hint))}")
        if self.implementation in ("vllm", "none") and (self.fp8 or self.fused_kernels is True):
            key = "fp8" if self.fp8 else "fused_kernels"
            raise ValueError(f"{key} is true, and implementation is {self.implementation!r}; only 'vitray' has it")
        for name in ("fused_kernels", "cudagraph_mm_encoder"):
            if getattr(self, name) not in ("auto", True, False):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be auto, true or false")
        for name in (
            "encoder_cudagraph_max_images_per_batch",
            "encoder_cudagraph_memory_bytes",
            "fp8_max_error",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be greater than 0")
        if self.staging_pinned_bytes < MIN_STAGING_BYTES:
            raise ValueError(
                f"staging_pinned_bytes is {self.staging_pinned_bytes}; it must be at least {MIN_STAGING_BYTES}"
            )
        if self.fp8 and (self.fused_kernels is False or (self.fused_kernels == "auto" and self.compile_mm_encoder)):
            beside = " beside compile_mm_encoder" if self.compile_mm_encoder else ""
            raise ValueError(
                f"fp8 is true, and fused_kernels is {self.fused_kernels!r}{beside}; fp8 needs fused_kernels to be true"
            )
        if self.attention_backend == "sdpa" and (self.fused_kernels is True or self.fp8):
            key = "fp8" if self.fp8 else "fused_kernels"
            raise ValueError(f"{key} is true, and attention_backend is 'sdpa'; fused kernels cannot use it")
        self._check_budgets(self.encoder_cudagraph_token_budgets)
        for size in self.warm_image_sizes:
            if len(size) != 2 or min(size) < 1:
                raise ValueError(
                    f"warm_image_sizes holds {list(size)}; it must hold pairs of a width and a height above 0"
                )
            if max(size) > MAX_ASPECT_RATIO * min(size):
                shorter = f"warm_image_sizes: the shorter side of {list(size)}"
                limit = f"1/{MAX_ASPECT_RATIO} of the longer side"
                raise ValueError(f"{shorter} is {min(size)}, less than {limit}, {max(size)}")

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
