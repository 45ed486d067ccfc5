"""What a ladder comes to, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.ladder.summary import (
    PEER_BEST,
    geometric_mean,
    sentences,
    summary,
    sustained_sentences,
    sustained_stages,
    together,
)
from benchmarks.ladder.text import ladder_table


def row(name: str, **ms: float) -> dict[str, Any]:
    cells = {shape: {"ms": value, "speedup": 1.0, "tflops": 1.0} for shape, value in ms.items()}
    return {"name": name, "label": name.title(), "cells": cells}


def record(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "dtype": "d", "shapes": [{"name": "x"}, {"name": "y"}], "rows": list(rows), "skipped": []}


def test_vllms_best_is_the_least_of_its_rows() -> None:
    found = summary(
        record(
            row("eager", x=8.0, y=8.0),
            row("fusion", x=2.0, y=9.0),
            row("transformers", x=1.0, y=1.0),
            row("vllm launched eager", x=6.0, y=4.0),
            row("vllm launched graphs", x=4.0),
        )
    )
    assert found["vllm_best"] == {
        "x": {"ms": 4.0, "row": "vllm launched graphs", "label": "Vllm Launched Graphs"},
        "y": {"ms": 4.0, "row": "vllm launched eager", "label": "Vllm Launched Eager"},
    }
    assert found["vllm_best_over"]["fusion"] == {"x": 2.0, "y": pytest.approx(4 / 9)}
    assert list(found["vllm_best_over"]) == ["eager", "fusion"]
    assert found["slower_than_eager"] == {"fusion": {"shapes": ["y"], "of": 2}}
    total = together([found, found])
    assert total["vllm_best_over"]["fusion"] == {"geometric_mean": pytest.approx((8 / 9) ** 0.5), "cells": 4}
    assert total["slower_than_eager"]["fusion"] == {"cells": 2, "of": 4}
    assert sentences(total)[1] == (
        f"Fusion: 0.94 times as fast as {PEER_BEST} (geometric mean of 4 cells); "
        "cells slower than our own eager: 2 of 4"
    )


def test_a_run_whose_answer_is_not_finite_is_not_vllms_best() -> None:
    """Graphs of vLLM 0.26 that pad one small image gave NaN, and were among its best times."""
    broken = row("vllm launched graphs doubling", x=1.0)
    broken["cells"]["x"]["error"] = float("nan")
    made = record(row("fusion", x=2.0), broken, row("vllm launched eager", x=4.0))
    assert summary(made)["vllm_best"]["x"]["row"] == "vllm launched eager"
    assert sustained_stages(made, "x")[0] == ["fusion", "vllm launched eager"]


def test_without_vllm_nothing_is_said_of_it() -> None:
    found = summary(record(row("eager", x=8.0), row("fusion", x=2.0)))
    assert found["vllm_best"] == found["vllm_best_over"] == {}
    assert sentences(together([found])) == ["Fusion: cells slower than our own eager: 0 of 1"]
    made = record(row("eager", x=8.0))
    assert PEER_BEST not in ladder_table({**made, "summary": summary(made)})


def test_the_table_has_the_row() -> None:
    made = record(row("eager", x=8.0, y=2.0), row("vllm launched eager", x=4.0))
    lines = ladder_table({**made, "summary": summary(made)}).splitlines()
    (best,) = (line for line in lines if line.startswith(PEER_BEST))
    assert best.split()[-2:] == ["4.00", "-"]
    (over,) = (line for line in lines if line.startswith("  over Eager"))
    assert over.split()[-2:] == ["0.50", "-"]


def alone(name: str, label: str, **ms: float) -> dict[str, Any]:
    made = row(name, **ms)
    made["label"] = label
    for cell in made["cells"].values():
        cell["sustained"] = {"ms": 2 * cell["ms"], "sm_mhz": 1600.0, "watts": 690.0}
    return made


def test_each_alone_is_its_own_comparison() -> None:
    """vLLM's best alone is the best of what ran alone, fp8 is over fp8, and held-out shapes have their own mean."""
    made = record(
        alone("fusion", "fused", x=2.0, y=4.0),
        alone("fp8", "fused, fp8", x=1.0, y=2.0),
        alone("vllm launched eager", "vLLM, eager", x=4.0),
        row("vllm launched graphs fitted", x=3.0),
        alone("vllm launched graphs fine", "vLLM, graphs, fine budgets", x=3.0, y=5.0),
        alone("vllm-fp8 launched eager", "vLLM, fp8, eager", x=1.5, y=2.0),
    )
    made["shapes"][1]["held_out"] = True
    found = summary(made)
    cell = found["sustained"]["x"]
    assert cell["fusion"] == {"ms": 4.0, "sm_mhz": 1600.0, "watts": 690.0}
    assert (cell["vllm"]["ms"], cell["vllm"]["row"]) == (6.0, "vllm launched graphs fine")
    assert (cell["over"], cell["fp8_over"], cell["held_out"]) == (1.5, 1.5, False)
    assert found["vllm_best"]["x"]["ms"] == 3.0  # in turn; fp8 is not among vLLM's bfloat16 ways
    assert "vllm-fp8 launched eager" not in found["labels"]
    total = together([found, found])
    assert total["sustained"]["over"]["all"] == {
        "geometric_mean": pytest.approx((1.5 * 1.25) ** 0.5), "lowest": 1.25, "cells": 4,
    }  # fmt: skip
    assert total["sustained"]["over"]["held_out"]["geometric_mean"] == pytest.approx(1.25)
    assert total["sustained"]["fp8_over"]["fitted"]["geometric_mean"] == pytest.approx(1.5)
    said = sustained_sentences(total)
    assert "1.37 (lowest 1.25, 4 cells)" in said[0]
    assert said[1].startswith("fp8, both sides, each alone")
    table = ladder_table({**made, "summary": found}).splitlines()
    (line,) = (line for line in table if line.startswith("x ") and "1600" in line)
    assert "4.00 @ 1600, 690" in line


def test_without_sustained_runs_there_is_nothing_to_say() -> None:
    found = summary(record(row("fusion", x=2.0), row("vllm launched eager", x=4.0)))
    assert found["sustained"] == {}
    assert sustained_sentences(together([found])) == []


def test_the_best_and_what_is_close_to_it_run_alone() -> None:
    made = record(
        row("eager", x=9.0),
        row("fusion", x=2.0),
        row("fp8", x=1.0),
        row("vllm launched eager", x=4.0),
        row("vllm launched graphs fine", x=3.05),
        row("vllm launched graphs fitted", x=3.0),
        row("vllm-fp8 launched eager", x=5.0),
    )
    assert sustained_stages(made, "x") == [
        ["fusion", "vllm launched graphs fine", "vllm launched graphs fitted"],
        ["fp8", "vllm-fp8 launched eager"],
        ["eager", "vllm launched eager"],
    ]
    assert sustained_stages(made, "y") == [[], [], []]


def test_mean_of_ratios() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
