"""Routing by affinity hits nearly as often as one cache of all bytes would; and the replay counts right."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import bench_affinity
from benchmarks.simulation.affinity_replay import (
    BYTES_PER_TOKEN,
    Image,
    Replay,
    Request,
    Scenario,
    distinct_bytes,
    load_of,
    one_cache,
    paced,
    read_requests,
)
from deployments.routing.affinity import Affinity, Call
from planner.traces import RULES, TraceError

RULES_QWEN3 = RULES["qwen3_vl"]
SPEED = 1000.0  # tokens a second


def image(number: int, tokens: int = 100) -> Image:
    return Image(f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}" * 4, tokens)


def scene(*requests: Request, replicas: int = 1, cache_tokens: int = 1000, ingresses: int = 1) -> Scenario:
    return Scenario(requests, replicas, cache_tokens * BYTES_PER_TOKEN, SPEED, ingresses)


def replayed(met: Scenario) -> Replay:
    replay = Replay(met, bench_affinity.affinity(met, 1.25))
    replay.run()
    return replay


def chat_like(folder: Path, *, requests: int, seed: int) -> Path:
    """Bursts of requests, 40 % of them text; a third of the images is one of the last 200; sizes are long-tailed."""
    chance, at_s, shown, lines = random.Random(seed), 0.0, list[dict[str, int]](), []
    for _ in range(requests):
        at_s += chance.expovariate(40) if chance.random() < 0.8 else chance.expovariate(2)
        images = []
        for _ in range(0 if chance.random() < 0.4 else chance.choice([1, 1, 1, 2, 3])):
            if shown and chance.random() < 0.35:
                images.append(chance.choice(shown[-200:]))
            else:
                sides = [int(min(2000, chance.lognormvariate(6.4, 0.5))) for _ in range(2)]
                images.append({"id": len(shown), "w": sides[0], "h": sides[1]})
                shown.append(images[-1])
        lines.append(json.dumps({"t": at_s, "images": images, "prompt_tokens": 9, "output_tokens": 9}))
    path = folder / "chat.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("ingresses", [1, 4])
def test_four_caches_hit_as_one_does(tmp_path: Path, ingresses: int) -> None:
    """The acceptance: at least 95 % of one cache's hit rate, with a quarter of the distinct bytes in all."""
    requests = read_requests(chat_like(tmp_path, requests=2000, seed=1), RULES_QWEN3)
    cache_bytes = distinct_bytes(requests) // 4
    requests = paced(requests, 0.1 / load_of(requests, 4, SPEED))
    met = Scenario(requests, 4, cache_bytes, SPEED, ingresses)
    measure = one_cache(requests, cache_bytes)
    assert 0.2 < measure < 0.5
    found = replayed(met).found
    assert found.hit_rate >= 0.95 * measure
    by_chance = Replay(met, lambda seed: bench_affinity.TwoChoices(met.names, seed)).run()
    assert by_chance.hit_rate < 0.95 * measure
    assert found.asked == found.cached + found.joined + found.encoded
    assert found.encoded < by_chance.encoded
    assert sum(found.by_replica.values()) == found.tokens_encoded


def test_what_was_encoded_is_found_and_what_is_under_way_is_joined() -> None:
    one, other = image(1), image(2)
    found = replayed(scene(Request(0.0, (one,)), Request(0.05, (one,)), Request(0.2, (one, other)))).found
    assert (found.encoded, found.joined, found.cached, found.asked) == (2, 1, 1, 4)
    assert found.waited_s == 0


def test_at_another_ingress_it_is_joined_at_the_replica() -> None:
    met = scene(Request(0.0, (image(1),)), Request(0.05, (image(1),)), replicas=3, ingresses=2)
    found = replayed(met).found
    assert (found.encoded, found.joined) == (1, 1)


def test_images_wait_for_each_other_at_a_replica() -> None:
    found = replayed(scene(Request(0.0, (image(1), image(2), image(3))))).found
    assert found.waited_s == pytest.approx(0.1 + 0.2)


def test_what_left_the_cache_is_encoded_again() -> None:
    requests = [Request(float(at), (image(number),)) for at, number in enumerate((1, 2, 3, 1))]
    assert replayed(scene(*requests, cache_tokens=200)).found.cached == 0
    assert replayed(scene(*requests, cache_tokens=300)).found.cached == 1
    assert one_cache(requests, 200 * BYTES_PER_TOKEN) == 0
    assert one_cache(requests, 300 * BYTES_PER_TOKEN) == 0.25


def test_an_ingress_remembers_where_it_had_to_send_an_image() -> None:
    """The image lies away from its own replica. Another ingress looks for it there and has it encoded again."""
    big = image(1, 900)
    alone = Affinity()
    alone.set_replicas(scene(replicas=2).names)
    number = next(number for number in range(3, 99) if home(alone, image(number)) == home(alone, big))
    small = image(number)
    met = scene(Request(0.0, (big, small)), Request(25.0, (small,)), replicas=2, cache_tokens=4000)
    assert replayed(met).found.cached == 1
    assert replayed(replace(met, ingresses=2)).found.cached == 0


def home(affinity: Affinity, wanted: Image) -> str:
    return affinity.candidates(Call(wanted.digest))[0]


def test_the_report_is_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = chat_like(tmp_path, requests=60, seed=2), tmp_path / "out.json"
    arguments = [str(path), "--busy", "0", "1", "--ingresses", "2", "--replicas", "3", "--out", str(out)]
    assert bench_affinity.main(arguments) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads(out.read_text())
    assert [run["ingresses"] for run in printed["runs"]] == [2, 2]
    assert printed["runs"][1]["busy"] == 1
    assert printed["cache_bytes"] == printed["distinct_bytes"] // 4


@pytest.mark.parametrize("text", ["", '{"t": 0, "images": []}', '{"t": 0}', "{", '{"t": 0, "images": [{"id": 1}]}'])
def test_a_trace_that_cannot_be_read_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"x\.jsonl"):
        read_requests(path, RULES_QWEN3)
