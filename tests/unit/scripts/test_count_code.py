"""Lines of code: what counts and what does not."""

from __future__ import annotations

from scripts.count_code import code_lines, shipped_packages

SOURCE = '''"""A docstring
of two lines."""

# a comment
import os  # counts

TEXT = """two
lines"""


class A:
    """Not counted."""

    x = 1
    """Of an attribute: not counted."""

    def f(
        self,
    ) -> None: ...
'''


def test_blank_lines_comments_and_docstrings_do_not_count() -> None:
    assert code_lines(SOURCE) == 8


def test_shipped_packages_are_those_of_the_distribution() -> None:
    assert {"configs", "encoder", "deployments"} <= set(shipped_packages())
