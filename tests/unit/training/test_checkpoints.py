"""The random checkpoints: whole, equal from run to run, loaded by transformers; the picture decides the answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw

from tests.programs import output_of
from training import checkpoints
from training.architectures import ARCHITECTURES
from training.checkpoints import make_checkpoint

# A hundred times what the serving tests allow in float32, and five times what they allow in bf16.
LOGPROB_SHIFT = 0.1


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("checkpoints") / request.param)


def picture(colour: str, shape_colour: str, size: tuple[int, int] = (130, 90)) -> Image.Image:
    image = Image.new("RGB", size, colour)
    ImageDraw.Draw(image).ellipse((20, 20, 60, 60), fill=shape_colour)
    return image


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def load(checkpoint: Path) -> tuple[Any, Any, Any]:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model, report = AutoModelForImageTextToText.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    return model.eval(), AutoProcessor.from_pretrained(checkpoint), report


def ask(processor: Any, images: list[Image.Image], text: str = "What is in this picture?") -> Any:
    parts: list[dict[str, Any]] = [{"type": "image"} for _ in images]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return processor(text=[prompt], images=images or None, return_tensors="pt")


def test_the_same_seed_gives_the_same_bytes_in_another_process(checkpoint: Path, tmp_path: Path) -> None:
    """With another hash seed, since a tokenizer's training could follow the order of a hash table."""
    again = tmp_path / "again"
    command = [sys.executable, "-m", "training.checkpoints", "--arch", checkpoint.name, "--out", str(again)]
    assert output_of(command, PYTHONHASHSEED="7").strip() == str(again)
    assert contents(again) == contents(checkpoint)


def test_another_seed_gives_other_weights(checkpoint: Path, tmp_path: Path) -> None:
    other = make_checkpoint(checkpoint.name, tmp_path / "other", seed=1)
    assert contents(other)["model.safetensors"] != contents(checkpoint)["model.safetensors"]
    assert contents(other)["tokenizer.json"] == contents(checkpoint)["tokenizer.json"]


def test_a_checkpoint_that_is_there_is_kept_and_one_of_another_recipe_is_replaced(tmp_path: Path) -> None:
    out = make_checkpoint("qwen3_vl", tmp_path / "c")
    first = (out / "model.safetensors").stat()
    make_checkpoint("qwen3_vl", out)
    assert (out / "model.safetensors").stat().st_ino == first.st_ino
    make_checkpoint("qwen3_vl", out, dtype="bfloat16")
    assert (out / "model.safetensors").stat().st_size < 0.6 * first.st_size
    assert json.loads((out / "config.json").read_text())["text_config"]["dtype"] == "bfloat16"
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_the_command_line(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "small"
    assert checkpoints.main(["--arch", "qwen3_vl", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    with pytest.raises(SystemExit, match="2"):
        checkpoints.main(["--arch", "llava", "--out", str(out)])


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError):
        make_checkpoint("qwen3_vl", tmp_path)
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="qwen2_5_vl, qwen3_vl"):
        make_checkpoint("qwen4", tmp_path / "c")
    with pytest.raises(ValueError, match="float32, bfloat16"):
        make_checkpoint("qwen3_vl", tmp_path / "c", dtype="fp8")
    assert not list(tmp_path.iterdir())


def test_transformers_finds_every_tensor_and_no_other(checkpoint: Path) -> None:
    _, processor, report = load(checkpoint)
    assert not any(report.values()), report
    assert processor.image_token_id == processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")


def test_the_answer_depends_on_the_picture(checkpoint: Path) -> None:
    model, processor, _ = load(checkpoint)

    def first_token(images: list[Image.Image]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(**ask(processor, images)).logits
        return logits[0, -1].log_softmax(-1)

    base = first_token([picture("white", "red")])
    chosen = int(base.argmax())
    for other in ([picture("white", "blue")], [picture("navy", "yellow", (64, 64))], [picture("white", "red")] * 2, []):
        assert abs(float(first_token(other)[chosen] - base[chosen])) > LOGPROB_SHIFT


def test_generation_runs_to_its_limit_or_its_end(checkpoint: Path) -> None:
    model, processor, _ = load(checkpoint)
    inputs = ask(processor, [picture("white", "red"), picture("black", "green", (300, 50))])
    tokens = model.generate(**inputs, max_new_tokens=8)[0, inputs["input_ids"].shape[1] :]
    assert len(tokens) == 8 or int(tokens[-1]) in model.generation_config.eos_token_id


def test_the_tokenizer_gives_any_text_back(checkpoint: Path) -> None:
    _, processor, _ = load(checkpoint)
    for text in ("How many red circles?", "Grüße, 你好 👋\n\ttabs  and   blanks", "<tool_call>\n{}\n</tool_call>"):
        ids = processor.tokenizer(text)["input_ids"]
        assert processor.tokenizer.decode(ids, skip_special_tokens=True) == text
        assert max(ids) < len(processor.tokenizer) == 512


def test_the_chat_template_writes_turns_pictures_and_tools(checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    call = {"type": "function", "function": {"name": "clock", "arguments": {"city": "Oslo"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What time is it there?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "noon"},
        {"role": "tool", "content": [{"type": "text", "text": "one"}]},
        {"role": "assistant", "content": "Noon."},
        {"role": "user", "content": "Thanks."},
    ]
    written = '<tool_call>\n{"name": "clock", "arguments": {"city": "Oslo"}}\n</tool_call>'
    turns = (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What time is it there?<|im_end|>\n"
        f"<|im_start|>assistant\n{written}\n{written}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nnoon\n</tool_response>\n<tool_response>\none\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nNoon.<|im_end|>\n<|im_start|>user\nThanks.<|im_end|>\n"
    )
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == system + turns
    ends = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ends == system + turns + "<|im_start|>assistant\n"
    own = [{"role": "system", "content": "Be brief."}, *messages]
    assert (
        tokenizer.apply_chat_template(own, tokenize=False)
        == system.replace("You are a helpful assistant.", "Be brief.") + turns
    )
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
    with_tools = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
    assert json.dumps(tool) in with_tools
    assert with_tools.endswith(turns)
    assert with_tools.startswith("<|im_start|>system\nYou are a helpful assistant.\n\n# Tools\n")
