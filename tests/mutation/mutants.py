"""Small deliberate faults in a Python source: one changed node of its syntax tree each.

A mutant is known by where it stands and what it changes, not by its line number, so that an
argument written about it outlives edits elsewhere in the file.
"""

from __future__ import annotations

import ast
import copy
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Place = tuple[tuple[str, int | None], ...]
"""Fields, and positions in lists, that lead from the module to a node."""

ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}
COMPARISON: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
SYMMETRIC = {"max", "min", "transpose"}
"""Calls that mean the same with two arguments exchanged."""

REMOVABLE = (ast.Assign, ast.AugAssign, ast.Expr, ast.Raise, ast.Delete, ast.Continue, ast.Break)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault.

    function   where it stands: `Class.method`, "" at module level
    line       the text of the source's line
    change     what becomes of the node: `old -> new`
    """

    file: str
    function: str
    operator: str
    line: str
    change: str
    lineno: int
    place: Place
    node: ast.AST = field(compare=False)

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What it is known by."""
        return self.file, self.function, self.operator, self.line, self.change

    def __str__(self) -> str:
        where = f"{self.file}.py:{self.lineno} {self.function or 'module'}"
        return f"{where}: {self.operator}: {self.change}"

    def source(self, original: str) -> str:
        """The whole mutated source."""
        tree = ast.parse(original)
        parent: Any = tree
        for name, position in self.place[:-1]:
            parent = getattr(parent, name)
            parent = parent if position is None else parent[position]
        name, position = self.place[-1]
        if position is None:
            setattr(parent, name, copy.deepcopy(self.node))
        else:
            getattr(parent, name)[position] = copy.deepcopy(self.node)
        return ast.unparse(ast.fix_missing_locations(tree))


def mutants_of(file: str, source: str, *, literals: bool = False) -> list[Mutant]:
    """All mutants of a module, in source order.

    literals   mutate the strings of Literal types too: where pydantic reads them
    """
    lines = source.splitlines()
    found: list[Mutant] = []
    seen: Counter[tuple[str, ...]] = Counter()
    walker = _Walker(literals)
    walker.walk(ast.parse(source), (), "")
    for operator, function, place, old, new, change in walker.found:
        lineno = getattr(old, "lineno", 1)
        text = change or f"{_short(old)} -> {_short(new)}"
        mutant = Mutant(
            file, function, operator, lines[lineno - 1].strip(), text, lineno, place, new
        )
        seen[mutant.key] += 1
        if (count := seen[mutant.key]) > 1:  # the same words twice on a line
            again = f"{text} ({count})"
            mutant = Mutant(file, function, operator, mutant.line, again, lineno, place, new)
        found.append(mutant)
    return found


def choose(mutants: list[Mutant], count: int, seed: str) -> list[Mutant]:
    """`count` of them, as many of each operator as there is room for, always the same."""
    kinds: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        kinds[mutant.operator].append(mutant)
    draw = random.Random(seed)
    for kind in sorted(kinds):
        draw.shuffle(kinds[kind])
    order = sorted(kinds)
    draw.shuffle(order)
    chosen: list[Mutant] = []
    while len(chosen) < count and any(kinds.values()):
        for kind in order:
            if kinds[kind] and len(chosen) < count:
                chosen.append(kinds[kind].pop())
    return chosen


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 70 else f"{text[:67]}..."


Found = tuple[str, str, Place, ast.AST, ast.AST, str]
"""Operator, function, place, old node, new node, and the change in words or ""."""


