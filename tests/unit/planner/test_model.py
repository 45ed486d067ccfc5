"""The planner's arithmetic on cases that can be reckoned by hand, and its queue against a formula."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from encoder.packing.cost_based import CostTable, ImageCost
from planner.model import (
    Language,
    Layout,
    Placement,
    Prediction,
    Speeds,
    Target,
    Tower,
    choose_layout,
    find_cheapest_layout,
    longest_stall_s,
    predict,
)
from planner.queues import simulate_batch_queue, simulate_processor_sharing
from planner.traces import Request

# A token takes 1 ms in ours and 2 ms in vLLM's.
OURS = Tower(CostTable(replay_ms=(), eager_ms=((1, 1.0), (10_000, 10_000.0)), work_ms=0.0))
VLLMS = Tower(CostTable(replay_ms=(), eager_ms=((1, 2.0), (10_000, 20_000.0)), work_ms=0.0), max_images=1024)
SPEEDS = Speeds(Language(10_000, 1e12), OURS, VLLMS, transfer_overhead_s=0.02)
IMAGE = ImageCost(100, 0.0)
TARGET = Target(1.0, 1.0)


def requests(*at_s: float, images: int = 1, num_tokens: int = 1000, output_tokens: int = 1) -> list[Request]:
    return [Request(at, (IMAGE,) * images, num_tokens, output_tokens) for at in at_s]


def test_lonely_requests_take_what_their_parts_take() -> None:
    """0.1 s of prefill; 0.2 s of vLLM's tower, or 0.1 of ours and the hop; each alone in its queue."""
    apart = requests(0, 10, 20)
    found = {
        way: predict(apart, SPEEDS, TARGET, Layout(way, 0 if way is Placement.AGGREGATED else 1, 1))
        for way in Placement
    }
    assert {way: prediction.ttft_s for way, prediction in found.items()} == pytest.approx(
        {Placement.AGGREGATED: 0.3, Placement.SHARED: 0.22, Placement.SPLIT: 0.22}
    )
    assert [found[way].gpus for way in Placement] == [1, 1, 2]
    assert found[Placement.SPLIT].encoder_utilisation == pytest.approx(0.3 / 30)
    assert found[Placement.SPLIT].llm_utilisation == pytest.approx(0.3 / 30)
    assert found[Placement.AGGREGATED].llm_utilisation == pytest.approx(0.9 / 30)


def test_text_takes_no_hop_and_no_encoder() -> None:
    found = predict(requests(0, 10, images=0), SPEEDS, TARGET, Layout(Placement.SPLIT, 1, 1))
    assert found.ttft_s == pytest.approx(0.1)
    assert found.encoder_utilisation == 0


def test_each_part_is_as_busy_as_in_its_own_busiest_time() -> None:
    """Pictures come in another time than most of the text: each is 0.1 s of work a second there."""
    text = requests(*range(600), images=0)
    pictures = requests(*range(600, 900), num_tokens=0)
    layout = Layout(Placement.SPLIT, 1, 1)
    found = predict([*text, *pictures], SPEEDS, TARGET, layout)
    assert found.encoder_utilisation == pytest.approx(0.1)
    assert found.llm_utilisation == pytest.approx(0.1)


def test_images_of_a_request_are_encoded_side_by_side() -> None:
    four = requests(0, 10, images=4)
    one, two = (predict(four, SPEEDS, TARGET, Layout(Placement.SPLIT, encoders, 1)) for encoders in (1, 2))
    assert one.ttft_s == pytest.approx(0.4 + 0.1 + 0.02)
    assert two.ttft_s == pytest.approx(0.2 + 0.1 + 0.02)


