"""What is captured next, what is learnt from traffic, the memory bound, and what outlives a restart."""

from __future__ import annotations

import dataclasses
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.encoder_config import EncoderConfig
from encoder.checkpoint.vision_config import VisionConfig
from encoder.graphs.buffers import GraphKey
from encoder.graphs.capture import GraphCapturer
from encoder.graphs.capture_policy import MemoryModel, RunTimes, best_tight, best_whole
from encoder.graphs.captured import EncoderGraphs
from encoder.graphs.traffic_histogram import TrafficHistogram
from encoder.metadata.device_tables import GridTables
from encoder.packing.costs import EAGER_MARGIN, Costs, isotonic_fit
from encoder.packing.run_counts import RunCounts
from encoder.towers.weights import build_tower
from tests.unit.encoder.graphs.fake_graphs import BYTES_PER_TOKEN, FakeGraphs, forward_of

CPU = torch.device("cpu")
VISION = dataclasses.replace(
    VisionConfig.from_dict({"model_type": "qwen3_vl"}), hidden_size=16, num_heads=1, depth=1, intermediate_size=16,
    out_hidden_size=8, deepstack_visual_indexes=(),
)  # fmt: skip
PRICES = RunTimes(eager=lambda tokens: 5 + tokens / 1000, replay=lambda budget: 1 + budget / 1000)
CONFIG = EncoderConfig(
    graph_capture="on_demand",
    encoder_cudagraph_token_budgets=(64, 128, 256, 512),
    encoder_cudagraph_max_images_per_batch=16,
)


def keys(*budgets: int) -> list[GraphKey]:
    return [GraphKey(budget, 4 * budget) for budget in budgets]


def wanted_of(*batches: tuple[int, int, int]) -> TrafficHistogram:
    wanted = TrafficHistogram()
    for tokens, longest, number in batches:
        wanted.add(tokens, longest, number)
    return wanted


def made(
    config: EncoderConfig = CONFIG,
    lengths: tuple[int, ...] = (),
    start: bool = True,
) -> tuple[GraphCapturer, FakeGraphs, RunCounts]:
    forward, tally = forward_of(build_tower(VISION)), RunCounts()
    assert config.encoder_cudagraph_token_budgets != "auto"
    largest = max(config.encoder_cudagraph_token_budgets)
    graphs = FakeGraphs(forward, GridTables(VISION, CPU, 2**18), largest, 16)
    capturing = GraphCapturer(
        cast(EncoderGraphs, graphs), config, VISION, tally,
        activation_bytes=1000, length_classes=lengths, clock=lambda: 0.0,
    )  # fmt: skip
    if start:
        capturing.start()
    return capturing, graphs, tally


def test_the_graph_that_saves_most_is_next() -> None:
    wanted = wanted_of((60, 240, 10), (500, 2000, 3))
    assert best_whole(wanted, [], keys(512, 256, 64), PRICES) == keys(512)[0], "it serves both"
    assert best_whole(wanted, keys(512), keys(256, 64), PRICES) == keys(64)[0]
    assert best_whole(wanted, keys(512, 64), keys(256, 128), PRICES) is None
    assert best_whole(TrafficHistogram(), [], keys(512), PRICES) is None


@pytest.mark.parametrize("tokens", [49, 98, 1025])
def test_batches_that_fill_a_budget_count_for_it(tokens: int) -> None:
    """98 are two images of 224²."""
    wanted = wanted_of((tokens, 196, 1000))
    assert best_whole(wanted, [], keys(tokens), PRICES) == keys(tokens)[0]
    assert best_tight(wanted, keys(tokens), [GraphKey(tokens, 196)]) == GraphKey(tokens, 196)
    assert best_whole(wanted, [], keys(tokens - 1, 2 * tokens), PRICES) == keys(2 * tokens)[0]
    assert best_tight(wanted, keys(tokens - 1), [GraphKey(tokens - 1, 196)]) is None


def test_a_graph_slower_than_eager_is_not_captured() -> None:
    slow = RunTimes(eager=lambda tokens: 1.0, replay=lambda budget: 2.0)
    assert best_whole(wanted_of((60, 240, 1000)), [], keys(64), slow) is None


def test_a_graph_of_short_images_stands_beside_one_of_its_budget() -> None:
    wanted = wanted_of((200, 144, 5), (200, 800, 50), (60, 144, 9))
    tight = [GraphKey(256, 256), GraphKey(64, 144)]
    assert best_tight(wanted, keys(256, 64), tight) == GraphKey(64, 144)
    assert best_tight(wanted, keys(256), tight) == GraphKey(256, 256), "the smaller ones run there too"
    assert best_tight(wanted, keys(512), tight) is None
    assert best_tight(wanted_of((200, 800, 50)), keys(256), tight) is None


