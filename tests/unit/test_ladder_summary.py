"""What a ladder comes to, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.ladder_summary import PEER_BEST, geometric_mean, sentences, summary, together
from benchmarks.ladder_text import ladder_table


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
        "x": {"ms": 4.0, "row": "vllm launched graphs"},
        "y": {"ms": 4.0, "row": "vllm launched eager"},
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


def test_mean_of_ratios() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