def test_a_prompt_is_read_as_its_images_come() -> None:
    """Four images of 0.1 s each, one by one: before the last is there, 0.03 s of reading are done, of 0.1 in all.
    Where reading is slower than encoding it begins with the first image."""
    by_budget = Tower(
        CostTable(replay_ms=((100, 100.0), (400, 399.0)), eager_ms=((1, 1e3), (10_000, 1e7)), work_ms=0.0)
    )
    at_once = replace(SPEEDS, vitray_tower=by_budget)
    early = replace(at_once, early_prefill=True)
    four = requests(0, 10, images=4)
    layout = Layout(Placement.SPLIT, 1, 1)
    assert predict(four, at_once, TARGET, layout).ttft_s == pytest.approx(0.399 + 0.1 + 0.02)
    assert predict(four, early, TARGET, layout).ttft_s == pytest.approx(0.4 - 0.03 + 0.1 + 0.02)
    slow = replace(early, language=Language(500, 1e12))
    assert predict(four, slow, TARGET, layout).ttft_s == pytest.approx(0.1 + 2.0 + 0.02)
    one = requests(0, 10)
    assert predict(one, early, TARGET, layout) == predict(one, at_once, TARGET, layout)


def test_answers_being_written_slow_prefill_and_vllms_tower_but_no_encoder() -> None:
    """1000 tokens a second for 20 s, of which the answers want 10,000: half of the time is theirs."""
    speeds = replace(SPEEDS, language=Language(10_000, 1000))
    busy = requests(0, 10, output_tokens=5000)
    aggregated = predict(busy, speeds, TARGET, Layout(Placement.AGGREGATED, 0, 1))
    split = predict(busy, speeds, TARGET, Layout(Placement.SPLIT, 1, 1))
    assert aggregated.ttft_s == pytest.approx(2 * 0.3)
    assert aggregated.llm_utilisation == pytest.approx(0.5 + 0.03)
    assert split.ttft_s == pytest.approx(0.1 + 2 * 0.1 + 0.02)


def test_what_reads_requests_works_on_all_of_them_at_once() -> None:
    """Ten requests together, 0.1 s of reading each: none is done before all are."""
    assert simulate_processor_sharing([0.0] * 10, [0.1] * 10, 1) == pytest.approx([1.0] * 10)
    assert simulate_processor_sharing([0.0] * 10, [0.1] * 10, 5) == pytest.approx([0.2] * 10)
    assert simulate_processor_sharing([0.0, 5.0], [1.0, 1.0], 1) == pytest.approx([1.0, 6.0])
    assert simulate_processor_sharing([-5.0, -4.5], [1.0, 1.0], 1) == pytest.approx([-3.5, -3.0]), "from any time on"
    # From 1 to 2 both get half: the first ends after 1.5 of its 2, the second after the rest alone.
    assert simulate_processor_sharing([0.0, 1.0], [1.5, 1.0], 1) == pytest.approx([2.0, 2.5])
    assert simulate_processor_sharing([0.0, 0.0, 0.0], [1.0, 0.0, 2.0], 1) == pytest.approx([2.0, 0.0, 3.0])
    speeds = replace(SPEEDS, vllm_image_load_s_per_token=0.001, image_load_s_per_token=0.003, llm_overhead_s=0.5)
    apart = requests(0, 10)
    found = {
        way: predict(apart, speeds, TARGET, Layout(way, 0 if way is Placement.AGGREGATED else 1, 1))
        for way in Placement
    }
    assert found[Placement.AGGREGATED].ttft_s == pytest.approx(0.1 + 0.3 + 0.5)
    assert found[Placement.SPLIT].ttft_s == pytest.approx(0.3 + 0.22 + 0.5)


def test_equal_parts_of_one_server_are_as_the_formula_says() -> None:
    """M/D/1 with equal parts: the mean time inside is s / (1 - ρ), whatever the spread of the work."""
    chance = random.Random(4)
    at_s, now = [], 0.0
    for _ in range(50_000):
        now += chance.expovariate(0.5)
        at_s.append(now)
    done = simulate_processor_sharing(at_s, [1.0] * len(at_s), 1)
    assert sum(end - begin for begin, end in zip(at_s, done, strict=True)) / len(at_s) == pytest.approx(2.0, rel=0.05)