def test_memory_is_estimated_from_what_was_measured() -> None:
    memory = MemoryModel(1000)
    assert memory.estimate(100, 1) == pytest.approx(110_000 + 16 * 2**20)
    memory.add(100, 50_000, 1)
    assert memory.estimate(100, 1) == 16 * 2**20
    assert memory.estimate(200, 1) == pytest.approx(500 * 200 * 1.1 + 16 * 2**20)
    memory.add(50, 32 * 2**20, 1)
    assert memory.estimate(60, 1) == 32 * 2**20
    assert memory.pool_bytes == 50_000 + 32 * 2**20


def test_a_new_pool_has_no_memory_to_reuse() -> None:
    memory = MemoryModel(1000)
    memory.add(100, 50_000, 1)
    assert memory.estimate(60, 2) == pytest.approx(66_000 + 16 * 2**20)
    memory.add(60, 30_000, 2)
    assert memory.estimate(60, 2) == 16 * 2**20
    assert memory.estimate(120, 2) == pytest.approx(500 * 120 * 1.1 + 16 * 2**20)
    assert memory.pool_bytes == 80_000, "graphs of the first pool remain"


def test_lazy_captures_what_is_wanted_and_nothing_else() -> None:
    capturing, graphs, tally = made()
    assert graphs.captured == {}
    assert not capturing.step()
    capturing.wanted.add(60, 240, 10)
    assert capturing.step()
    assert list(graphs.captured) == keys(64)
    assert capturing.step(), "all times once more, under load"
    assert graphs.sweeps == 1
    assert not capturing.step()
    capturing.wanted.add(500, 2000, 10)
    assert capturing.step()
    assert set(graphs.captured) == set(keys(64, 512))
    assert capturing.step()
    assert graphs.sweeps == 2
    assert not capturing.step()
    assert tally.captures == 2
    table = capturing.costs.table()
    assert table is not None
    assert table.budgets == (64, 512)


