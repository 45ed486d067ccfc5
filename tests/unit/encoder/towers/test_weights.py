"""Loading: prefixes, shards, strictness, quantised and language tensors, and the identity of weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from encoder.checkpoint.files import INDEX_FILE, SINGLE_FILE, CheckpointError
from encoder.checkpoint.vision_config import VisionConfig
from encoder.towers.tower import VisionTower
from encoder.towers.weights import build_tower, load_tower, weights_identity

CPU = torch.device("cpu")

CONFIGS: dict[str, dict[str, object]] = {
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "vision_config": {
            "hidden_size": 32,
            "depth": 2,
            "num_heads": 2,
            "intermediate_size": 40,
            "out_hidden_size": 24,
        },
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "vision_config": {
            "hidden_size": 32,
            "depth": 2,
            "num_heads": 2,
            "intermediate_size": 40,
            "out_hidden_size": 24,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [1],
        },
    },
}
# Language tensors of the kinds that checkpoints hold, quantised ones among them. None may be read.
LANGUAGE: dict[str, Tensor] = {
    "lm_head.weight": torch.zeros(8, 4, dtype=torch.bfloat16),
    "model.language_model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn),
    "model.layers.0.mlp.down_proj.qweight": torch.zeros(4, 4, dtype=torch.int32),
    "model.visually_named_but_language.weight": torch.zeros(2),
}


def _vision_tensors(architecture: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every tensor of the tower, under its name inside the tower and in its stored shape."""
    config = VisionConfig.from_dict(CONFIGS[architecture])
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(parameter.shape, generator=generator).to(dtype)
        for name, parameter in build_tower(config).named_parameters()
    }
    patch = tensors["patch_embed.proj.weight"]
    kernel = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    tensors["patch_embed.proj.weight"] = patch.view(-1, *kernel)
    return tensors


def _save(
    folder: Path, architecture: str, vision: dict[str, Tensor], *, prefix: str = "model.visual.", shards: int = 0
) -> Path:
    """A checkpoint folder: one file, or vision tensors dealt out over `shards` files and language over another."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[architecture]))
    named = {prefix + name: tensor for name, tensor in vision.items()}
    if not shards:
        save_file({**named, **LANGUAGE}, folder / SINGLE_FILE)
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        part = dict(list(named.items())[shard::shards])
        save_file(part, folder / f"model-{shard}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{shard}.safetensors")
    # The language shard is in the index and not on the disk: opening it would fail.
    weight_map |= dict.fromkeys(LANGUAGE, "model-language.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _load(path: Path, dtype: torch.dtype = torch.float32) -> VisionTower:
    return load_tower(path, dtype=dtype, device=CPU)


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("prefix", ["visual.", "model.visual."])
@pytest.mark.parametrize("shards", [0, 1, 3])
def test_every_layout_gives_the_same_tower_and_identity(
    tmp_path: Path, architecture: str, prefix: str, shards: int
) -> None:
    vision = _vision_tensors(architecture)
    path = _save(tmp_path / "found", architecture, vision, prefix=prefix, shards=shards)
    tower = _load(path)
    parameters = dict(tower.named_parameters())
    assert parameters.keys() == vision.keys()
    for name, tensor in vision.items():
        assert torch.equal(parameters[name], tensor.view(parameters[name].shape)), name
        assert not parameters[name].requires_grad
    assert not tower.training
    assert not any(tensor.is_meta for tensor in tower.state_dict(keep_vars=True).values())
    assert not any(buffer.is_meta for buffer in tower.buffers())
    other = _save(tmp_path / "other", architecture, dict(reversed(vision.items())))
    assert weights_identity(path) == weights_identity(other)


def test_identity_is_that_of_the_vision_tensors(tmp_path: Path) -> None:
    vision = _vision_tensors("qwen3_vl")
    first = weights_identity(_save(tmp_path / "first", "qwen3_vl", vision))
    assert len(first) == 64
    assert int(first, 16)

    def changed(name: str, change: Callable[[Tensor], Tensor]) -> str:
        folder = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        return weights_identity(_save(folder, "qwen3_vl", vision | {name: change(vision[name])}))

    def one_bit(tensor: Tensor) -> Tensor:
        bits = tensor.clone().view(torch.int32)
        bits.view(-1)[-1] ^= 1
        return bits.view(torch.float32)

    identities = {
        first,
        changed("merger.norm.bias", one_bit),
        changed("blocks.1.attn.qkv.weight", one_bit),
        changed("blocks.1.attn.qkv.weight", lambda tensor: tensor.T.contiguous()),
        # The same bytes in another shape, and as another dtype.
        changed("blocks.1.attn.qkv.weight", lambda tensor: tensor.view(48, 64)),
        changed("blocks.1.attn.qkv.weight", lambda tensor: tensor.view(torch.int32)),
    }
    assert len(identities) == 6
    swapped = vision | {
        "merger.norm.bias": vision["merger.norm.weight"],
        "merger.norm.weight": vision["merger.norm.bias"],
    }
    assert weights_identity(_save(tmp_path / "swapped", "qwen3_vl", swapped)) not in identities


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_rounded_once_to_the_dtype_asked_for(
    tmp_path: Path, stored: torch.dtype, dtype: torch.dtype
) -> None:
    vision = _vision_tensors("qwen2_5_vl", stored)
    tower = _load(_save(tmp_path / "x", "qwen2_5_vl", vision), dtype)
    assert tower.dtype is dtype
    for name, parameter in tower.named_parameters():
        assert torch.equal(parameter, vision[name].to(dtype).view(parameter.shape)), name
    # Angles of positions need all of float32's digits in any tower.
    assert tower.rotary.frequencies.dtype is torch.float32
    exponents = torch.arange(0, 8, 2) / 8
    assert torch.allclose(tower.rotary.frequencies, 10000.0**-exponents, rtol=1e-6)


def test_only_dtypes_that_a_tower_computes_in(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype torch\.float16 is not supported"):
        _load(tmp_path, torch.float16)


def test_a_loaded_tower_does_not_lean_on_its_files(tmp_path: Path) -> None:
    """A mapped file that is replaced in place would change a running tower's weights."""
    vision = _vision_tensors("qwen3_vl")
    path = _save(tmp_path / "x", "qwen3_vl", vision)
    tower = _load(path)
    file = path / SINGLE_FILE
    with file.open("r+b") as handle:
        handle.write(b"\xff" * file.stat().st_size)
    for name, parameter in tower.named_parameters():
        assert torch.equal(parameter, vision[name].view(parameter.shape)), name


