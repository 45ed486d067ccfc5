"""Tiles of QuACK's GEMMs, chosen by the waves in which the device computes them; where none is good, cuBLAS is used.

The candidates and limits were measured on an H200, in place (benchmarks/log/2026-11-25-tiles-in-place.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from encoder.fused.gemm import Epilogue


@dataclass(frozen=True)
class Tile:
    """Tile of a GEMM that one thread block computes. `cluster`: blocks of adjacent rows that load weights together."""

    rows: int
    columns: int
    pingpong: bool = True
    cluster: int = 2

    def waves(self, rows: int, columns: int, multiprocessors: int) -> int:
        """Returns the number of rounds in which the multiprocessors compute all tiles."""
        return -(-self._tiles(rows, columns) // multiprocessors)

    def busy_share(self, rows: int, columns: int, multiprocessors: int) -> float:
        """Returns the share of multiprocessors that have a tile, averaged over all waves."""
        return self._tiles(rows, columns) / (self.waves(rows, columns, multiprocessors) * multiprocessors)

    def useful_share(self, rows: int, columns: int, multiprocessors: int) -> float:
        """Returns the share of the multiply-adds possible in all waves that the result needs."""
        possible = self.waves(rows, columns, multiprocessors) * multiprocessors * self.rows * self.columns
        return rows * columns / possible

    def _tiles(self, rows: int, columns: int) -> int:
        return -(-rows // self.rows) * -(-columns // self.columns)


# GEMMs of up to this number of rows overlap with the preceding kernel, which makes QuACK's faster.
FEW_ROWS = 256
# Mergers' GEMMs are deeper than a layer's, and run concurrently with the layers.
_MERGER_DEPTH = 2048
_MERGER_ROWS = 64
_MERGER = {Epilogue.GELU: Tile(64, 48, cluster=1), Epilogue.NONE: Tile(64, 64, cluster=1)}
_FEW_PLAIN = Tile(128, 64, pingpong=False)
_FEW_ACTIVATED = tuple(Tile(64, columns) for columns in (128, 144, 160, 192, 224))
_MORE_ROWS = 512
_MORE = tuple(Tile(128, columns, pingpong=False, cluster=1) for columns in (128, 144))
_MORE_GATED = (_MORE[0], *(Tile(64, columns, cluster=1) for columns in (160, 192)))
_LARGE = Tile(128, 192)
_MANY = (_LARGE, Tile(128, 160), Tile(128, 144), Tile(128, 128))
# With more waves than this, the last wave matters less than the size of the tile.
_FEW_WAVES = 3
# QuACK is faster than cuBLAS from this share on: busy for the large tile, useful for others. Lower where cuBLAS needs a
# pass for the activation.
_LEAST_SHARE = {Epilogue.NONE: 0.82, Epilogue.GELU_TANH: 0.8, Epilogue.SILU: 0.7, Epilogue.SWIGLU: 0.65}

# Tiles up to a number of rows, and for more rows.
_FEW_ROTATED = (
    (FEW_ROWS, (_FEW_PLAIN,)),
    (320, (Tile(64, 128, cluster=1), Tile(64, 144, cluster=1))),
    (400, (Tile(64, 128),)),
    (_MORE_ROWS, (Tile(128, 128, pingpong=False, cluster=1),)),
)
_ROTATED = (_LARGE, Tile(128, 160), Tile(128, 128))
# Up to this number of rows, an odd number of row tiles is computed without clusters instead of with an empty tile.
_MOST_ODD_ROWS = 2048
# The cost of a tile beyond its multiply-adds, in columns of 128 rows.
_OVERHEAD = 16

_RESIDUAL, _LEAST_RESIDUAL_SHARE = Tile(128, 128), 0.95
_FEW_RESIDUAL, _FEW_RESIDUAL_ROWS = Tile(64, 64, cluster=1), 320
# Deep GEMMs are split along K, on 16 bytes, to fill the device; the next norm adds the partial sums.
PARTS = 3
_PART = Tile(64, 128, pingpong=False, cluster=4)
_ONE_WAVE = tuple(Tile(64, columns, pingpong=False, cluster=1) for columns in (144, 160))
_LEAST_DEPTH = 1024


def best_tile(tiles: Sequence[Tile], rows: int, columns: int, multiprocessors: int, overhead: int = _OVERHEAD) -> Tile:
    """Returns the fastest tile by waves. `overhead`: the cost of a tile beyond its multiply-adds, in columns."""

    def cost(tile: Tile) -> float:
        return tile.waves(rows, columns, multiprocessors) * (tile.rows * tile.columns / 128 + overhead)

    return min(tiles, key=cost)


@lru_cache(maxsize=1024)
def activation_tile(epilogue: Epilogue, rows: int, columns: int, depth: int, multiprocessors: int) -> Tile | None:
    """Returns the tile of `Gemm.__call__`, for weights `[columns, depth]`; None if cuBLAS is faster."""
    if depth > _MERGER_DEPTH and rows <= _MERGER_ROWS and epilogue in _MERGER:
        return _MERGER[epilogue]
    if epilogue not in _LEAST_SHARE:
        return None
    gated = epilogue is Epilogue.SWIGLU
    if rows <= FEW_ROWS and depth <= _MERGER_DEPTH and epilogue is not Epilogue.SILU:
        if epilogue is Epilogue.NONE:
            return _FEW_PLAIN
        return best_tile(_usable(_FEW_ACTIVATED, gated), rows, columns, multiprocessors)
    tiles: tuple[Tile, ...] = (_LARGE,)
    if depth <= _MERGER_DEPTH and rows <= _MORE_ROWS:
        tiles = _MORE_GATED if gated else _MORE
    elif depth <= _MERGER_DEPTH and _LARGE.waves(rows, columns, multiprocessors) <= _FEW_WAVES:
        tiles = tuple(_unpadded(tile, rows) for tile in _MANY)
    tile = best_tile(_usable(tiles, gated), rows, columns, multiprocessors)
    share = tile.busy_share if tile == _LARGE else tile.useful_share
    return tile if share(rows, columns, multiprocessors) >= _LEAST_SHARE[epilogue] else None


@lru_cache(maxsize=1024)
def rotated_tile(rows: int, columns: int, multiprocessors: int) -> Tile:
    """Returns the tile of `Gemm.rotated`, for every number of rows."""
    few = next((tiles for most, tiles in _FEW_ROTATED if rows <= most), None)
    tiles = tuple(_unpadded(tile, rows) for tile in _ROTATED) if few is None else few
    return best_tile(tiles, rows, columns, multiprocessors)


@lru_cache(maxsize=1024)
def residual_tile(rows: int, columns: int, depth: int, multiprocessors: int) -> Tile | None:
    """Returns the tile of a GEMM that adds to the residual; None if cuBLAS is faster."""
    if rows <= FEW_ROWS or (rows <= _FEW_RESIDUAL_ROWS and depth <= _MERGER_DEPTH):
        return _FEW_RESIDUAL
    full = _RESIDUAL.busy_share(rows, columns, multiprocessors) >= _LEAST_RESIDUAL_SHARE
    return _RESIDUAL if full else None


def split_tile(rows: int, columns: int, depth: int, multiprocessors: int) -> Tile | None:
    """Returns the tile of a GEMM that adds to the residual, split into `PARTS` along K; None if it is not split."""
    if rows > _FEW_RESIDUAL_ROWS or depth % (8 * PARTS) or depth < PARTS * _LEAST_DEPTH:
        return None
    if rows <= FEW_ROWS:
        return _PART
    # Faster only if one wave of whole tiles computes all parts.
    return next((tile for tile in _ONE_WAVE if _fits_a_wave(tile, rows, columns, multiprocessors)), None)


def _fits_a_wave(tile: Tile, rows: int, columns: int, multiprocessors: int) -> bool:
    return columns % tile.columns == 0 and tile.waves(PARTS * rows, columns, multiprocessors) == 1


def _usable(tiles: Sequence[Tile], gated: bool) -> list[Tile]:
    """Omits tiles that QuACK's gated epilogue does not support."""
    return [tile for tile in tiles if not gated or tile.columns % 32 == 0]


def _unpadded(tile: Tile, rows: int) -> Tile:
    odd = -(-rows // tile.rows) % 2 == 1
    return replace(tile, cluster=1) if odd and rows <= _MOST_ODD_ROWS else tile
