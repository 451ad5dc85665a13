"""Benchmark specs: YAML files that name commands, their variants and what to measure."""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any, Literal

import yaml

from falconet.config.settings import read_yaml
from falconet.errors import ConfigError, did_you_mean
from falconet.report.console import counted

Reduction = Literal["mean", "final", "min", "value"]
REDUCTIONS: tuple[Reduction, ...] = ("mean", "final", "min", "value")
CONVERGENCE = "_conv"  # in the name of a benchmark that trains to an accuracy
# What every run measures besides the metrics of its spec; `derived` and `output` may use these names.
MEASURED = ("throughput", *(f"latency_{name}" for name in ("p50", "p90", "p99", "mean", "max")))
TEMPLATE = "options"  # in the name of an entry that others merge, which is not a benchmark itself
USED = ("description", "cmd", "data", "derived", "output", "env", "parameters", "location", "timeout", "allow_wandb")
# Keys of the originals that prepared a machine: accepted, and reported as ignored.
UNUSED = (
    *("requirements_path", "requirements_file", "required_apt_packages_path", "required_apt_packages"),
    *("pre_run_commands", "repository", "reference_directory", "generated", "synthetic", "readme"),
)
_NAME = re.compile(r"\{(\w+)\}")
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
LARGEST_POWER = 64  # so that a spec cannot compute for an hour


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number to find in the output."""

    pattern: re.Pattern[str]
    skip: int = 0  # first measurements that always count as warm-up
    reduction: Reduction = "mean"


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One entry of a spec."""

    name: str
    where: str  # the file it comes from
    folder: Path  # in which its command runs
    command: str
    variants: tuple[Mapping[str, str], ...] = ({},)  # parameters to fill into the command
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    derived: Mapping[str, str] = field(default_factory=dict)  # name -> arithmetic with {other metrics}
    output: tuple[tuple[str, str], ...] = ()  # (title, metric)
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout: float | None = None  # seconds
    allow_wandb: bool = False
    ignored: tuple[str, ...] = ()  # keys that have no effect here
    notes: tuple[str, ...] = ()  # other parts that are not used as written, one line each

    @property
    def converges(self) -> bool:
        return CONVERGENCE in self.name


def find_spec(name: str) -> Path:
    """Find a spec by path, or a built-in one by name."""
    path = Path(name)
    if path.suffix in (".yml", ".yaml") or path.exists():
        return path
    built_in = builtin_specs()
    if name not in built_in:
        meant = did_you_mean(name, built_in) or f"; expected a YAML file or one of {', '.join(built_in)}"
        raise ConfigError(f"there is no spec '{name}'{meant}")
    return built_in[name]


def builtin_specs() -> dict[str, Path]:
    with resources.as_file(resources.files("falconet.bench") / "specs") as folder:
        return {path.stem: path for path in sorted(folder.glob("*.yml"))}


def read_spec(path: Path) -> list[Benchmark]:
    """Read and check every benchmark in a file."""
    content = read_yaml(path, loader=_Spelled)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: expected a mapping of benchmark names to entries with a cmd")
    # A built-in spec is in the package, so its commands run in the current folder; a link to one runs beside the link.
    folder = Path.cwd() if path in builtin_specs().values() else path.parent.resolve()
    twice = _repeated(yaml.compose(path.read_text(encoding="utf-8"), Loader=_Spelled))
    found = [
        _Entry(str(name), entry, where=str(path), is_repeated=name in twice).benchmark(folder)
        for name, entry in content.items()
        if TEMPLATE not in str(name)
    ]
    if not found:
        raise ConfigError(f"{path}: has no benchmarks; expected an entry with a cmd")
    return found


def select(benchmarks: Sequence[Benchmark], names: Iterable[str], *, convergence: bool) -> list[Benchmark]:
    """Choose the named benchmarks, in that order, or all; those that train to an accuracy only on request."""
    by_name: dict[str, Benchmark] = {}
    for benchmark in benchmarks:
        if benchmark.name in by_name:
            raise ConfigError(
                f"{benchmark.where}: '{benchmark.name}' is also defined in {by_name[benchmark.name].where}"
            )
        by_name[benchmark.name] = benchmark
    chosen = list(dict.fromkeys(names))
    for name in chosen:
        if name not in by_name:
            meant = did_you_mean(name, by_name) or f"; expected one of {', '.join(by_name)}"
            raise ConfigError(f"there is no benchmark '{name}'{meant}")
    if chosen:
        return [by_name[name] for name in chosen]
    return [benchmark for benchmark in benchmarks if convergence or not benchmark.converges]


