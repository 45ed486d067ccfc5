"""A call is made once for all who want it at the same time, and is nobody's when the last of them has gone."""

from __future__ import annotations

from deployments.ingress.coalescing import SharedCall, SharedCalls


def never() -> object:
    raise AssertionError("a call is under way already")


def test_who_comes_while_it_is_under_way_shares_it() -> None:
    calls: SharedCalls[object] = SharedCalls()
    first, shared = calls.acquire("a", object)
    assert not shared
    assert calls.acquire("a", never) == (first, True)
    other, shared = calls.acquire("b", object)
    assert not shared
    assert other is not first
    assert (first.num_users, len(calls)) == (2, 2)


def test_the_last_to_leave_cancels() -> None:
    calls: SharedCalls[object] = SharedCalls()
    call, _ = calls.acquire("a", object)
    calls.acquire("a", never)
    assert not calls.release(call, share=True)
    assert calls.acquire("a", never) == (call, True)
    assert not calls.release(call, share=True)
    assert calls.release(call, share=True)
    assert len(calls) == 0


def test_what_was_used_or_failed_is_asked_for_anew() -> None:
    calls: SharedCalls[object] = SharedCalls()
    call, _ = calls.acquire("a", object)
    calls.acquire("a", never)
    assert not calls.release(call, share=False)
    again, shared = calls.acquire("a", object)
    assert not shared
    assert again is not call
    assert calls.release(call, share=True), "the last who wanted it; it may still be under way"
    assert calls.acquire("a", never) == (again, True)


def test_used_by_all_it_is_not_kept() -> None:
    calls: SharedCalls[object] = SharedCalls()
    call: SharedCall[object] = calls.acquire("a", object)[0]
    calls.release(call, share=False)
    assert (call.num_users, len(calls)) == (0, 0)