@pytest.mark.parametrize("shards", [0, 2])
def test_misfits_are_named_with_both_shapes(tmp_path: Path, shards: int) -> None:
    vision = _vision_tensors("qwen3_vl")
    del vision["blocks.1.mlp.linear_fc1.bias"]
    vision["blocks.0.attn.proj.weight"] = torch.zeros(32, 31)
    vision["patch_embed.proj.weight"] = vision["patch_embed.proj.weight"].flatten(1)
    vision["blocks.0.attn.gate.weight"] = torch.zeros(3, 5)
    path = _save(tmp_path / "x", "qwen3_vl", vision, shards=shards)
    with pytest.raises(CheckpointError) as error:
        _load(path)
    message = str(error.value)
    assert "blocks.1.mlp.linear_fc1.bias: missing, expected shape [40]" in message
    assert "model.visual.blocks.0.attn.proj.weight: misshapen, expected [32, 32], found [32, 31]" in message
    assert "patch_embed.proj.weight: misshapen, expected [32, 3, 2, 16, 16], found [32, 1536]" in message
    assert "model.visual.blocks.0.attn.gate.weight: unexpected, found with shape [3, 5]" in message


def test_a_long_list_of_misfits_is_cut(tmp_path: Path) -> None:
    path = _save(tmp_path / "x", "qwen3_vl", {"pos_embed.weight": torch.zeros(16, 32)})
    with pytest.raises(CheckpointError, match=r"blocks\.0\.[\s\S]*\n  and \d+ more$"):
        _load(path)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.int8, "I8"), (torch.uint8, "U8"), (torch.int32, "I32"), (torch.float8_e4m3fn, "F8_E4M3")],
)
def test_quantised_vision_tensors_are_refused(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    vision = _vision_tensors("qwen3_vl")
    weight = "blocks.0.mlp.linear_fc1.weight"
    quantised = vision | {weight: vision[weight].to(dtype), f"{weight}_scale": torch.ones(1)}
    path = _save(tmp_path / "x", "qwen3_vl", quantised)
    with pytest.raises(CheckpointError, match=rf"{weight} .* is quantised \(dtype {name}, shape \[40, 32\]\)"):
        _load(path)


def test_another_architectures_tower_is_not_taken(tmp_path: Path) -> None:
    path = _save(tmp_path / "x", "qwen2_5_vl", _vision_tensors("qwen3_vl"))
    with pytest.raises(CheckpointError, match=r"do not fit its config\.json \(qwen2_5_vl\)"):
        _load(path)


def test_both_prefixes_at_once_are_ambiguous(tmp_path: Path) -> None:
    vision = _vision_tensors("qwen3_vl")
    path = _save(tmp_path / "x", "qwen3_vl", vision)
    both = {prefix + name: tensor for prefix in ("visual.", "model.visual.") for name, tensor in vision.items()}
    save_file({name: tensor.clone() for name, tensor in both.items()}, path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match="occurs twice"):
        _load(path)


def test_files_that_are_not_there_or_not_whole(tmp_path: Path) -> None:
    vision = _vision_tensors("qwen3_vl")
    path = _save(tmp_path / "sharded", "qwen3_vl", vision, shards=2)
    (path / "model-1.safetensors").write_bytes((path / "model-1.safetensors").read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors is not a complete safetensors file"):
        _load(path)
    (path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-1\.safetensors"):
        _load(path)
    save_file({"model.visual.merger.norm.bias": torch.zeros(32)}, path / "model-1.safetensors")
    with pytest.raises(CheckpointError, match=r"is not in model-1\.safetensors, where .* lists it"):
        _load(path)
    (path / INDEX_FILE).unlink()
    with pytest.raises(CheckpointError, match="has neither"):
        _load(path)
    save_file(LANGUAGE, path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match="has no vision tensors"):
        _load(path)
    with pytest.raises(CheckpointError, match="has no vision tensors"):
        weights_identity(path)


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "*.safetensors", 3]
)
def test_an_index_may_not_lead_out_of_its_folder(tmp_path: Path, shard: object) -> None:
    path = _save(tmp_path / "x", "qwen3_vl", _vision_tensors("qwen3_vl"), shards=1)
    (path / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.visual.merger.norm.bias": shard}}))
    with pytest.raises(CheckpointError, match="not the name of a safetensors file"):
        _load(path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}'])
def test_a_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    path = _save(tmp_path / "x", "qwen3_vl", _vision_tensors("qwen3_vl"), shards=1)
    (path / INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json (is not JSON|has no weight_map)"):
        _load(path)
