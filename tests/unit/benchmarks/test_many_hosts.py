"""The fleet of several hosts in virtual time: what is sent between hosts, what waits, and what is counted."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulation import conversations as conversation_module
from benchmarks.simulation import many_hosts, virtual_time
from benchmarks.simulation.affinity_replay import BYTES_PER_TOKEN, Image
from benchmarks.simulation.conversations import (
    Question,
    Turn,
    conversations,
    digest_of,
    grouped_prompts,
    read_questions,
    single_images,
)
from benchmarks.simulation.host_fleet import HostFleet, Layout, Outcome, Placement, Rule
from benchmarks.simulation.host_nodes import EncoderNode, LanguageModelNode, Link, Source, Speeds
from benchmarks.simulation.many_hosts import GIB, one_cache
from deployments.routing.affinity import Call
from planner.traces import RULES, TraceError

SLOW = Speeds(tokens_per_s=1000.0, decode_s=0.0)
QUESTIONS = [Question((200, 400), 20, 50), Question((300,), 10, 20)]


@pytest.fixture(autouse=True)
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_module, "SAMPLE", 500)


def image(number: int, tokens: int = 100) -> Image:
    return Image(digest_of(number), tokens)


def played(rule: Rule, turns: list[Turn], *, cache_gib: float = 1.0, speeds: Speeds | None = None) -> Outcome:
    layout = Layout.even(2, 4, 2, 3)
    return HostFleet(layout, rule, speeds or Speeds(), cache_bytes=int(cache_gib * GIB)).run(turns)


def test_waiting_takes_no_time() -> None:
    async def main() -> float:
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(1800))
        return virtual_time.now_s()

    assert virtual_time.run(main()) == pytest.approx(3600)


def test_coroutines_that_wait_for_each_other_are_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="no timer is set"):
        virtual_time.run(main())


def test_an_encoder_caches_joins_and_encodes() -> None:
    async def main() -> list[Source]:
        encoder = EncoderNode("e", "h", 1000 * BYTES_PER_TOKEN, SLOW)
        together = await asyncio.gather(*(encoder.encode(image(1), 0) for _ in range(2)))
        assert virtual_time.now_s() == pytest.approx(0.1)
        return [source for source, _ in (*together, await encoder.encode(image(1), 0))]

    assert virtual_time.run(main()) == [Source.ENCODED, Source.JOINED, Source.CACHED]


def test_a_busy_encoder_refuses_images_with_much_work_before_them() -> None:
    """The image of a small request overtakes, so it is taken."""

    async def main() -> None:
        encoder = EncoderNode("e", "h", 10**9, SLOW)
        await encoder.encode(image(0), 0)  # the speed is known from now on
        waiting = asyncio.gather(*(encoder.encode(image(1 + n), 100 * n) for n in range(8)))
        await asyncio.sleep(0.01)
        late, small = (Call(digest_of(name), 100, cost=cost, refusable=True) for name, cost in (("a", 900), ("b", 50)))
        assert encoder.is_too_busy(late, 0.5)
        assert not encoder.is_too_busy(small, 0.5)
        assert not encoder.is_too_busy(replace(late, refusable=False), 0.5)
        assert not encoder.is_too_busy(replace(late, key=digest_of(8)), 0.5), "it is being encoded"
        await waiting
        assert not encoder.is_too_busy(late, 0.5)

    virtual_time.run(main())


def test_a_prompt_is_prefilled_up_to_the_first_missing_embedding() -> None:
    async def main() -> None:
        model = LanguageModelNode("m", "h", 0, Speeds(prefill_tokens_per_s=1000.0))
        prompt = model.add([100, 200, 10], [True, False, True])
        await asyncio.sleep(0.05)
        other = model.add([300], [True])
        await asyncio.sleep(0.15)
        assert not other.done.done(), "it waits for the first part"
        model.set_ready(prompt, 1)
        await prompt.done
        assert virtual_time.now_s() == pytest.approx(0.1 + 0.3 + 0.21)

    virtual_time.run(main())


def test_transfers_share_a_link() -> None:
    async def main() -> list[float]:
        link = Link(100.0)
        return [link.add(50), link.add(100)]

    assert virtual_time.run(main()) == pytest.approx([0.5, 1.5])


def test_replicas_are_spread_over_hosts() -> None:
    layout = Layout.even(12, 64, 32, 96)
    assert (sum(layout.encoders), sum(layout.models)) == (64, 32)
    assert set(zip(layout.encoders, layout.models, strict=True)) == {(6, 2), (5, 3)}


def test_conversations_bring_their_images_again() -> None:
    turns = conversations(QUESTIONS, seconds=100, tokens_per_s=2e4, think_s=5, shared=0.1)
    tokens = sum(turn.prompt_tokens for turn in turns) / 100
    assert tokens == pytest.approx(2e4, rel=0.2)
    by_conversation: dict[str, Turn] = {}
    for turn in turns:
        if before := by_conversation.get(turn.conversation):
            assert turn.images[: turn.num_earlier] == before.images
            assert turn.prompt_tokens > before.prompt_tokens
        else:
            assert turn.num_earlier == 0 or turn.at_s < 90
        by_conversation[turn.conversation] = turn
    assert any(len(turn.images) > 4 for turn in by_conversation.values())
    shown = Counter(one for turn in by_conversation.values() for one in turn.images)
    assert sum(count - 1 for count in shown.values()) > 0, "some are known to all users"


def test_a_trace_without_images_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"t": 0, "images": [], "prompt_tokens": 1, "output_tokens": 1}\n')
    with pytest.raises(TraceError, match=r"text\.jsonl"):
        read_questions(path, RULES["qwen3_vl"])


def test_encoders_near_the_language_model_keep_embeddings_on_their_host() -> None:
    turns = conversations(QUESTIONS, seconds=6, tokens_per_s=2e4, think_s=1)
    near, anywhere = played(Rule(), turns), played(Rule(Placement.ANYWHERE), turns)
    assert near.bytes_between <= 0.03 * (near.bytes_between + near.bytes_on_host)
    assert anywhere.bytes_between > 0.5 * anywhere.bytes_on_host
    joint, _ = one_cache(turns, 4 * GIB, 0.0)
    assert 0.7 * joint < near.hit_rate < joint
    asked = sum(len(turn.images) for turn in turns)
    assert sum(near.images.values()) == sum(anywhere.images.values()) == asked
    assert len(near.ttfts_s) == len(anywhere.ttfts_s) == len(turns)


def test_an_oracle_is_a_bound() -> None:
    turns = conversations(QUESTIONS, seconds=3, tokens_per_s=5e4, think_s=1)
    near, encoder, oracle = (
        played(Rule(placement), turns) for placement in (Placement.NEAR, Placement.ENCODER_ORACLE, Placement.ORACLE)
    )
    assert oracle.hit_rate == pytest.approx(one_cache(turns, 4 * GIB, 0.0)[0], abs=0.02)
    assert encoder.bytes_between == oracle.bytes_between == 0
    assert sum(oracle.ttfts_s) < sum(near.ttfts_s)


def test_busy_encoders_shorten_the_wait() -> None:
    turns = single_images(seconds=2, per_s=0.9 * 4 * 80, mean_tokens=1000, spread=0.6)
    today, busy, oracle = (
        played(rule, turns, speeds=Speeds(prefill_tokens_per_s=1e9))
        for rule in (Rule(), Rule(max_backlog_s=0.03), Rule(Placement.ENCODER_ORACLE))
    )
    assert busy.refusals > 0 == today.refusals
    means = [sum(found.waits_s) / len(found.waits_s) for found in (today, busy, oracle)]
    assert means[0] > means[1] > means[2]
    assert {len(found.waits_s) for found in (today, busy, oracle)} == {len(turns)}, "each image is encoded once"


def test_the_prefix_cache_spares_images_and_prefill() -> None:
    turns = grouped_prompts(seconds=10, per_s=5, images=3, image_tokens=900, groups=4)
    layout, speeds = Layout.even(1, 2, 2, 1), Speeds()
    runs = [
        HostFleet(layout, Rule(), speeds, cache_bytes=GIB, prefix_tokens=tokens).run(turns) for tokens in (0, 10**6)
    ]
    assert [sum(run.images.values()) for run in runs] == 2 * [3 * len(turns)]
    spared = [run.images[Source.PREFIX] for run in runs]
    assert spared[0] == 0
    assert spared[1] >= 3 * (len(turns) - 4 * 2)
    assert sum(runs[1].ttfts_s) < 0.2 * sum(runs[0].ttfts_s)


def chat(folder: Path) -> Path:
    chance = random.Random(0)
    lines = []
    for number in range(50):
        images = [{"id": number, "w": chance.randrange(200, 900), "h": 600}]
        lines.append(json.dumps({"t": number, "images": images, "prompt_tokens": 9, "output_tokens": 9}))
    path = folder / "chat.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


SMALL = ["--hosts", "2", "--encoders", "2", "--models", "2", "--ingresses", "2", "--seconds", "2"]


@pytest.mark.parametrize(
    ("experiment", "runs"),
    [
        (["locality", "TRACE", "--cache-gib", "1", "4", "--think-s", "1", "--utilization", "0.2"], 2),
        (["locality", "TRACE", "--cache-gib", "1", "--encoders-alike", "--rules", "near", "--think-s", "1"], 1),
        (["busy", "--utilization", "0.5", "--max-backlog-ms", "20", "--floor", "2"], 1),
        (["busy", "TRACE", "--utilization", "0.2", "--max-backlog-ms", "20", "--floor", "2", "--think-s", "1"], 1),
        (["knee", "--rates", "0.5", "--groups", "5"], 2),
    ],
)
def test_the_report_is_the_last_line(
    experiment: list[str], runs: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    words = [str(chat(tmp_path)) if word == "TRACE" else word for word in experiment]
    assert many_hosts.main([*words, *SMALL, "--out", str(out)]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads(out.read_text())
    assert len(printed["runs"]) == runs
    for run in printed["runs"]:
        for row in run["rules"].values():
            assert row["ttft_ms"]["p99"] > 0
