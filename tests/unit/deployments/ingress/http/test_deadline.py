"""How long a request may take, as its client and the operator say."""

from __future__ import annotations

import pytest

from deployments.common.api_error import ApiError
from deployments.ingress.http.deadline import Deadline


@pytest.mark.parametrize(
    ("asked", "limit_s"), [(None, 600), ("2.5", 2.5), ("1e-3", 0.001), ("600", 600), ("1e9", 600), (" 7 ", 7)]
)
def test_a_client_may_ask_for_less(asked: str | None, limit_s: float) -> None:
    deadline = Deadline.from_header(asked, arrived=100.0, max_s=600.0)
    assert (deadline.at, deadline.limit_s) == (100.0 + limit_s, limit_s)
    assert [deadline.has_passed(100.0), deadline.has_passed(deadline.at)] == [limit_s <= 0.001, True]
    assert deadline.error().message == f"the request took longer than {limit_s:g} s, the limit"


@pytest.mark.parametrize("asked", ["", "0", "-1", "soon", "nan", "inf", "1,5"])
def test_what_is_no_time_is_refused(asked: str) -> None:
    with pytest.raises(ApiError, match=r"x-request-timeout-s is .*; it must be a number of seconds over 0") as refused:
        Deadline.from_header(asked, arrived=0.0, max_s=600.0)
    assert refused.value.status == 400
