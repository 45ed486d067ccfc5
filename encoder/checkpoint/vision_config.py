"""Configuration of a vision tower as a checkpoint's config.json states it.

It holds facts only, none of an operator's choices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Literal

Architecture = Literal["qwen2_5_vl", "qwen3_vl"]

ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen3_5": "qwen3_vl",
    "qwen3_5_moe": "qwen3_vl",
    "qwen4_exp": "qwen3_vl",
}
_IMAGE_TOKEN_IDS: Mapping[str, int] = {
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), 151655),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen4_exp"), 248056),
}
"""`image_token_id` of checkpoints that do not mention it."""
# Model types whose towers have deepstack levels if the checkpoint does not mention them.
_DEEPSTACK_BY_DEFAULT = ("qwen3_vl", "qwen3_vl_moe")


@dataclass(frozen=True)
class TowerTraits:
    """Properties of a tower that follow from its architecture alone."""

    rms_norm: bool
    """Norms are RMSNorm, else LayerNorm."""
    gated_mlp: bool
    """The MLP of a block multiplies its hidden features by an activated gate."""
    patch_bias: bool
    """The patch embedding has a bias."""
    windowed: bool
    """Most blocks use windowed attention; else there is a table of learned positions, and possibly deepstack levels."""
    merger_names: tuple[str, str, str]
    """Names of the merger's norm and of its two layers in checkpoints."""


TRAITS: Mapping[Architecture, TowerTraits] = {
    "qwen2_5_vl": TowerTraits(
        rms_norm=True, gated_mlp=True, patch_bias=False, windowed=True, merger_names=("ln_q", "mlp.0", "mlp.2")
    ),
    "qwen3_vl": TowerTraits(
        rms_norm=False,
        gated_mlp=False,
        patch_bias=True,
        windowed=False,
        merger_names=("norm", "linear_fc1", "linear_fc2"),
    ),
}
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")

# transformers omits settings from config.json that equal the defaults of its config classes.
_COMMON_DEFAULTS: Mapping[str, object] = {
    "num_heads": 16,
    "in_channels": 3,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 3584,
}
_DEFAULTS: Mapping[Architecture, Mapping[str, object]] = {
    "qwen2_5_vl": {
        **_COMMON_DEFAULTS,
        "hidden_size": 3584,
        "depth": 32,
        "intermediate_size": 3420,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": (7, 15, 23, 31),
        "hidden_act": "silu",
    },
    "qwen3_vl": {
        **_COMMON_DEFAULTS,
        "hidden_size": 1152,
        "depth": 27,
        "intermediate_size": 4304,
        "patch_size": 16,
        "deepstack_visual_indexes": (8, 16, 24),
        "num_position_embeddings": 2304,
        "hidden_act": "gelu_pytorch_tanh",
    },
}
_POSITIVE = (
    "hidden_size", "depth", "num_heads", "intermediate_size", "in_channels", "patch_size", "temporal_patch_size",
    "spatial_merge_size", "out_hidden_size",
)  # fmt: skip


class VisionConfigError(ValueError):
    """A config.json cannot be read, names an unknown architecture or contradicts itself."""


