"""Modules, classes and values of a source tree, as `scripts/count_path.py` knows them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

FACTS = frozenset({"len", "sum", "max", "min", "any", "all", "isinstance", "int", "float", "bool", "str", "None"})
"""Functions and types that return facts about the request, which are not followed."""

Named = ast.FunctionDef | ast.AsyncFunctionDef
AnyFunction = Named | ast.Lambda


@dataclass(frozen=True)
class Module:
    path: str
    tree: ast.Module

    @cached_property
    def names(self) -> dict[str, ast.AST]:
        """Classes, functions and imports of the module, by name."""
        found: dict[str, ast.AST] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                found.update({alias.asname or alias.name: node for alias in node.names})
        found.update({node.name: node for node in self.tree.body if isinstance(node, Named | ast.ClassDef)})
        return found


@dataclass(frozen=True)
class Class:
    module: Module
    node: ast.ClassDef

    def method(self, name: str) -> Named | None:
        return next((node for node in self.node.body if isinstance(node, Named) and node.name == name), None)


@dataclass
class Value:
    """The walk's knowledge of an expression."""

    held: bool = False
    """Whether it is the request or holds it."""
    type: Class | None = None
    call: Callable[[list[Value], dict[str, Value]], Value] | None = None
    """Evaluates a call of it with positional and keyword arguments."""
    attributes: dict[str, Value] | None = None
    """Attributes of an object whose construction the walk has seen."""
    module: Module | None = None
    items: list[Value] = field(default_factory=list)
    """Elements of a tuple."""
    again: Callable[[], Value] | None = None
    """For a nested function: returns its value with the current variables of the enclosing function."""


Variables = dict[str, Value]


def annotated_fields(type_: Class) -> list[ast.AnnAssign]:
    """Returns the annotated fields of the class."""
    return [node for node in type_.node.body if isinstance(node, ast.AnnAssign)]


def is_fact(annotation: ast.expr | None) -> bool:
    return annotation is not None and {part.strip() for part in ast.unparse(annotation).split("|")} <= FACTS


def parameters(function: AnyFunction) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
