"""Counts the files that a chat request visits from its HTTP body to vLLM, and the returns to earlier files.

    python scripts/count_path.py                 the walk through this repository
    python scripts/count_path.py --repo PATH     through another checkout, such as an old commit

The walk follows the parameter `request` of `Ingress.__call__` and then that of `LLM.handle`, in source order and depth
first, into every function of `deployments/` that is called with it, with the result of such a call, or with an object
that holds one of these. It ends where the request is sent to the language model, and where vLLM's application is
called. It does not follow numbers and texts of the request, its images once they are jobs for the encoders, error
handlers, and branches for other routes; a function that calls another twice enters it once. A stay is a run of
functions of one file, and every stay in a file after the first is a return.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.source_values import (
    FACTS,
    AnyFunction,
    Class,
    Module,
    Named,
    Value,
    Variables,
    annotated_fields,
    is_fact,
    parameters,
)

ROOT = Path(__file__).resolve().parent.parent
LEGS = (("Ingress", "__call__"), ("LLM", "handle"))
PARAMETER = "request"
ROUTE = "/v1/chat/completions"
SERVICE = "IMAGES"
"""The name of the ingress's service for ROUTE."""
PACKAGE = "deployments"
COLLECTS = frozenset({"append", "extend", "update", "add", "insert"})
"""Container methods that store their arguments."""
JOBS = frozenset({"RequestImages", "ImageJob"})
"""Classes that hold a request's images once they are jobs for the encoders."""


@dataclass(frozen=True)
class Step:
    """A function that the walk enters."""

    path: str
    function: str


class SentError(Exception):
    """The request has been sent."""