class _Walker:
    def __init__(self, literals: bool) -> None:
        self.literals = literals
        self.found: list[Found] = []

    def walk(self, node: ast.AST, place: Place, function: str) -> None:
        """Collects what can become of `node` and of all below it."""
        if _is_for_the_type_checker(node):
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}" if function else node.name
        for operator, new, change in (*_of_expression(node), *_of_statement(node)):
            self.found.append((operator, function, place, node, new, change))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                if self.literals and isinstance(node, ast.AnnAssign):
                    self._strings(node.annotation, (*place, (name, None)), function)
                continue
            if isinstance(value, list):
                start = 1 if name == "body" and _has_docstring(node) else 0
                for position, item in enumerate(value):
                    is_text = isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)
                    if isinstance(item, ast.AST) and position >= start and not is_text:
                        self.walk(item, (*place, (name, position)), function)
            elif isinstance(value, ast.Subscript) and _name(value.value) == "Literal":
                if self.literals:
                    self._strings(value, (*place, (name, None)), function)
            elif isinstance(value, ast.AST) and name != "format_spec":
                self.walk(value, (*place, (name, None)), function)

    def _strings(self, node: ast.AST, place: Place, function: str) -> None:
        """The strings of a type alone."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for operator, new, change in _of_expression(node):
                self.found.append((operator, function, place, node, new, change))
        for name, value in ast.iter_fields(node):
            for position, item in enumerate(value) if isinstance(value, list) else ((None, value),):
                if isinstance(item, ast.AST):
                    self._strings(item, (*place, (name, position)), function)


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _called(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else _name(node)


def _has_docstring(node: ast.AST) -> bool:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    return isinstance(node, kinds) and ast.get_docstring(node) is not None


def _is_for_the_type_checker(node: ast.AST) -> bool:
    """What never runs, or only names types."""
    if isinstance(node, ast.If):
        return _name(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.FunctionDef):
        return any(_name(decorator) == "overload" for decorator in node.decorator_list)
    return isinstance(node, ast.Import | ast.ImportFrom)


Change = tuple[str, ast.AST, str]


def _of_expression(node: ast.AST) -> Iterator[Change]:
    """(operator, new node, words) for what one expression can become."""
    match node:
        case ast.BinOp(op=op) if type(op) in ARITHMETIC:
            yield "arithmetic", _with(node, op=ARITHMETIC[type(op)]()), ""
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", operand, ""
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield "arithmetic", operand, ""
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                new = [*ops[:i], COMPARISON[type(op)](), *ops[i + 1 :]]
                yield "comparison", _with(node, ops=new), ""
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "boolean", _with(node, op=other), ""
            for i in range(len(values)):
                rest = values[:i] + values[i + 1 :]
                new = rest[0] if len(rest) == 1 else _with(node, values=rest)
                yield "operand", new, f"{_short(node)} without {_short(values[i])}"
        case ast.IfExp(test=test):
            yield "condition", _with(node, test=_negated(test)), ""
        case ast.comprehension(ifs=ifs) if ifs:
            for i, test in enumerate(ifs):
                yield "condition", _with(node, ifs=[*ifs[:i], _negated(test), *ifs[i + 1 :]]), ""
        case ast.Constant(value=value):
            yield from _of_constant(value)
        case ast.Call(func=func, args=args) if _called(func) not in SYMMETRIC:
            for i in range(len(args) - 1):
                pair = args[i : i + 2]
                if not any(isinstance(a, ast.Starred) for a in pair) and not _same(*pair):
                    swapped = [*args[:i], pair[1], pair[0], *args[i + 2 :]]
                    yield "arguments", _with(node, args=swapped), ""
        case ast.Slice(lower=lower, upper=upper, step=step):
            one = ast.Constant(1)
            first = one if lower is None else ast.BinOp(lower, ast.Add(), one)
            yield "slice", _with(node, lower=first), ""
            last = ast.Constant(-1) if upper is None else ast.BinOp(upper, ast.Sub(), one)
            yield "slice", _with(node, upper=last), ""
            if step is not None:
                yield "slice", _with(node, step=ast.BinOp(step, ast.Add(), one)), ""


def _of_constant(value: object) -> Iterator[Change]:
    if isinstance(value, bool):
        yield "constant", ast.Constant(not value), ""
    elif isinstance(value, int):
        yield "constant", ast.Constant(value + 1), ""
        yield "constant", ast.Constant(value - 1), ""
    elif isinstance(value, float):
        yield "constant", ast.Constant(value * 2 if value else 1.0), ""
    elif isinstance(value, str | bytes) and value:
        tail = b"_" if isinstance(value, bytes) else "_"
        words = len(value.split()) > 1  # prose is left out, a name becomes another
        new = value[:0] if words else value + tail  # type: ignore[operator]
        yield "string", ast.Constant(new), f"{_short(ast.Constant(value))} -> {new!r}"


def _of_statement(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, REMOVABLE):
        yield "removed", ast.Pass(), f"{_short(node)} removed"
    match node:
        case ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            yield "arithmetic", _with(node, op=ARITHMETIC[type(op)]()), ""
        case ast.If(test=test) | ast.While(test=test):
            words = f"if {_short(test)} -> if not"
            yield "condition", _with(node, test=_negated(test)), words
        case ast.Return(value=value) if value is not None and not _same(value, ast.Constant(None)):
            yield "return", ast.Return(ast.Constant(None)), ""
        case ast.FunctionDef(body=body) if not any(map(_gives, ast.walk(node))):
            yield "return", _with(node, body=[ast.Return(), *body]), f"{node.name} returns at once"
        case ast.ExceptHandler(type=ast.Tuple(elts=kinds) as several):
            for i, kind in enumerate(kinds):
                rest = _with(several, elts=kinds[:i] + kinds[i + 1 :])
                yield "exception", _with(node, type=rest), f"{_short(kind)} is not caught"
        case ast.ExceptHandler(type=kind) if kind is not None:
            never = ast.Tuple([], ast.Load())
            yield "exception", _with(node, type=never), f"{_short(kind)} is not caught"


def _gives(node: ast.AST) -> bool:
    """Whether a function with this in it has a result."""
    return isinstance(node, ast.Yield) or (isinstance(node, ast.Return) and node.value is not None)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """The node with other fields; what is below is shared, and copied when it is used."""
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def _negated(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)


def _same(first: ast.AST, second: ast.AST) -> bool:
    return ast.dump(first) == ast.dump(second)
