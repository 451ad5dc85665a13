"""Arithmetic in specs, such as `{throughput} / {replicas}`: numbers and + - * / ** alone, never Python's eval."""

import ast
import operator
import re
from collections.abc import Callable, Mapping

from falconet.errors import ConfigError

_NAME = re.compile(r"\{(\w+)\}")
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
LARGEST_POWER = 64  # a spec is no reason to compute for an hour


def names_in(expression: str) -> list[str]:
    return _NAME.findall(expression)


def evaluate(expression: str, values: Mapping[str, float]) -> float | None:
    """The value of an expression; None when a name has no value or it cannot be divided."""
    if not values.keys() >= set(names_in(expression)):
        return None
    tree = _parsed(_NAME.sub(lambda match: f"({values[match[1]]!r})", expression), expression)
    try:
        return _value(tree, expression)
    except (ZeroDivisionError, OverflowError):
        return None


def check(expression: str) -> None:
    """Raise ConfigError for what is no arithmetic."""
    evaluate(expression, dict.fromkeys(names_in(expression), 1.0))


def _parsed(filled: str, expression: str) -> ast.expr:
    try:
        return ast.parse(filled, mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"expr: '{expression}' is not arithmetic") from error


def _value(node: ast.expr, expression: str) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, expression)
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _BINARY:
            first, second = _value(left, expression), _value(right, expression)
            if isinstance(kind, ast.Pow) and abs(second) > LARGEST_POWER:
                raise ConfigError(f"expr: '{expression}' has a power above {LARGEST_POWER}")
            found = _BINARY[type(kind)](first, second)
            if isinstance(found, complex):  # a root of a negative number
                raise ZeroDivisionError
            return found
    raise ConfigError(f"expr: '{expression}' is not arithmetic; wanted numbers, {{metrics}} and + - * / **")