class _Spelled(yaml.SafeLoader):
    """Keeps scalars as text, merges `<<`, and refuses a key that an entry has twice."""

    yaml_implicit_resolvers = {"<": [("tag:yaml.org,2002:merge", re.compile("<<$"))]}  # noqa: RUF012, as the base class declares it

    def construct_document(self, node: yaml.Node) -> Any:
        # Not refused at the top: of two entries with one name the last is used, with a note.
        node.merged = True  # type: ignore[attr-defined]
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if not getattr(node, "merged", False):
            for name in _repeated(node):
                raise yaml.constructor.ConstructorError(None, None, f"'{name}' is given twice", node.start_mark)
        node.merged = True  # type: ignore[attr-defined]  # merged keys come first and may be overridden
        return super().construct_mapping(node, deep=deep)


def _repeated(node: yaml.Node | None) -> list[str]:
    """The keys that a mapping has more than once."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    names = [key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]


@dataclass(frozen=True)
class _Entry:
    """An entry of a spec as read from the file."""

    name: str
    content: Any
    where: str
    is_repeated: bool = False  # the file has an earlier entry of this name

    def benchmark(self, folder: Path) -> Benchmark:
        if not isinstance(self.content, Mapping):
            raise self._mistake("expected a mapping with a cmd")
        self._check_keys(self.content, (*USED, *UNUSED), "")
        if "cmd" not in self.content:
            raise self._mistake(f"has no cmd; expected one, or '{TEMPLATE}' in the name of an entry that others merge")
        place = folder / self._scalar(self.content.get("location", ""), "location")
        variants = tuple(self._variants())
        known = [*MEASURED, *self._mapping("data"), *self._mapping("derived"), *(variants[0] if variants else ())]
        return Benchmark(
            name=self.name,
            where=self.where,
            folder=place if place.is_dir() else folder,
            command=" ".join(self._text("cmd").split()),
            variants=variants,
            metrics={name: self._metric(name, entry) for name, entry in self._mapping("data").items()},
            derived={name: self._expression(name, entry, known) for name, entry in self._mapping("derived").items()},
            output=tuple(self._output()),
            environment=dict(self._environment()),
            timeout=self._number("timeout"),
            allow_wandb=str(self.content.get("allow_wandb", "false")).lower() in ("true", "yes", "on"),
            ignored=tuple(key for key in self.content if key in UNUSED),
            notes=(*self._notes(place, folder), *self._unmeasured(known)),
        )

    def _notes(self, place: Path, folder: Path) -> Iterator[str]:
        if self.is_repeated:
            yield f"{self.name} is in {self.where} more than once; using the last"
        if not place.is_dir():  # the originals' specs name folders of their makers' machines
            yield f"location {self.content['location']} is not a folder here; running in {folder}"

    def _unmeasured(self, known: Sequence[str]) -> Iterator[str]:
        for title, metric in self._output():
            if metric not in known:
                yield f"{self.name}: output: {title}: no such metric as {metric}{did_you_mean(metric, known)}"

    def _variants(self) -> Iterator[dict[str, str]]:
        """The variants: rows of a list headed by names, or every combination of a mapping's comma-separated values."""
        given = self.content.get("parameters", {})
        if isinstance(given, list) and len(given) > 1 and all(isinstance(row, list) for row in given):
            names, *rows = given
            for row in rows:
                if len(row) != len(names):
                    raise self._mistake(f"parameters: a row has {counted(len(row), 'value')}, expected {len(names)}")
                cells = [self._scalar(cell, "parameters") for cell in (*names, *row)]
                yield dict(zip(cells[: len(names)], cells[len(names) :], strict=True))
            return
        if not isinstance(given, Mapping):
            raise self._mistake(
                "parameters: expected a mapping such as `batchsize: 1,64`, or a list of rows headed by names"
            )
        values = [
            value if isinstance(value, list) else self._scalar(value, "parameters").split(",")
            for value in given.values()
        ]
        for name, choices in zip(given, values, strict=True):
            spelled = [self._scalar(choice, f"parameters: {name}").strip() for choice in choices]
            if not spelled or len(set(spelled)) < len(spelled):
                raise self._mistake(f"parameters: {name}: got '{','.join(spelled)}', expected distinct values")
        for row in product(*values):
            yield {str(name): str(value).strip() for name, value in zip(given, row, strict=True)}

    def _environment(self) -> Iterator[tuple[str, str]]:
        for name, value in self._mapping("env").items():
            if not re.fullmatch(r"[^=\0]+", str(name)):
                raise self._mistake(f"env: {name!r} is not a valid variable name")
            yield str(name), self._scalar(value, f"env: {name}")

    def _metric(self, name: str, entry: Any) -> Metric:
        if not isinstance(entry, Mapping) or "regexp" not in entry:
            raise self._mistake(f"data: {name}: expected a regexp with one group")
        self._check_keys(entry, ("regexp", "skip", "reduction_type"), f"data: {name}: ")
        reduction = entry.get("reduction_type", "mean")
        if reduction not in REDUCTIONS:
            raise self._mistake(f"data: {name}: reduction_type: got '{reduction}', expected {', '.join(REDUCTIONS)}")
        try:
            pattern = re.compile(self._scalar(entry["regexp"], f"data: {name}: regexp"))
        except re.error as error:
            raise self._mistake(f"data: {name}: regexp: {error}") from error
        if pattern.groups != 1:
            raise self._mistake(f"data: {name}: regexp: has {pattern.groups} groups, expected one around the number")
        skip = str(entry.get("skip", "0"))
        if not (skip.isascii() and skip.isdecimal()):
            raise self._mistake(f"data: {name}: skip: got '{skip}', expected an integer, at least 0")
        return Metric(pattern=pattern, skip=int(skip), reduction=reduction)

    def _expression(self, name: str, entry: Any, known: Sequence[str]) -> str:
        if not isinstance(entry, Mapping) or "expr" not in entry:
            raise self._mistake(f"derived: {name}: expected an expr such as '{{throughput}} / 4'")
        self._check_keys(entry, ("expr", "reduction_type", "skip"), f"derived: {name}: ")
        try:
            check_expression(str(entry["expr"]))
        except ConfigError as error:
            raise self._mistake(f"derived: {name}: {error}") from error
        for used in names_in(str(entry["expr"])):
            if used not in known:
                meant = did_you_mean(used, known) or "; expected a metric or a parameter"
                raise self._mistake(f"derived: {name}: unknown name {{{used}}}{meant}")
        return str(entry["expr"])

    def _output(self) -> Iterator[tuple[str, str]]:
        given = self.content.get("output", [])
        rows = given if isinstance(given, list) else None
        if rows is None or any(not isinstance(row, list) or len(row) != 2 for row in rows):
            raise self._mistake("output: expected a list of pairs such as [samples/sec, throughput]")
        yield from ((str(title), str(metric)) for title, metric in rows)

    def _text(self, key: str) -> str:
        value = self._scalar(self.content[key], key)
        if not value.strip():
            raise self._mistake(f"{key}: expected text")
        return value

    def _scalar(self, value: Any, where: str) -> str:
        if not isinstance(value, str) or "\0" in value:
            raise self._mistake(f"{where}: expected text")
        return value

    def _mapping(self, key: str) -> Mapping[Any, Any]:
        value = self.content.get(key) or {}
        if not isinstance(value, Mapping):
            raise self._mistake(f"{key}: expected a mapping")
        return value

    def _number(self, key: str) -> float | None:
        if key not in self.content:
            return None
        try:
            number = float(self.content[key])
        except (TypeError, ValueError):
            number = 0.0
        if not number > 0:
            raise self._mistake(f"{key}: got '{self.content[key]}', expected a number of seconds, more than 0")
        return number

    def _check_keys(self, mapping: Mapping[Any, Any], known: Sequence[str], where: str) -> None:
        for key in mapping:
            if key not in known:
                expected = f"; expected {', '.join(known[:10])}"
                raise self._mistake(f"{where}unknown key '{key}'{did_you_mean(str(key), known) or expected}")

    def _mistake(self, what: str) -> ConfigError:
        return ConfigError(f"{self.where}: {self.name}: {what}")


def evaluate_expression(expression: str, values: Mapping[str, float]) -> float | None:
    """Evaluate arithmetic such as `{throughput} / {replicas}`, never with Python's eval.

    None if a name has no value, or for a division by zero.
    """
    if not values.keys() >= set(names_in(expression)):
        return None
    tree = _parsed(_NAME.sub(lambda match: f"({values[match[1]]!r})", expression), expression)
    try:
        return _value(tree, expression)
    except (ZeroDivisionError, OverflowError):
        return None


def check_expression(expression: str) -> None:
    """Raise ConfigError for anything but arithmetic."""
    evaluate_expression(expression, dict.fromkeys(names_in(expression), 1.0))


def names_in(expression: str) -> list[str]:
    return _NAME.findall(expression)


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
                raise ConfigError(f"expr: '{expression}' has an exponent above {LARGEST_POWER}")
            found = _BINARY[type(kind)](first, second)
            if isinstance(found, complex):  # a root of a negative number
                raise ZeroDivisionError
            return found
    raise ConfigError(f"expr: '{expression}' is not arithmetic; expected numbers, {{metrics}} and + - * / **")