class Walk:
    """One walk through the deployments of the checkout at `repo`."""

    def __init__(self, repo: Path) -> None:
        self.steps: list[Step] = []
        self._modules: dict[str, Module] = {}
        for path in sorted((repo / PACKAGE).rglob("*.py")):
            name = ".".join(path.relative_to(repo).with_suffix("").parts).removesuffix(".__init__")
            self._modules[name] = Module(str(path.relative_to(repo)), ast.parse(path.read_text()))
        self._entered: list[AnyFunction] = []
        self._results: list[dict[AnyFunction, Value]] = [{}]
        """A frame per function being walked: results of the functions it has called, each of which it enters once."""

    def follow(self, class_name: str, method: str) -> None:
        """Follows the method's parameter until the request is sent. Raises ValueError if the walk ends before that."""
        for module in self._modules.values():
            node = module.names.get(class_name)
            if isinstance(node, ast.ClassDef) and (function := Class(module, node).method(method)) is not None:
                given = {PARAMETER: Value(held=True)}
                try:
                    owner = Value(type=Class(module, node))
                    self._enter(module, function, f"{class_name}.{method}", [owner], given, {})
                except SentError:
                    self._entered.clear()
                    return
        raise ValueError(f"{class_name}.{method}: the walk ended before the request was sent")

    # Resolution of names, annotations and attributes.

    def _symbol(self, module: Module, name: str) -> Value:
        match module.names.get(name):
            case ast.ImportFrom(module=source, names=aliases):
                origin = next(alias.name for alias in aliases if (alias.asname or alias.name) == name)
                if (whole := self._modules.get(f"{source}.{origin}")) is not None:
                    return Value(module=whole)
                if (other := self._modules.get(source or "")) is not None:
                    return self._symbol(other, origin)
            case ast.ClassDef() as node:
                return self._constructor(Class(module, node))
            case ast.FunctionDef() | ast.AsyncFunctionDef() as node:
                return self._function(module, node, name)
        return Value()

    def _annotated(self, node: ast.expr | None, module: Module) -> Class | None:
        """Returns the first class of the repository in an annotation; for a container, that of its elements."""
        for part in ast.walk(node) if node is not None else ():
            if isinstance(part, ast.Name | ast.Attribute):
                found = self._value(part, {}, module)
                if found.type is not None:
                    return found.type
        return None

    def _constructor(self, type_: Class) -> Value:
        def construct(arguments: list[Value], keywords: dict[str, Value]) -> Value:
            held = any(each.held for each in (*arguments, *keywords.values()))
            attributes: dict[str, Value] = {}
            made = Value(held, type_, attributes=attributes)
            init = self._find(type_, "__init__")
            if init is None:
                names = (ast.unparse(node.target) for node in annotated_fields(type_))
                attributes.update(zip(names, arguments, strict=False))
                attributes.update(keywords)
            elif held:
                self._enter(*init, [made, *arguments], keywords, {})
            return made

        return Value(type=type_, call=construct)

    def _find(self, type_: Class, name: str) -> tuple[Module, Named, str] | None:
        """Returns a method of the class or of one of its bases."""
        if (node := type_.method(name)) is not None:
            return type_.module, node, f"{type_.node.name}.{name}"
        inherited = (self._annotated(base, type_.module) for base in type_.node.bases)
        return next((found for base in inherited if base and (found := self._find(base, name))), None)

    def _function(self, module: Module, node: AnyFunction, name: str, around: Variables | None = None) -> Value:
        """`around`: the variables of the enclosing function."""
        closure = around or {}
        free = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} & closure.keys()
        holds = any(closure[each].held or closure[each].again for each in free)

        def call(arguments: list[Value], keywords: dict[str, Value]) -> Value:
            if holds or any(each.held for each in (*arguments, *keywords.values())):
                return self._enter(module, node, name, arguments, keywords, closure)
            return Value(type=None if isinstance(node, ast.Lambda) else self._annotated(node.returns, module))

        return Value(held=holds, call=call)

    def _attribute(self, base: Value, name: str) -> Value:
        if base.module is not None:
            return self._symbol(base.module, name)
        if base.type is None:
            return Value()
        declared = self._declared(base.type, name)
        if any(is_fact(node.annotation) for node in annotated_fields(base.type) if ast.unparse(node.target) == name):
            return Value()
        if base.attributes is not None and (seen := base.attributes.get(name)) is not None:
            return Value(seen.held, seen.type or declared, seen.call, seen.attributes)
        if (found := self._find(base.type, name)) is None:
            return Value(type=declared)
        module, node, qualified = found
        decorators = {ast.unparse(each) for each in node.decorator_list}
        if "property" in decorators or "cached_property" in decorators:
            return Value(type=self._annotated(node.returns, module))
        function = self._function(module, node, qualified)
        bound = self._constructor(base.type) if "classmethod" in decorators else base
        return _bound(function, [] if "staticmethod" in decorators else [bound], {}, held=base.held)

    def _declared(self, type_: Class, name: str) -> Class | None:
        """Returns the class of an instance's attribute, from its annotation or from its assignment in `__init__`."""
        for node in annotated_fields(type_):
            if ast.unparse(node.target) == name:
                return self._annotated(node.annotation, type_.module)
        init = type_.method("__init__")
        given_parameters = parameters(init) if init else []
        for part in ast.walk(init) if init else ():
            if isinstance(part, ast.AnnAssign) and ast.unparse(part.target) == f"self.{name}":
                return self._annotated(part.annotation, type_.module)
            if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == f"self.{name}":
                given = {
                    each.arg: Value(type=self._annotated(each.annotation, type_.module)) for each in given_parameters
                }
                return self._value(part.value, given, type_.module).type
        return None

    # Functions, statements and expressions, in source order.

    def _enter(
        self,
        module: Module,
        function: AnyFunction,
        name: str,
        arguments: Sequence[Value],
        keywords: Mapping[str, Value],
        around: Variables,
    ) -> Value:
        if function in self._entered:
            return Value(held=True)
        if function in self._results[-1]:
            return self._results[-1][function]
        if not isinstance(function, ast.Lambda):
            self.steps.append(Step(module.path, name))
        given = dict(zip((each.arg for each in parameters(function)), arguments, strict=False)) | dict(keywords)
        variables = dict(around)
        for parameter in parameters(function):
            value = given.get(parameter.arg, Value())
            value.type = value.type or self._annotated(parameter.annotation, module)
            variables[parameter.arg] = value
        self._entered.append(function)
        self._results.append({})
        if isinstance(function, ast.Lambda):
            result = self._value(function.body, variables, module)
        else:
            result = self._result(function.returns, list(self._run(function.body, variables, module)), module)
        self._entered.pop()
        self._results.pop()
        self._results[-1][function] = result
        return result

    def _result(self, annotation: ast.expr | None, returned: Sequence[Value], module: Module) -> Value:
        """Returns an entered function's result: the request, unless it is a fact, a job or an object without it."""
        type_ = self._annotated(annotation, module)
        known = next((each for each in returned if each.attributes is not None or each.items), Value(held=True))
        if is_fact(annotation) or (type_ is not None and type_.node.name in JOBS):
            return Value(type=type_)
        return Value(known.held, known.type or type_, None, known.attributes, items=known.items)

    def _run(self, body: Sequence[ast.stmt], variables: Variables, module: Module) -> Iterator[Value]:
        """Yields the returned values."""
        for node in body:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    again = partial(self._function, module, node, node.name, variables)
                    variables[node.name] = Value(again=again)
                case ast.Return():
                    yield self._value(node.value, variables, module)
                case ast.Expr():
                    self._value(node.value, variables, module)
                case ast.Assign():
                    value = self._value(node.value, variables, module)
                    for target in node.targets:
                        self._bind(target, value, variables, module)
                case ast.AnnAssign() | ast.AugAssign():
                    self._bind(node.target, self._value(node.value, variables, module), variables, module)
                case ast.For() | ast.AsyncFor():
                    self._bind(node.target, self._element(node.iter, variables, module), variables, module)
                    yield from self._run(node.body, variables, module)
                case ast.With() | ast.AsyncWith():
                    for item in node.items:
                        value = self._value(item.context_expr, variables, module)
                        if item.optional_vars is not None:
                            self._bind(item.optional_vars, value, variables, module)
                    yield from self._run(node.body, variables, module)
                case ast.If() | ast.While():
                    self._value(node.test, variables, module)
                    other = [] if _names_another_route(node.test) else node.body
                    yield from self._run([*other, *node.orelse], variables, module)
                case ast.Try():
                    yield from self._run([*node.body, *node.orelse, *node.finalbody], variables, module)

    def _element(self, node: ast.expr, variables: Variables, module: Module) -> Value:
        iterated = self._value(node, variables, module)
        return Value(iterated.held, iterated.type)

    def _bind(self, target: ast.expr, value: Value, variables: Variables, module: Module) -> None:
        match target:
            case ast.Name():
                variables[target.id] = value
            case ast.Tuple() | ast.List():
                known = value.items if len(value.items) == len(target.elts) else [Value(value.held)] * len(target.elts)
                for inner, item in zip(target.elts, known, strict=True):
                    self._bind(inner, item, variables, module)
            case ast.Attribute():
                owner = self._value(target.value, variables, module)
                if owner.attributes is not None:
                    owner.attributes[target.attr] = value

    def _value(self, node: ast.expr | None, variables: Variables, module: Module) -> Value:
        match node:
            case None:
                return Value()
            case ast.Name():
                value = variables.get(node.id) or self._symbol(module, node.id)
                return value.again() if value.again else value
            case ast.Attribute():
                return self._attribute(self._value(node.value, variables, module), node.attr)
            case ast.Lambda():
                return self._function(module, node, "lambda", variables)
            case ast.Call():
                return self._called(node, variables, module)
            case ast.Await() | ast.Starred() | ast.YieldFrom():
                return self._value(node.value, variables, module)
            case ast.NamedExpr():
                value = self._value(node.value, variables, module)
                self._bind(node.target, value, variables, module)
                return value
            case ast.IfExp() if _names_another_route(node.test):
                self._value(node.test, variables, module)
                return self._value(node.orelse, variables, module)
            case ast.Tuple():
                items = [self._value(each, variables, module) for each in node.elts]
                return Value(any(each.held for each in items), items=items)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
                inner = dict(variables)
                for generator in node.generators:
                    self._bind(generator.target, self._element(generator.iter, inner, module), inner, module)
                    for test in generator.ifs:
                        self._value(test, inner, module)
                return self._value(node.value if isinstance(node, ast.DictComp) else node.elt, inner, module)
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        values = [self._value(part, variables, module) for part in parts]
        types = (each.type for each in values if isinstance(node, ast.IfExp | ast.BoolOp))
        return Value(any(each.held for each in values), next(filter(None, types), None))

    def _called(self, node: ast.Call, variables: Variables, module: Module) -> Value:
        function = self._value(node.func, variables, module)
        arguments: list[Value] = []
        for each in node.args:
            value = self._value(each, variables, module)
            arguments += value.items if isinstance(each, ast.Starred) and value.items else [value]
        keywords = {each.arg or "": self._value(each.value, variables, module) for each in node.keywords}
        name = ast.unparse(node.func)
        if (name.endswith(".remote") and "llm" in name) or (name == "app" and len(arguments) == 3):
            raise SentError
        if function.call is not None:
            return function.call(arguments, keywords)
        if name == "partial":
            return _bound(arguments[0], arguments[1:], keywords, held=any(each.held for each in arguments))
        given = [*arguments, *keywords.values()]
        if isinstance(node.func, ast.Attribute):
            given.append(self._value(node.func.value, variables, module))
        for value in given:  # a library function calls the functions that it is given
            if value.call is not None and value.held:
                value.call([], {})
        if isinstance(node.func, ast.Attribute) and node.func.attr in COLLECTS and any(each.held for each in given):
            self._bind(node.func.value, Value(held=True), variables, module)
        if name in FACTS or not given:
            return Value()
        return Value(any(value.held for value in given), given[0].type, attributes=given[0].attributes)


