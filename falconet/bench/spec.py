"""Arithmetic in specs, such as `{throughput} / {replicas}`: numbers and + - * / ** alone, never Python's eval."""

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


def evaluate_expression(expression: str, values: Mapping[str, float]) -> float | None:
    """The value of an expression; None when a name has no value or it cannot be divided."""
    if not values.keys() >= set(names_in(expression)):
        return None
    tree = _parsed(_NAME.sub(lambda match: f"({values[match[1]]!r})", expression), expression)
    try:
        return _value(tree, expression)
    except (ZeroDivisionError, OverflowError):
        return None


def check_expression(expression: str) -> None:
    """Raise ConfigError for what is no arithmetic."""
    evaluate_expression(expression, dict.fromkeys(names_in(expression), 1.0))


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


Reduction = Literal["mean", "final", "min", "value"]
REDUCTIONS: tuple[Reduction, ...] = ("mean", "final", "min", "value")
CONVERGENCE = "_conv"  # ends the name of a benchmark that trains to an accuracy
# What a run of ours has beside the metrics of its spec, by the names that `derived` and `output` may use.
MEASURED = ("throughput", *(f"latency_{name}" for name in ("p50", "p90", "p99", "mean", "max")))
TEMPLATE = "options"  # in the name of an entry that others merge, and that is no benchmark

USED = ("description", "cmd", "data", "derived", "output", "env", "parameters", "location", "timeout", "allow_wandb")
# What prepared an IPU machine: read, and told to have no effect.
UNUSED = (
    *("requirements_path", "requirements_file", "required_apt_packages_path", "required_apt_packages"),
    *("pre_run_commands", "repository", "reference_directory", "generated", "synthetic", "readme"),
)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number to find in the output."""

    pattern: re.Pattern[str]
    skip: int = 0  # measurements that are warm-up in any case
    reduction: Reduction = "mean"


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One entry of a spec."""

    name: str
    where: str  # the file it comes from
    folder: Path  # in which its command runs
    command: str
    variants: tuple[Mapping[str, str], ...] = ({},)  # parameters that are put into the command
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    derived: Mapping[str, str] = field(default_factory=dict)  # name -> arithmetic with {other metrics}
    output: tuple[tuple[str, str], ...] = ()  # (title, metric)
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout: float | None = None  # seconds
    allow_wandb: bool = False
    ignored: tuple[str, ...] = ()  # keys without effect here
    notes: tuple[str, ...] = ()  # what else is not taken as it is written, a line each

    @property
    def converges(self) -> bool:
        return CONVERGENCE in self.name


class _Spelled(yaml.SafeLoader):
    """Scalars as they are spelled, `<<` merges, and a key given twice in an entry is a mistake."""

    def construct_document(self, node: yaml.Node) -> Any:
        node.merged = True  # type: ignore[attr-defined]  # two entries of one name are told in a note: the last one counts, as it did
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if not getattr(node, "merged", False):
            for name in _repeated(node):
                raise yaml.constructor.ConstructorError(None, None, f"'{name}' is there twice", node.start_mark)
        node.merged = True  # type: ignore[attr-defined]  # what is merged in comes before, under the same names
        return super().construct_mapping(node, deep=deep)


