"""The training pipeline sees what inference sees: tokens, pixels and hidden states equal transformers' own."""

from __future__ import annotations

from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from training.batches import Encoder, Limits, batches, collate
from training.conversations import clip_conversation, messages, training_conversation
from training.evaluate import frames, metadata
from training.optimizer import optimizers_for, orthogonalised
from training.packed import PackedModel
from training.scenes import draw
from training.scenes_model import save_scenes_model, scenes_config, scenes_tokenizer
from training.train import learning_rate, new_model

LIMITS = Limits(4096, 2048, 512, 64, 64)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return scenes_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    """With weights far enough from their first values that every part matters."""
    made = new_model(scenes_config(tokenizer), seed=0).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    return made


def small_conversations(pictures: int, how_many: int) -> list[Any]:
    found = []
    for seed in count():
        conversation = training_conversation(seed)
        scenes = [scene for turn in conversation.turns for scene in turn.scenes]
        if len(scenes) == pictures and sum(scene.width * scene.height for scene in scenes) < 60_000:
            found.append(conversation)
        if len(found) == how_many:
            break
    return found


def test_the_model_keeps_its_size(model: Any) -> None:
    assert sum(parameter.numel() for parameter in model.parameters()) <= 8_000_000


def test_packed_batches_hold_what_the_processor_and_the_model_compute(
    tokenizer: Any, model: Any, tmp_path: Path
) -> None:
    from transformers import AutoProcessor

    save_scenes_model(tmp_path, tokenizer, model.state_dict())
    processor = AutoProcessor.from_pretrained(tmp_path)
    conversations = small_conversations(1, 2) + small_conversations(2, 2) + small_conversations(0, 1)
    conversations += [clip_conversation(seed) for seed in range(3)]
    samples = [Encoder(tokenizer).sample(one, LIMITS.conversation_tokens) for one in conversations]
    with torch.no_grad():
        hidden = PackedModel(model, LIMITS).hidden(collate(samples, LIMITS))
    start = 0
    for conversation, sample in zip(conversations, samples, strict=True):
        whole = [*messages(conversation), {"role": "assistant", "content": conversation.turns[-1].answer}]
        pictures = [draw(scene) for turn in conversation.turns for scene in turn.scenes]
        text = processor.apply_chat_template(whole, tokenize=False)
        clip = conversation.turns[0].clip
        videos = {"videos": [frames(clip)], "video_metadata": [metadata(clip)]} if clip else {}
        sampling = {"do_sample_frames": False} if clip else {}
        inputs = processor(text=[text], images=pictures or None, **videos, **sampling, return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == sample.ids
        if sample.pictures:
            grids, values = ("video_grid_thw", "pixel_values_videos") if clip else ("image_grid_thw", "pixel_values")
            assert [[h, w] for t, h, w in inputs[grids].tolist() for _ in range(t)] == list(map(list, sample.grids))
            pixels = torch.from_numpy(np.concatenate(sample.pictures)).float() / 127.5 - 1
            # Two resampling filters round differently: by two of 255 steps at most.
            assert (pixels - inputs[values]).abs().max() <= 2.01 / 127.5
            inputs[values] = pixels
        with torch.no_grad():
            expected = model.model(**inputs).last_hidden_state[0]
        got = hidden[start : start + len(sample.ids)]
        start += len(sample.ids)
        assert torch.dist(got, expected) / expected.norm() < 1e-5


def test_labels_are_the_answers(tokenizer: Any) -> None:
    conversation = small_conversations(1, 1)[0]
    sample = Encoder(tokenizer).sample(conversation, LIMITS.conversation_tokens)
    batch = collate([sample], LIMITS)
    known = batch["labels"] >= 0
    places, labels = batch["label_places"][known], batch["labels"][known]
    assert torch.equal(batch["ids"][places + 1], labels)
    expected = "".join(turn.answer + "<|im_end|>" for turn in conversation.turns)
    assert tokenizer.decode(labels.tolist(), skip_special_tokens=False) == expected


def test_batches_fill_their_limits_and_never_pass_them(tokenizer: Any) -> None:
    made = batches(Encoder(tokenizer), iter(range(10**6)), LIMITS)
    for _ in range(3):
        batch = next(made)
        for borders, total in (("picture_borders", LIMITS.patches), ("conversation_borders", LIMITS.tokens)):
            steps = batch[borders].diff()
            assert (steps >= 0).all()
            assert int(batch[borders][-1]) == total
        assert int(batch["picture_borders"].diff().max()) <= LIMITS.picture_patches
        assert int(batch["conversation_borders"].diff().max()) <= LIMITS.conversation_tokens


def test_muon_turns_a_matrix_and_learns(tokenizer: Any) -> None:
    singular = torch.linalg.svdvals(orthogonalised(torch.randn(2, 24, 40)))
    assert (singular > 0.5).all()
    assert (singular < 1.4).all()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    x = torch.randn(64, 16)
    y = x @ torch.randn(16, 4)
    optimizers = optimizers_for(model, lr=0.05, decay=0.0)
    losses = []
    for _ in range(60):
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_the_learning_rate_rises_holds_and_falls() -> None:
    rates = [learning_rate(step, 1000, 100) for step in range(1000)]
    assert rates[0] == 0.01
    assert rates[200] == 1.0
    assert 0 <= rates[-1] < 1e-4
    assert all(later <= earlier for earlier, later in pairwise(rates[400:]))
