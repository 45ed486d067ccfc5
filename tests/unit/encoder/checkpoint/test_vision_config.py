"""Facts read from config.json: published forms, defaults, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from encoder.checkpoint.vision_config import ARCHITECTURES, VisionConfig, VisionConfigError, image_token_id

# The vision parts as published with the models.
QWEN25_7B: dict[str, object] = {
    "model_type": "qwen2_5_vl",
    "torch_dtype": "bfloat16",
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}
QWEN3_8B: dict[str, object] = {
    "model_type": "qwen3_vl",
    "text_config": {"dtype": "bfloat16"},
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4304,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


SHARED_KEYS = (
    "hidden_size",
    "depth",
    "num_heads",
    "intermediate_size",
    "in_channels",
    "patch_size",
    "temporal_patch_size",
    "spatial_merge_size",
    "out_hidden_size",
    "hidden_act",
)


def _with(config: dict[str, object], **changes: object) -> dict[str, object]:
    section = config["vision_config"]
    assert isinstance(section, dict)
    return {**config, "vision_config": {**section, **changes}}


def test_qwen2_5_vl_as_published(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN25_7B))
    config = VisionConfig.from_checkpoint(tmp_path)
    assert config.architecture == "qwen2_5_vl"
    assert (config.hidden_size, config.depth, config.num_heads, config.head_dim) == (1280, 32, 16, 80)
    assert (config.window_size, config.window_tokens) == (112, 4)
    assert config.fullatt_block_indexes == (7, 15, 23, 31)
    assert (config.deepstack_visual_indexes, config.num_position_embeddings, config.position_side) == ((), 0, 0)
    assert (config.width, config.patch_dim, config.merge_unit) == (3584, 3 * 2 * 14 * 14, 4)
    assert config.dtype == "bfloat16"


def test_qwen3_vl_as_published(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    config = VisionConfig.from_checkpoint(tmp_path)
    assert config.architecture == "qwen3_vl"
    assert config.deepstack_visual_indexes == (8, 16, 24)
    assert (config.width, config.patch_dim, config.head_dim) == (4 * 4096, 3 * 2 * 16 * 16, 72)
    assert (config.window_size, config.window_tokens, config.fullatt_block_indexes) == (0, 0, ())
    assert config.position_side == 48
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_missing_keys_take_the_defaults_of_transformers_classes(model_type: str) -> None:
    expected = CONFIG_MAPPING[model_type]().vision_config
    for given in ({"model_type": model_type}, {"model_type": model_type, "vision_config": {"patch_size": None}}):
        config = VisionConfig.from_dict(given)
        for name in SHARED_KEYS:
            assert getattr(config, name) == getattr(expected, name), name
        assert config.window_size == getattr(expected, "window_size", 0)
        assert config.num_position_embeddings == getattr(expected, "num_position_embeddings", 0)
        assert config.fullatt_block_indexes == tuple(getattr(expected, "fullatt_block_indexes", ()))
        assert config.deepstack_visual_indexes == tuple(getattr(expected, "deepstack_visual_indexes", ()))
        assert config.rope_theta == expected.rope_parameters["rope_theta"]
        assert config.dtype == "float32"


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_the_image_token_is_the_checkpoints(model_type: str, tmp_path: Path) -> None:
    """transformers leaves it out of config.json where it equals the default of its class."""
    default = CONFIG_MAPPING[model_type]().image_token_id
    for given, expected in (({}, default), ({"image_token_id": None}, default), ({"image_token_id": 7}, 7)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **given}))
        assert image_token_id(tmp_path) == expected


@pytest.mark.parametrize("config", [{"model_type": "other"}, {"model_type": "qwen3_vl", "image_token_id": "7"}])
def test_a_checkpoint_without_an_image_token_is_refused(config: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(VisionConfigError, match="image_token_id is"):
        image_token_id(tmp_path)


def test_the_mixture_of_experts_has_the_same_tower() -> None:
    assert VisionConfig.from_dict({**QWEN3_8B, "model_type": "qwen3_vl_moe"}) == VisionConfig.from_dict(QWEN3_8B)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"dtype": "auto", "torch_dtype": "float16"}, "float16"),
        ({}, "bfloat16"),
    ],
)
def test_dtype_is_the_checkpoints(keys: dict[str, str], name: str) -> None:
    assert VisionConfig.from_dict({**QWEN3_8B, **keys}).dtype == name


def test_channels_have_two_names() -> None:
    assert VisionConfig.from_dict(_with(QWEN25_7B, in_chans=4)).in_channels == 4
    assert VisionConfig.from_dict(_with(QWEN25_7B, in_chans=None, in_channels=1)).in_channels == 1
    with pytest.raises(VisionConfigError, match="in_channels is 3, but in_chans is 1"):
        VisionConfig.from_dict(_with(QWEN25_7B, in_channels=3, in_chans=1))


def test_patch_sizes_may_be_written_by_axis() -> None:
    assert VisionConfig.from_dict(_with(QWEN3_8B, patch_size=[16, 16])).patch_size == 16
    with pytest.raises(VisionConfigError, match=r"patch_size is \[16, 14\]"):
        VisionConfig.from_dict(_with(QWEN3_8B, patch_size=[16, 14]))


def test_full_attention_past_the_last_block_is_a_small_checkpoint_with_large_defaults() -> None:
    assert VisionConfig.from_dict(_with(QWEN25_7B, depth=2)).fullatt_block_indexes == (7, 15, 23, 31)


@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl", None, 3])
def test_an_unknown_model_type_is_named_with_the_known_ones(model_type: object) -> None:
    with pytest.raises(VisionConfigError) as error:
        VisionConfig.from_dict({**QWEN3_8B, "model_type": model_type})
    assert repr(model_type) in str(error.value)
    for known in ARCHITECTURES:
        assert known in str(error.value)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN25_7B, {"num_heads": 15}, "hidden_size 1280 is not a multiple of num_heads 15"),
        (QWEN25_7B, {"num_heads": 640}, "head dimension 2 "),
        (QWEN25_7B, {"window_size": 100}, "window_size 100 is not a multiple of .* 28"),
        (QWEN25_7B, {"window_size": 0}, "window_size 0"),
        (QWEN25_7B, {"depth": 0}, "depth is 0"),
        (QWEN25_7B, {"depth": "32"}, "depth is '32', not an integer"),
        (QWEN25_7B, {"depth": True}, "depth is True, not an integer"),
        (QWEN25_7B, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        (QWEN25_7B, {"fullatt_block_indexes": [-1]}, "fullatt_block_indexes"),
        (QWEN25_7B, {"fullatt_block_indexes": 7}, "fullatt_block_indexes is 7, not a list"),
        (QWEN3_8B, {"num_position_embeddings": 2305}, "2305 is not a square"),
        (QWEN3_8B, {"num_position_embeddings": 0}, "num_position_embeddings is 0"),
        (QWEN3_8B, {"deepstack_visual_indexes": [8, 27]}, r"\[8, 27\] must be different blocks of 0 to 26"),
        (QWEN3_8B, {"deepstack_visual_indexes": [8, 8]}, r"\[8, 8\] must be different blocks"),
        (QWEN3_8B, {"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported"),
        (QWEN3_8B, {"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0"),
    ],
)
def test_contradictions_are_refused(config: dict[str, object], changes: dict[str, object], message: str) -> None:
    with pytest.raises(VisionConfigError, match=message):
        VisionConfig.from_dict(_with(config, **changes))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VisionConfigError, match=r"has no config\.json"):
        VisionConfig.from_checkpoint(tmp_path)
    for text, message in (("{", "is not JSON"), ("[]", "does not hold a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(VisionConfigError, match=message):
            VisionConfig.from_checkpoint(tmp_path)
    with pytest.raises(VisionConfigError, match="vision_config is 3"):
        VisionConfig.from_dict({"model_type": "qwen3_vl", "vision_config": 3})