def _repeated(node: yaml.Node | None) -> list[str]:
    """Keys of a mapping that it has more than once."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    names = [key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]


_Spelled.yaml_implicit_resolvers = {"<": [("tag:yaml.org,2002:merge", re.compile("<<$"))]}


def find_spec(name: str) -> Path:
    """The file that `--spec` names: a path, or a built-in spec."""
    path = Path(name)
    if path.suffix in (".yml", ".yaml") or path.exists():
        return path
    built_in = builtin_specs()
    if name not in built_in:
        meant = did_you_mean(name, built_in) or f"; wanted a YAML file or one of {', '.join(built_in)}"
        raise ConfigError(f"--spec: no spec is named '{name}'{meant}")
    return built_in[name]


def builtin_specs() -> dict[str, Path]:
    with resources.as_file(resources.files("falconet.bench") / "specs") as folder:
        return {path.stem: path for path in sorted(folder.glob("*.yml"))}


def read_spec(path: Path) -> list[Benchmark]:
    """Every benchmark of a file, checked."""
    content = read_yaml(path, loader=_Spelled)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: wanted a mapping of benchmark names to entries with a cmd")
    # A built-in spec lies in the package; its commands run where the user is. A link to one lies where it is itself.
    folder = Path.cwd() if path in builtin_specs().values() else path.parent.resolve()
    twice = _repeated(yaml.compose(path.read_text(encoding="utf-8"), Loader=_Spelled))
    found = [
        _Entry(str(name), entry, where=str(path), is_repeated=name in twice).benchmark(folder)
        for name, entry in content.items()
        if TEMPLATE not in str(name)
    ]
    if not found:
        raise ConfigError(f"{path}: has no benchmark in it; wanted an entry with a cmd")
    return found


def select(benchmarks: Sequence[Benchmark], names: Iterable[str], *, convergence: bool) -> list[Benchmark]:
    """Those that were named, in that order; or all, without those that train to an accuracy unless asked for."""
    by_name: dict[str, Benchmark] = {}
    for benchmark in benchmarks:
        if benchmark.name in by_name:
            raise ConfigError(f"{benchmark.where}: '{benchmark.name}' is also in {by_name[benchmark.name].where}")
        by_name[benchmark.name] = benchmark
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        if name not in by_name:
            meant = did_you_mean(name, by_name) or f"; wanted one of {', '.join(by_name)}"
            raise ConfigError(f"--benchmark: no benchmark is named '{name}'{meant}")
    if wanted:
        return [by_name[name] for name in wanted]
    chosen = [benchmark for benchmark in benchmarks if convergence or not benchmark.converges]
    if not chosen:
        raise ConfigError("--spec: all benchmarks train to an accuracy; wanted --include-convergence to run them")
    return chosen


@dataclass(frozen=True)
class _Entry:
    """An entry as it was read, and where its mistakes are."""

    name: str
    content: Any
    where: str
    is_repeated: bool = False  # an entry of this name comes before it

    def benchmark(self, folder: Path) -> Benchmark:
        if not isinstance(self.content, Mapping):
            raise self._mistake("wanted a mapping with a cmd")
        self._check_keys(self.content, (*USED, *UNUSED), "")
        if "cmd" not in self.content:
            raise self._mistake(f"has no cmd; wanted one, or '{TEMPLATE}' in the name of an entry to merge")
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
            yield f"{self.name} is in {self.where} more than once; the last one counts"
        if not place.is_dir():  # the originals' files name folders of their makers' own machines
            yield f"location {self.content['location']} is not a folder here; commands run in {folder}"

    def _unmeasured(self, known: Sequence[str]) -> Iterator[str]:
        for title, metric in self._output():
            if metric not in known:
                yield f"{self.name}: output: {title}: nothing measures {metric}{did_you_mean(metric, known)}"

    def _variants(self) -> Iterator[dict[str, str]]:
        """A list is a table with its names first; a mapping is every combination of its comma-separated values."""
        given = self.content.get("parameters", {})
        if isinstance(given, list) and len(given) > 1 and all(isinstance(row, list) for row in given):
            names, *rows = given
            for row in rows:
                if len(row) != len(names):
                    raise self._mistake(f"parameters: a row has {counted(len(row), 'value')}, wanted {len(names)}")
                cells = [self._scalar(cell, "parameters") for cell in (*names, *row)]
                yield dict(zip(cells[: len(names)], cells[len(names) :], strict=True))
            return
        if not isinstance(given, Mapping):
            raise self._mistake("parameters: wanted a mapping such as `batchsize: 1,64`, or rows below their names")
        values = [
            value if isinstance(value, list) else self._scalar(value, "parameters").split(",")
            for value in given.values()
        ]
        for name, choices in zip(given, values, strict=True):
            spelled = [self._scalar(choice, f"parameters: {name}").strip() for choice in choices]
            if not spelled or len(set(spelled)) < len(spelled):
                raise self._mistake(f"parameters: {name}: got '{','.join(spelled)}', wanted values, each once")
        for row in product(*values):
            yield {str(name): str(value).strip() for name, value in zip(given, row, strict=True)}

    def _environment(self) -> Iterator[tuple[str, str]]:
        for name, value in self._mapping("env").items():
            if not re.fullmatch(r"[^=\0]+", str(name)):
                raise self._mistake(f"env: {name!r} is no name of a variable")
            yield str(name), self._scalar(value, f"env: {name}")

    def _metric(self, name: str, entry: Any) -> Metric:
        if not isinstance(entry, Mapping) or "regexp" not in entry:
            raise self._mistake(f"data: {name}: wanted a regexp with one group")
        self._check_keys(entry, ("regexp", "skip", "reduction_type"), f"data: {name}: ")
        reduction = entry.get("reduction_type", "mean")
        if reduction not in REDUCTIONS:
            raise self._mistake(f"data: {name}: reduction_type: got '{reduction}', wanted {', '.join(REDUCTIONS)}")
        try:
            pattern = re.compile(self._scalar(entry["regexp"], f"data: {name}: regexp"))
        except re.error as error:
            raise self._mistake(f"data: {name}: regexp: {error}") from error
        if pattern.groups != 1:
            raise self._mistake(f"data: {name}: regexp: has {pattern.groups} groups, wanted one around the number")
        skip = str(entry.get("skip", "0"))
        if not (skip.isascii() and skip.isdecimal()):
            raise self._mistake(f"data: {name}: skip: got '{skip}', wanted a whole number, at least 0")
        return Metric(pattern=pattern, skip=int(skip), reduction=reduction)

    def _expression(self, name: str, entry: Any, known: Sequence[str]) -> str:
        if not isinstance(entry, Mapping) or "expr" not in entry:
            raise self._mistake(f"derived: {name}: wanted an expr such as '{{throughput}} / 4'")
        self._check_keys(entry, ("expr", "reduction_type", "skip"), f"derived: {name}: ")
        try:
            check_expression(str(entry["expr"]))
        except ConfigError as error:
            raise self._mistake(f"derived: {name}: {error}") from error
        for used in names_in(str(entry["expr"])):
            if used not in known:
                meant = did_you_mean(used, known) or "; wanted a metric or a parameter"
                raise self._mistake(f"derived: {name}: nothing is known of {{{used}}}{meant}")
        return str(entry["expr"])

    def _output(self) -> Iterator[tuple[str, str]]:
        given = self.content.get("output", [])
        rows = given if isinstance(given, list) else None
        if rows is None or any(not isinstance(row, list) or len(row) != 2 for row in rows):
            raise self._mistake("output: wanted a list of pairs such as [samples/sec, throughput]")
        yield from ((str(title), str(metric)) for title, metric in rows)

    def _text(self, key: str) -> str:
        value = self._scalar(self.content[key], key)
        if not value.strip():
            raise self._mistake(f"{key}: wanted text")
        return value

    def _scalar(self, value: Any, where: str) -> str:
        if not isinstance(value, str) or "\0" in value:
            raise self._mistake(f"{where}: wanted text")
        return value

    def _mapping(self, key: str) -> Mapping[Any, Any]:
        value = self.content.get(key) or {}
        if not isinstance(value, Mapping):
            raise self._mistake(f"{key}: wanted a mapping")
        return value

    def _number(self, key: str) -> float | None:
        if key not in self.content:
            return None
        try:
            number = float(self.content[key])
        except (TypeError, ValueError):
            number = 0.0
        if not number > 0:
            raise self._mistake(f"{key}: got '{self.content[key]}', wanted a number of seconds, more than 0")
        return number

    def _check_keys(self, mapping: Mapping[Any, Any], known: Sequence[str], where: str) -> None:
        for key in mapping:
            if key not in known:
                wanted = f"; wanted {', '.join(known[:10])}"
                raise self._mistake(f"{where}unknown key '{key}'{did_you_mean(str(key), known) or wanted}")

    def _mistake(self, what: str) -> ConfigError:
        return ConfigError(f"{self.where}: {self.name}: {what}")