def _bound(function: Value, before: list[Value], named: Mapping[str, Value], *, held: bool) -> Value:
    """Returns the function with its first arguments bound."""

    def call(arguments: list[Value], keywords: dict[str, Value]) -> Value:
        return function.call([*before, *arguments], {**named, **keywords}) if function.call else Value(held)

    return Value(held, call=call)


def _names_another_route(test: ast.expr) -> bool:
    """Whether the condition names other routes, by path, constant or service, and not ROUTE."""
    parts = list(ast.walk(test))
    constants = [part.value for part in parts if isinstance(part, ast.Constant)]
    paths = [each for each in constants if isinstance(each, str) and each.startswith("/")]
    paths += [part.id for part in parts if isinstance(part, ast.Name) and part.id.endswith("_PATH")]
    services = [part.attr for part in parts if isinstance(part, ast.Attribute) and _is_service(part.value)]
    named = [*paths, *services]
    return bool(named) and ROUTE not in named and SERVICE not in named


def _is_service(node: ast.expr) -> bool:
    return ast.unparse(node).rpartition(".")[2] == "Service"


def walked(repo: Path) -> list[tuple[str, list[str]]]:
    """Returns the files of the walk in order of the visits, each with the functions entered during one stay."""
    walk = Walk(repo)
    for leg in LEGS:
        walk.follow(*leg)
    runs = itertools.groupby(walk.steps, lambda step: step.path)
    return [(path, [step.function for step in run]) for path, run in runs]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Counts the files that a request visits.")
    parser.add_argument("--repo", type=Path, default=ROOT)
    stays = walked(parser.parse_args(arguments).repo)
    for number, (path, functions) in enumerate(stays, 1):
        print(f"{number:3}  {path}: {', '.join(functions)}")
    num_files = len({path for path, _ in stays})
    print(f"{num_files} files, {len(stays) - num_files} returns")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
