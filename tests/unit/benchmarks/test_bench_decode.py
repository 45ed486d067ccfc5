"""The benchmark from files to embeddings, run for real on tiny towers on the CPU."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.bench_decode import TOWERS, make_photos
from tests.programs import output_of


@pytest.mark.slow
def test_it_measures_every_way_of_both_towers(tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    options = ["--device", "cpu", "--tiny", "--workers", "1", "--out", str(out)]
    told = output_of([sys.executable, "benchmarks/bench_decode.py", *options])
    report = json.loads(told.splitlines()[-1])
    assert report == json.loads(out.read_text())
    assert report["workers"] == 1
    assert report["archs"].keys() == set(TOWERS)
    for result in report["archs"].values():
        rates = {name: value for name, value in result.items() if name.endswith("images_per_s")}
        assert len(rates) == 4
        assert all(value > 0 for value in rates.values())
        assert result["files_over_tower"] == result["files_images_per_s"] / result["tower_images_per_s"]
        assert result["staging"]["batches"] >= 3 + 3 + 1
        assert result["staging"]["bytes_unpinned"] == 0


def test_photos_are_jpeg_files_that_differ() -> None:
    first, second = make_photos(96, 2, seed=0)
    assert first != second
    assert make_photos(96, 2, seed=0) == [first, second]
    opened = Image.open(io.BytesIO(first))
    assert (opened.format, opened.size) == ("JPEG", (96, 96))
