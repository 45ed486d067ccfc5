"""How far two answers of OpenAI-compatible servers are apart.

Everything must be equal, key by key, but identifiers and times, which no two answers share, and log-probabilities,
which may differ by rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

VOLATILE = frozenset({"id", "created", "created_at", "completed_at", "item_id", "request_id", "system_fingerprint"})
JOINED = frozenset({"content", "arguments", "text", "reasoning"})
Json = Any


def difference(ours: Json, theirs: Json, *, tolerance: float, where: str = "answer") -> float:
    """The largest difference of log-probabilities; AssertionError, saying where, for anything else that differs."""
    if isinstance(theirs, Mapping):
        assert isinstance(ours, Mapping), f"{where}: {ours!r}, but vLLM alone has {theirs!r}"
        assert set(ours) == set(theirs), f"{where}: keys {sorted(set(ours) ^ set(theirs))} are on one side only"
        return max((_field(ours, theirs, key, tolerance, where) for key in theirs if key not in VOLATILE), default=0.0)
    if isinstance(theirs, list):
        assert isinstance(ours, list), f"{where}: {ours!r}, but vLLM alone has {theirs!r}"
        assert len(ours) == len(theirs), f"{where}: {len(ours)} entries, but vLLM alone has {len(theirs)}"
        pairs = enumerate(zip(ours, theirs, strict=True))
        return max((difference(a, b, tolerance=tolerance, where=f"{where}[{i}]") for i, (a, b) in pairs), default=0.0)
    if isinstance(theirs, float):
        assert isinstance(ours, float), f"{where}: {ours!r}, but vLLM alone has {theirs!r}"
        assert abs(ours - theirs) <= tolerance, f"{where}: {ours}, but vLLM alone has {theirs}"
        return abs(ours - theirs)
    assert ours == theirs, f"{where}: {ours!r}, but vLLM alone has {theirs!r}"
    return 0.0


def _field(ours: Mapping[str, Json], theirs: Mapping[str, Json], key: str, tolerance: float, where: str) -> float:
    where = f"{where}.{key}"
    if theirs[key] and key == "top_logprobs":
        return _ranked(ours[key], theirs[key], tolerance, where)
    if theirs[key] and key == "prompt_logprobs":
        assert len(ours[key]) == len(theirs[key]), f"{where}: {len(ours[key])} positions, not {len(theirs[key])}"
        pairs = enumerate(zip(ours[key], theirs[key], strict=True))
        return max(_alternatives(a or {}, b or {}, tolerance, f"{where}[{i}]") for i, (a, b) in pairs)
    return difference(ours[key], theirs[key], tolerance=tolerance, where=where)


def _ranked(ours: Json, theirs: Json, tolerance: float, where: str) -> float:
    """The likeliest tokens. Where two of them are as good as equal, rounding decides their order, so values are
    compared rank by rank, and names only where the neighbours are further away than rounding reaches.

    A list of entries (chat), or one of dictionaries from token to log-probability (completions).
    """
    if not theirs:
        assert not ours, f"{where}: {ours!r}, but vLLM alone has nothing"
        return 0.0
    if "logprob" not in (theirs[-1] or {}):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return max(_ranked(_entries(a), _entries(b), tolerance, f"{where}[{i}]") for i, (a, b) in pairs)
    assert len(ours) == len(theirs), f"{where}: {len(ours)} entries, but vLLM alone has {len(theirs)}"
    values = [entry["logprob"] for entry in theirs]
    largest = difference([entry["logprob"] for entry in ours], values, tolerance=tolerance, where=where)
    for rank, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        gaps = [abs(values[rank] - values[other]) for other in (rank - 1, rank + 1) if 0 <= other < len(values)]
        # The last one's other neighbour is not told, so its name proves nothing.
        if rank + 1 < len(values) and min(gaps) > 2 * tolerance:
            assert a["token"] == b["token"], f"{where}[{rank}]: {a!r}, but vLLM alone has {b!r}"
    return largest


def _entries(alternatives: Mapping[str, float] | None) -> list[dict[str, Json]]:
    """Of a completion's position; the first token of an echoed prompt has none."""
    ordered = sorted((alternatives or {}).items(), key=lambda item: -item[1])
    return [{"token": token, "logprob": value} for token, value in ordered]


def _alternatives(ours: Mapping[str, Json], theirs: Mapping[str, Json], tolerance: float, where: str) -> float:
    """A position of the prompt: its own token and the likeliest ones, by token id."""
    shared = set(ours) & set(theirs)
    assert bool(shared) == bool(theirs), f"{where}: no token in common, {sorted(ours)} and {sorted(theirs)}"
    gaps = [
        difference(ours[token]["logprob"], theirs[token]["logprob"], tolerance=tolerance, where=f"{where}[{token}]")
        for token in shared
    ]
    return max(gaps, default=0.0)


def assembled(chunks: Sequence[Json]) -> Json:
    """The whole answer that a streamed one's chunks add up to: texts and lists joined, the last word on the rest."""
    whole: dict[str, Json] = {}
    for chunk in chunks:
        choices = {choice["index"]: choice for choice in whole.get("choices", [])}
        for choice in chunk.get("choices", []):
            known = choices.setdefault(choice["index"], {})
            _join(known, choice)
        whole |= {key: value for key, value in chunk.items() if key != "choices" and value is not None}
        whole["choices"] = [choices[index] for index in sorted(choices)]
    return whole


def _join(known: dict[str, Json], piece: Mapping[str, Json]) -> None:
    for key, value in piece.items():
        before = known.get(key)
        if key == "tool_calls" and value:
            calls = known[key] = before or []
            for call in value:
                calls.extend({} for _ in range(call["index"] + 1 - len(calls)))
                _join(calls[call["index"]], call)
        elif isinstance(value, Mapping):
            if not isinstance(before, dict):
                known[key] = {}
            _join(known[key], value)
        elif value is None:
            known.setdefault(key, None)
        elif (isinstance(value, list) and isinstance(before, list)) or (key in JOINED and isinstance(before, str)):
            known[key] = before + value
        else:
            known[key] = value


def first_token(answer: Json) -> dict[str, float]:
    """Log-probabilities of the likeliest first tokens of a chat answer, by token; the chosen one first."""
    position = answer["choices"][0]["logprobs"]["content"][0]
    return {entry["token"]: entry["logprob"] for entry in [position, *position["top_logprobs"]]}


def first_token_shift(answer: Json, other: Json) -> float:
    """How far the log-probability of `answer`'s first token is away in `other`.

    Where `other` does not list that token, it is at least as unlikely as the least likely one listed.
    """
    mine, others = first_token(answer), first_token(other)
    token, logprob = next(iter(mine.items()))
    return abs(logprob - others[token]) if token in others else max(0.0, logprob - min(others.values()))