def test_there_are_as_many_readers_as_the_trace_needs() -> None:
    """100 tokens of a second each, every second: half busy are two of vLLM's; ours need no more than one."""
    speeds = replace(SPEEDS, vllm_image_load_s_per_token=0.0098, image_load_s_per_token=0.001)
    many = requests(*range(100))
    alone = find_cheapest_layout(many, speeds, Target(9.0), placement=Placement.AGGREGATED, max_gpus=2)
    shared_way = find_cheapest_layout(many, speeds, Target(9.0), placement=Placement.SHARED, max_gpus=2)
    assert alone is not None
    assert shared_way is not None
    assert (alone.layout.cpu_processes, shared_way.layout.cpu_processes) == (2, 1)


def test_a_pause_does_not_dilute_the_load() -> None:
    """The load was the mean from the first to the last arrival, so that a pause of a day reduced the replicas."""
    layout, speeds = Layout(Placement.SPLIT, 1, 1), replace(SPEEDS, vllm_image_load_s_per_token=0.0098)
    steady = requests(*range(600), num_tokens=5000, output_tokens=2)
    paused = requests(*range(300), *range(86_400, 86_700), num_tokens=5000, output_tokens=2)
    for one in (steady, paused):
        found = predict(one, speeds, TARGET, layout)
        assert (found.llm_utilisation, found.encoder_utilisation) == pytest.approx((0.5, 0.1))
    cheapest = find_cheapest_layout(paused, speeds, Target(9.0), placement=Placement.AGGREGATED, max_gpus=2)
    assert cheapest is not None
    assert cheapest.layout.cpu_processes == 2


@pytest.mark.parametrize("at_s", [(5,), (5, 5)])
def test_requests_at_one_time_are_a_window_of_load(at_s: tuple[float, ...]) -> None:
    """There is no interval to divide by."""
    found = predict(requests(*at_s, images=0), SPEEDS, TARGET, Layout(Placement.AGGREGATED, 0, 1))
    assert found.llm_utilisation == pytest.approx(0.1 * len(at_s) / 300)


def test_what_is_too_busy_meets_nothing() -> None:
    """However late a first token may be."""
    crowd = requests(*(number * 0.1 for number in range(100)), images=0, num_tokens=950)
    found = predict(crowd, SPEEDS, Target(1e9), Layout(Placement.AGGREGATED, 0, 1))
    assert not found.meets_target
    assert found.llm_utilisation == pytest.approx(0.95)
    assert predict(crowd, SPEEDS, Target(1e9), Layout(Placement.AGGREGATED, 0, 2)).meets_target


def test_an_encoder_that_is_too_busy_meets_nothing() -> None:
    crowd = requests(*(number * 0.1 for number in range(100)), num_tokens=100)
    one, two = (predict(crowd, SPEEDS, Target(1e9), Layout(Placement.SPLIT, encoders, 1)) for encoders in (1, 2))
    assert not one.meets_target
    assert one.encoder_utilisation == pytest.approx(100 * 0.1 / 10)
    assert two.meets_target


def test_a_share_of_the_requests_may_be_late() -> None:
    """Twenty alone, the last of which has a prompt that takes 5 s."""
    mostly = [*requests(*range(0, 190, 10), images=0), *requests(190, images=0, num_tokens=50_000)]
    layout = Layout(Placement.AGGREGATED, 0, 1)
    assert predict(mostly, SPEEDS, Target(1.0, 0.95), layout).ttft_s == pytest.approx(0.1)
    assert predict(mostly, SPEEDS, Target(1.0, 0.951), layout).ttft_s == pytest.approx(5.0)
    assert not predict(mostly, SPEEDS, Target(1.0, 0.951), layout).meets_target


def test_a_tower_is_spread_over_the_gpus_of_a_replica_that_encodes_itself() -> None:
    speeds = replace(SPEEDS, language=replace(SPEEDS.language, gpus=4))
    found = predict(requests(0, 10), speeds, TARGET, Layout(Placement.AGGREGATED, 0, 1))
    assert found.ttft_s == pytest.approx(0.1 + 0.2 / 4)
    assert found.gpus == 4