@dataclass(frozen=True)
class VisionConfig:
    """Description of a vision tower. Lengths are in pixels (`patch_size`, `window_size`) or in features.

    `window_size` is 0 and `fullatt_block_indexes` is empty for towers without windowed attention (Qwen3-VL);
    `num_position_embeddings` is 0 for towers without a table of learned positions (Qwen2.5-VL);
    `deepstack_visual_indexes` is empty for towers without deepstack levels (Qwen2.5-VL, Qwen3.5). `dtype` is the name
    of the dtype in which the checkpoint was saved, such as "bfloat16".
    """

    architecture: Architecture
    hidden_size: int
    depth: int
    num_heads: int
    intermediate_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    window_size: int
    fullatt_block_indexes: tuple[int, ...]
    deepstack_visual_indexes: tuple[int, ...]
    num_position_embeddings: int
    hidden_act: str
    dtype: str
    rope_theta: float = 10000.0

    @property
    def traits(self) -> TowerTraits:
        """Properties that follow from the architecture."""
        return TRAITS[self.architecture]

    def is_windowed(self, block: int) -> bool:
        """Whether a block, counted from 0, uses windowed attention."""
        return bool(self.window_size) and block not in self.fullatt_block_indexes

    @property
    def width(self) -> int:
        """Features of one output token: the merged output, then one part of the same size per deepstack level."""
        return self.out_hidden_size * (1 + len(self.deepstack_visual_indexes))

    @property
    def patch_dim(self) -> int:
        """Values in one flattened patch, ordered channel, time, row, column."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def merge_unit(self) -> int:
        """Patches that are merged into one token."""
        return self.spatial_merge_size**2

    @property
    def window_tokens(self) -> int:
        """Side of an attention window in tokens (after the merge); 0 without windows."""
        return self.window_size // (self.patch_size * self.spatial_merge_size)

    @property
    def window_patches(self) -> int:
        """Patches of a full-size attention window; 0 without windows."""
        return self.window_tokens**2 * self.merge_unit

    @property
    def position_side(self) -> int:
        """Side of the square table of learned positions; 0 without a table."""
        return isqrt(self.num_position_embeddings)

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise VisionConfigError(f"vision_config.{name} is {getattr(self, name)}: it must be at least 1")
        if self.hidden_size % self.num_heads:
            raise VisionConfigError(
                f"vision_config.hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
            )
        if self.head_dim % 4:
            raise VisionConfigError(
                f"the head dimension {self.head_dim} (hidden_size {self.hidden_size} over num_heads {self.num_heads}) "
                "is not a multiple of 4: rotary positions need a pair of features for rows and one for columns"
            )
        if self.hidden_act not in ACTIVATIONS:
            raise VisionConfigError(
                f"vision_config.hidden_act {self.hidden_act!r} is not supported: {', '.join(ACTIVATIONS)} are"
            )
        if self.position_side**2 != self.num_position_embeddings:
            raise VisionConfigError(
                f"vision_config.num_position_embeddings {self.num_position_embeddings} is not a square"
            )
        self._check_blocks()

    def _check_blocks(self) -> None:
        if self.traits.windowed:
            step = self.patch_size * self.spatial_merge_size
            if self.window_size < step or self.window_size % step:
                raise VisionConfigError(
                    f"vision_config.window_size {self.window_size} is not a multiple of patch_size times "
                    f"spatial_merge_size, {step}"
                )
        elif self.num_position_embeddings < 1:
            raise VisionConfigError(f"vision_config.num_position_embeddings is {self.num_position_embeddings}")
        # A full-attention index past the last block has no effect (small checkpoints keep the defaults of large ones);
        # a deepstack level past it would make the output narrower than `width`.
        if any(index < 0 for index in self.fullatt_block_indexes):
            raise VisionConfigError(f"vision_config.fullatt_block_indexes {self.fullatt_block_indexes} is negative")
        levels = self.deepstack_visual_indexes
        if len(set(levels)) != len(levels) or any(not 0 <= index < self.depth for index in levels):
            raise VisionConfigError(
                f"vision_config.deepstack_visual_indexes {list(levels)} must be different blocks of 0 to "
                f"{self.depth - 1}"
            )

    @classmethod
    def from_checkpoint(cls, path: Path) -> VisionConfig:
        """Reads `path / "config.json"`. Raises `VisionConfigError`, which names the key and its value."""
        return cls.from_dict(_read(path))

    @classmethod
    def from_dict(cls, config: Mapping[str, object]) -> VisionConfig:
        """Parses the content of a config.json. Raises `VisionConfigError`."""
        model_type = config.get("model_type")
        architecture = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
        if architecture is None:
            raise VisionConfigError(f"model_type {model_type!r} is not supported: {', '.join(ARCHITECTURES)} are")
        defaults = dict(_DEFAULTS[architecture])
        if model_type not in _DEEPSTACK_BY_DEFAULT:
            defaults["deepstack_visual_indexes"] = ()
        section = config.get("vision_config") or {}
        if not isinstance(section, dict):
            raise VisionConfigError(f"vision_config is {section!r}, not an object")
        facts = {**defaults, **{key: value for key, value in section.items() if value is not None}}
        facts["in_channels"] = _in_channels(section, facts["in_channels"])
        windowed = TRAITS[architecture].windowed
        return cls(
            architecture=architecture,
            **{name: _integer(facts, name) for name in _POSITIVE},
            window_size=_integer(facts, "window_size") if windowed else 0,
            fullatt_block_indexes=_indexes(facts, "fullatt_block_indexes") if windowed else (),
            deepstack_visual_indexes=() if windowed else _indexes(facts, "deepstack_visual_indexes"),
            num_position_embeddings=0 if windowed else _integer(facts, "num_position_embeddings"),
            hidden_act=str(facts["hidden_act"]),
            dtype=_dtype(config, section),
            rope_theta=_rope_theta(section),
        )


def has_own_tower(path: Path) -> bool:
    """Whether there is a tower for the model type of `path / "config.json"`. Raises `VisionConfigError`."""
    return _read(path).get("model_type") in ARCHITECTURES


def image_token_id(path: Path) -> int:
    """Returns the token that stands for an image in prompts, by `path / "config.json"`. Raises `VisionConfigError`."""
    config = _read(path)
    value = config.get("image_token_id")
    if value is None:
        value = _IMAGE_TOKEN_IDS.get(str(config.get("model_type")))
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise VisionConfigError(f"image_token_id is {value!r}: it must be a token")
    return value


def _read(path: Path) -> dict[str, object]:
    file = path / "config.json"
    try:
        raw: object = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise VisionConfigError(f"{path} has no config.json: it is not a checkpoint folder") from None
    except ValueError as error:
        raise VisionConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise VisionConfigError(f"{file} does not hold a JSON object")
    return raw


def _integer(facts: Mapping[str, object], key: str) -> int:
    value = facts[key]
    # Patch sizes may be lists with one value per axis; only square patches are supported.
    if isinstance(value, list | tuple) and value and all(side == value[0] for side in value):
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool):
        raise VisionConfigError(f"vision_config.{key} is {value!r}, not an integer")
    return value


def _indexes(facts: Mapping[str, object], key: str) -> tuple[int, ...]:
    value = facts[key]
    if not isinstance(value, list | tuple) or not all(isinstance(index, int) for index in value):
        raise VisionConfigError(f"vision_config.{key} is {value!r}, not a list of integers")
    return tuple(value)


def _in_channels(section: Mapping[str, object], default: object) -> object:
    """Returns the number of channels, which checkpoints name `in_channels` or `in_chans`."""
    given = [section[key] for key in ("in_channels", "in_chans") if section.get(key) is not None]
    if len(given) == 2 and given[0] != given[1]:
        raise VisionConfigError(f"vision_config.in_channels is {given[0]!r}, but in_chans is {given[1]!r}")
    return given[0] if given else default


def _dtype(config: Mapping[str, object], section: Mapping[str, object]) -> str:
    """Returns the dtype's name: `dtype`, or `torch_dtype` before transformers 5, of the whole model before a part's."""
    text = config.get("text_config")
    for part in (config, section, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            value = part.get(key)
            if isinstance(value, str) and value != "auto":
                return value.removeprefix("torch.")
    return "float32"


def _rope_theta(section: Mapping[str, object]) -> float:
    rope = section.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise VisionConfigError(f"vision_config.rope_parameters is {rope!r}, not an object")
    rope_type, theta = rope.get("rope_type", "axial"), rope.get("rope_theta", 10000.0)
    if rope_type not in ("axial", "default"):
        raise VisionConfigError(f"vision_config.rope_parameters.rope_type {rope_type!r} is not supported: axial is")
    if not isinstance(theta, int | float) or theta <= 0:
        raise VisionConfigError(f"vision_config.rope_parameters.rope_theta is {theta!r}, not a positive number")
    return float(theta)
