"""The tiles of QuACK's GEMMs: their waves, and the choices that were measured on an H200 of 132 multiprocessors."""

from __future__ import annotations

import pytest

from encoder.fused.gemm import Epilogue
from encoder.fused.gemm_tiles import Tile, activation_tile, best_tile, residual_tile, rotated_tile, split_tile

H200 = 132


def test_waves_are_rounds_of_all_multiprocessors() -> None:
    assert Tile(128, 160).waves(640, 4160, H200) == 1
    assert Tile(128, 160).waves(641, 4160, H200) == 2
    assert Tile(128, 160).waves(640, 4224, H200) == 2


def test_useful_share_is_1_where_tiles_fill_all_waves_exactly() -> None:
    assert Tile(128, 128).useful_share(2 * 128, 66 * 128, H200) == 1.0
    assert Tile(128, 128).useful_share(128, 66 * 128, H200) == 0.5
    assert Tile(128, 128, cluster=1).busy_share(1, 66 * 128, H200) == 0.5


@pytest.mark.parametrize(
    ("epilogue", "rows", "columns", "depth", "tile"),
    [
        (Epilogue.GELU_TANH, 256, 4320, 1152, Tile(64, 144)),
        (Epilogue.GELU_TANH, 256, 4104, 1024, Tile(64, 128)),
        (Epilogue.SWIGLU, 256, 6912, 1280, Tile(64, 224)),
        (Epilogue.NONE, 256, 3840, 1280, Tile(128, 64, pingpong=False)),
        (Epilogue.GELU_TANH, 320, 4320, 1152, None),
        (Epilogue.SWIGLU, 320, 6912, 1280, Tile(64, 160, cluster=1)),
        (Epilogue.GELU_TANH, 512, 4320, 1152, Tile(128, 144, pingpong=False, cluster=1)),
        (Epilogue.SWIGLU, 512, 6912, 1280, Tile(128, 128, pingpong=False, cluster=1)),
        (Epilogue.GELU_TANH, 640, 4320, 1152, Tile(128, 192, cluster=1)),
        (Epilogue.GELU_TANH, 784, 4320, 1152, None),
        (Epilogue.GELU_TANH, 896, 4320, 1152, Tile(128, 128, cluster=1)),
        (Epilogue.GELU_TANH, 1024, 4320, 1152, Tile(128, 144)),
        (Epilogue.SWIGLU, 1024, 6912, 1280, Tile(128, 160)),
        (Epilogue.NONE, 1280, 3840, 1280, Tile(128, 160)),
        (Epilogue.GELU_TANH, 1280, 4320, 1152, Tile(128, 192)),
        (Epilogue.GELU_TANH, 2848, 4320, 1152, Tile(128, 192)),
        (Epilogue.NONE, 576, 4096, 4608, Tile(128, 192)),
        (Epilogue.GELU_TANH, 8192, 4320, 1152, Tile(128, 192)),
        (Epilogue.GELU, 64, 4608, 4608, Tile(64, 48, cluster=1)),
        (Epilogue.NONE, 64, 4096, 4608, Tile(64, 64, cluster=1)),
        (Epilogue.GELU, 80, 4608, 4608, None),
    ],
)
def test_activations_have_the_tile_that_measured_fastest(
    epilogue: Epilogue, rows: int, columns: int, depth: int, tile: Tile | None
) -> None:
    assert activation_tile(epilogue, rows, columns, depth, H200) == tile


@pytest.mark.parametrize(
    ("rows", "columns", "tile"),
    [
        (256, 3456, Tile(128, 64, pingpong=False)),
        (320, 3456, Tile(64, 144, cluster=1)),
        (320, 3072, Tile(64, 128, cluster=1)),
        (392, 3072, Tile(64, 128)),
        (512, 3456, Tile(128, 128, pingpong=False, cluster=1)),
        (640, 3456, Tile(128, 160, cluster=1)),
        (896, 3456, Tile(128, 192, cluster=1)),
        (1024, 3456, Tile(128, 128)),
        (8192, 3456, Tile(128, 192)),
    ],
)
def test_rotations_have_the_tile_that_measured_fastest(rows: int, columns: int, tile: Tile) -> None:
    assert rotated_tile(rows, columns, H200) == tile


def test_residuals_are_added_by_quack_in_one_wave_or_where_it_fills_the_device() -> None:
    assert residual_tile(256, 1152, 1152, H200) == Tile(64, 64, cluster=1)
    assert residual_tile(320, 1152, 1152, H200) == Tile(64, 64, cluster=1)
    assert residual_tile(392, 1152, 1152, H200) is None
    assert residual_tile(320, 1152, 4320, H200) is None
    assert residual_tile(8192, 1280, 1280, H200) == Tile(128, 128)


def test_only_deep_gemms_of_few_rows_are_split() -> None:
    assert split_tile(256, 1152, 4320, H200) == Tile(64, 128, pingpong=False, cluster=4)
    assert split_tile(320, 1152, 4320, H200) == Tile(64, 144, pingpong=False, cluster=1)
    assert split_tile(320, 1280, 3432, H200) == Tile(64, 160, pingpong=False, cluster=1)
    assert split_tile(320, 1024, 4128, H200) is None, "no tile divides the columns"
    assert split_tile(320, 1152, 4320, 108) is None, "not one wave"
    assert split_tile(321, 1152, 4320, H200) is None
    assert split_tile(256, 1152, 1152, H200) is None
    assert split_tile(256, 1152, 4304, H200) is None, "a part would not begin on 16 bytes"


@pytest.mark.parametrize("rows", [1, 64, 65, 200, 256, 257, 400, 512, 513, 700, 1500, 2049, 5000, 30000])
def test_gated_tiles_are_multiples_of_32_columns(rows: int) -> None:
    tile = activation_tile(Epilogue.SWIGLU, rows, 6912, 1280, H200)
    assert tile is None or tile.columns % 32 == 0


def test_of_equal_tiles_the_first_is_chosen() -> None:
    one, other = Tile(128, 128), Tile(128, 128, pingpong=False)
    assert best_tile((one, other), 1024, 1152, H200) is one