def test_few_small_images_are_not_worth_an_encoder() -> None:
    few = requests(*range(100))
    found = [find_cheapest_layout(few, SPEEDS, TARGET, placement=way, max_gpus=8) for way in Placement]
    met = [prediction for prediction in found if prediction is not None]
    assert [prediction.gpus for prediction in met] == [1, 1, 2]
    assert choose_layout(met).layout == Layout(Placement.AGGREGATED, 0, 1)


def test_large_language_models_and_many_images_are() -> None:
    """Every second a request of 7 images: 1.4 s of vLLM's tower, over 2 GPUs 0.7 s, and 0.5 s of prefill are more than
    one replica has, and a second one costs 2 GPUs; an encoder costs 1 and is busy for 0.7 s."""
    speeds = replace(SPEEDS, language=replace(SPEEDS.language, gpus=2))
    many = requests(*range(100), images=7, num_tokens=5000)
    target = Target(2.0)
    alone = find_cheapest_layout(many, speeds, target, placement=Placement.AGGREGATED, max_gpus=8)
    split = find_cheapest_layout(many, speeds, target, placement=Placement.SPLIT, max_gpus=8)
    assert alone is not None
    assert split is not None
    assert (alone.gpus, split.gpus, split.layout) == (4, 3, Layout(Placement.SPLIT, 1, 1))
    assert choose_layout([alone, split]) is split
    assert find_cheapest_layout(many, speeds, target, placement=Placement.AGGREGATED, max_gpus=3) is None


def test_equal_gpus_go_to_the_simplest() -> None:
    def made(way: Placement, gpus: int) -> Prediction:
        return Prediction(Layout(way, 1, 1), gpus, 1.0, 0.0, 0.0, True)

    split, shared, alone = (made(way, 2) for way in (Placement.SPLIT, Placement.SHARED, Placement.AGGREGATED))
    assert choose_layout([split, shared, alone]) is alone
    assert choose_layout([split, shared]) is shared
    assert choose_layout([made(Placement.SPLIT, 1), shared, alone]).layout.placement is Placement.SPLIT


def test_a_stall_is_one_batch_of_one_request() -> None:
    speeds = replace(SPEEDS, vllm_tower=replace(VLLMS, max_tokens=200), language=replace(SPEEDS.language, gpus=2))
    assert longest_stall_s(requests(0, images=5), speeds, Placement.AGGREGATED) == pytest.approx(0.4 / 2)
    assert longest_stall_s(requests(0, images=1), speeds, Placement.AGGREGATED) == pytest.approx(0.2 / 2)
    assert longest_stall_s(requests(0, images=5), speeds, Placement.SHARED) == pytest.approx(0.5)
    assert longest_stall_s(requests(0, images=5), speeds, Placement.SPLIT) == 0
    assert longest_stall_s(requests(0, images=0), speeds, Placement.AGGREGATED) == 0


def test_those_that_are_free_share_what_waits() -> None:
    """Four at once, a second for each batch: one server takes all, two take two each, as many as fit."""

    def done(servers: int, most: int) -> tuple[list[float], float]:
        return simulate_batch_queue(
            [1, 2, 3, 4], [0.0] * 4, servers, lambda batch: 1.0, lambda batch: len(batch) <= most
        )

    assert done(1, 4) == ([1.0] * 4, 1.0)
    assert done(2, 4) == ([1.0] * 4, 2.0)
    assert done(1, 3) == ([1.0, 1.0, 1.0, 2.0], 2.0)
    assert done(1, 0) == ([1.0, 2.0, 3.0, 4.0], 4.0)


def test_the_queue_waits_as_pollaczek_and_khinchine_say() -> None:
    """M/D/1, half busy: the mean wait is ρ·s / 2(1 - ρ), half of the service."""
    chance = random.Random(3)
    at_s, now = [], 0.0
    for _ in range(50_000):
        now += chance.expovariate(0.5)
        at_s.append(now)
    done, busy_s = simulate_batch_queue(at_s, at_s, 1, lambda batch: 1.0, lambda batch: False)
    waited = sum(end - begin - 1.0 for begin, end in zip(at_s, done, strict=True)) / len(at_s)
    assert waited == pytest.approx(0.5, rel=0.05)
    assert busy_s == 50_000
