"""transformers' tower with a copy of our random weights: a peer, and in float32 the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.ladder.towers import ARCHITECTURES, SECTIONS, TINY_SECTIONS
from deployments.vllm import import_shim
from encoder.metadata.geometry import Grid
from encoder.towers.tower import VisionTower


def make_tower(arch: str, ours: VisionTower, *, tiny: bool, dtype: torch.dtype) -> nn.Module:
    """Returns transformers' module in evaluation mode on our tower's device, with SDPA attention. Raises
    ImportError."""
    import_shim.activate()
    section = dict((TINY_SECTIONS if tiny else SECTIONS)[arch])
    if ARCHITECTURES[arch] == "qwen3_vl":
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig as Config
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel as Model
    else:
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig as Config
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel as Model
    config = Config(**section)
    config._attn_implementation = "sdpa"
    with torch.device(ours.device):
        theirs: nn.Module = Model(config)
    weights = ours.state_dict()
    own = theirs.state_dict()
    theirs.load_state_dict({name: weights[name].view(own[name].shape) for name in own}, strict=True)
    if unused := set(weights) - set(own):
        raise RuntimeError(f"transformers' tower has no {sorted(unused)[:4]}: the two are not the same function")
    # Converts parameters only: rotary frequencies stay in float32, as when transformers loads a checkpoint.
    for parameter in theirs.parameters():
        parameter.data = parameter.data.to(dtype)
    return theirs.eval().requires_grad_(False)


@torch.inference_mode()
def run_tower(tower: nn.Module, patches: Tensor, grids: Sequence[Grid], merge_unit: int) -> list[Tensor]:
    """Returns `[num_tokens, width]` for each image, output and deepstack levels concatenated, in the tower's dtype."""
    grid_thw = torch.tensor(list(grids), device=patches.device)
    out = tower(patches, grid_thw=grid_thw)
    levels = [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
    whole = torch.cat(levels, dim=-1) if len(levels) > 1 else levels[0]
    return list(whole.split([t * h * w // merge_unit for t, h, w in grids]))


def reference(tower: nn.Module, patches: Tensor, grids: Sequence[Grid], merge_unit: int) -> list[Tensor]:
    """Runs `run_tower` image by image, so that attention over a whole batch need not fit into memory."""
    found: list[Tensor] = []
    for rows, grid in zip(patches.split([t * h * w for t, h, w in grids]), grids, strict=True):
        found += run_tower(tower, rows.float(), [grid], merge_unit)
    return found