def test_it_looks_again_when_the_traffic_has_grown_or_was_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking through a long histogram takes milliseconds, which no request may wait for again and again."""
    capturing, _, _ = made()
    capturing.wanted.add(60, 240, 100)
    while capturing.step():
        pass
    looks: list[int] = []
    monkeypatch.setattr(capturing, "_next", lambda: looks.append(capturing.wanted.total))
    for number in (9, 1, 1, 9, 1, 1):
        capturing.wanted.add(60, 240, number)
        capturing.step()
    assert looks == [111]
    capturing.wanted.total = 60
    capturing.step()
    assert looks == [111, 60]


def test_short_images_get_graphs_of_their_own_last() -> None:
    capturing, graphs, _ = made(lengths=(256,))
    capturing.wanted.add(250, 196, 50)
    while capturing.step():
        pass
    assert list(graphs.captured) == [GraphKey(256, 1024), GraphKey(256, 256)]


@pytest.mark.parametrize(
    ("graph_capture", "expected"), [("startup", (512, 256, 128, 64)), ("hybrid", (512, 64)), ("on_demand", ())]
)
def test_what_is_captured_at_the_start(graph_capture: str, expected: tuple[int, ...]) -> None:
    _, graphs, _ = made(dataclasses.replace(CONFIG, graph_capture=graph_capture))  # type: ignore[arg-type]
    assert list(graphs.captured) == keys(*expected), "the largest first"


def test_times_under_load_are_what_is_chosen_by() -> None:
    """Alone, a short run sees a faster clock than a long one: all are timed again without a pause between them."""
    capturing, graphs, _ = made(dataclasses.replace(CONFIG, graph_capture="startup"))
    before = capturing.costs.table()
    graphs.slower = 2.0
    capturing._time_under_load()
    after = capturing.costs.table()
    assert before is not None
    assert after is not None
    assert after.replay_ms == tuple((budget, 2 * ms) for budget, ms in before.replay_ms)
    assert after.eager_ms == tuple((tokens, 2 * ms) for tokens, ms in before.eager_ms)
    # An eager run takes at least what it took with its launches.
    graphs.slower = 0.5
    capturing._time_under_load()
    last = capturing.costs.table()
    assert last is not None
    assert last.eager_ms == before.eager_ms


def test_eager_captures_nothing_later() -> None:
    capturing, _, tally = made(dataclasses.replace(CONFIG, graph_capture="startup"))
    capturing.wanted.add(300, 1200, 500)
    assert not capturing.step()
    assert tally.captures == 4


def test_the_memory_bound_is_checked_before_a_capture() -> None:
    capturing, graphs, _ = made()
    shared = graphs.buffer_bytes
    bound = shared + 40 * 2**20
    capturing, graphs, tally = made(
        dataclasses.replace(CONFIG, graph_capture="startup", encoder_cudagraph_memory_bytes=shared + 1)
    )
    assert (graphs.captured, tally.captures) == ({}, 0)
    assert capturing.used_bytes == shared
    capturing, graphs, _ = made(
        dataclasses.replace(CONFIG, graph_capture="startup", encoder_cudagraph_memory_bytes=bound)
    )
    assert set(graphs.captured) == set(keys(64, 128, 256, 512))
    assert capturing.used_bytes == shared + 512 * BYTES_PER_TOKEN <= bound


def test_an_aborted_capture_lets_no_later_one_exceed_the_bound() -> None:
    """Its pool is replaced by an empty one; the next graph was estimated as if it reused the memory of the first."""
    _, graphs, _ = made()
    bound = graphs.buffer_bytes + 512 * BYTES_PER_TOKEN + 16 * 2**20 + 100_000
    capturing, graphs, _ = made(
        dataclasses.replace(CONFIG, graph_capture="startup", encoder_cudagraph_memory_bytes=bound), start=False
    )
    capturing._memory.add(512, 512 * BYTES_PER_TOKEN, graphs.pool)
    graphs.pool = 2
    capturing.start()
    assert set(graphs.captured) == set(keys(64)), "what fits beside all memory of the first pool"


def test_a_full_device_is_not_filled_further() -> None:
    capturing, graphs, _ = made()
    graphs.free_bytes = 2**20
    capturing.wanted.add(60, 240, 10)
    while capturing.step():
        pass
    assert graphs.captured == {}


def test_a_refused_graph_is_not_tried_again() -> None:
    capturing, graphs, tally = made()
    graphs.bad |= {64, 128}
    capturing.wanted.add(60, 240, 10)
    steps = 0
    while capturing.step():
        steps += 1
    assert (steps, tally.refusals, list(graphs.captured)) == (4, 2, keys(256))


def test_a_graph_that_differs_is_found_out_at_the_start() -> None:
    """They are judged when all are captured, since the device is slower than the host then."""
    capturing, graphs, tally = made(dataclasses.replace(CONFIG, graph_capture="startup"), start=False)
    graphs.bad, graphs.differing = {512}, {128}
    capturing.start()
    assert (set(graphs.captured), tally.captures, tally.refusals) == (set(keys(64, 256)), 2, 2)
    assert capturing.used_bytes == graphs.buffer_bytes + 256 * BYTES_PER_TOKEN


def test_a_capture_that_takes_long_is_for_the_start_alone() -> None:
    capturing, graphs, _ = made()
    capturing.costs.add_replay(64, 30.0, 0.0)
    capturing.costs.add_eager(64, 60.0, 0.0)
    capturing.wanted.add(500, 2000, 10)
    assert not capturing.step(), "240 ms a run: over a second for a capture"
    assert graphs.captured == {}


def test_older_traffic_counts_less() -> None:
    wanted = wanted_of((64, 256, 40_000), (32, 128, 1))
    wanted.add(128, 512, 20_000)
    assert wanted.by_tokens() == {64: 20_000, 128: 10_000}
    assert wanted.total == 30_000


def test_attention_is_told_apart_from_the_rest() -> None:
    costs = Costs()
    assert costs.table() is None
    costs.add_replay(64, 2.0, 1.0)
    costs.add_replay(128, 4.0, 2.0)
    costs.add_eager(60, 6.0, 1.0)
    costs.add_work((2.0, 1.0), (3.0, 3.0))
    table = costs.table()
    assert table is not None
    assert (table.replay_ms, table.eager_ms, table.work_ms) == (((64, 1.5), (128, 3.0)), ((60, 5.5),), 0.5)
    chosen_by = costs.packing_table()
    assert chosen_by is not None
    assert (chosen_by.replay_ms, chosen_by.eager_ms) == (table.replay_ms, ((60, EAGER_MARGIN * 5.5),))
    costs.add_eager(60, 7.0, 0.0)
    renewed = costs.packing_table()
    assert renewed is not None
    assert renewed.eager_ms == ((60, EAGER_MARGIN * 7.0),)
    assert [costs.replay_ms(budget) for budget in (32, 64, 96, 256)] == [1.5, 1.5, 2.25, 6.0]


@given(st.lists(st.floats(0.1, 100), max_size=12))
def test_times_that_fall_are_evened_out(times: list[float]) -> None:
    found = isotonic_fit(times)
    assert found == sorted(found)
    assert sum(found) == pytest.approx(sum(times))
    if times == sorted(times):
        assert found == times
    assert isotonic_fit([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
