"""How many devices a command was written for, read off its words before it runs."""

import re
from collections.abc import Mapping, Sequence

from falconet.config.named import values_of

_OPTION = re.compile(r"--?([A-Za-z][\w-]*)(?:=(.*))?", re.S)


def devices_needed(argv: Sequence[str]) -> int:
    """Replicas times stages (or shards), as the line, its launcher or its named config says; 1 if nobody does."""
    options = _options(argv)
    predicts = {"infer", "serve"} & set(argv) or any(word.endswith("run_benchmark.py") for word in argv)
    config = values_of((options.get("config") or [""])[0], use="bench infer" if predicts else "train")
    if "num-replicas" in options:  # poprun
        return _number(options, "num-replicas") * _number(options, "ipus-per-replica")
    for processes in ("nproc-per-node", "np", "n"):  # torchrun, mpirun
        if processes in options and argv[0] in ("torchrun", "mpirun", "mpiexec", "srun"):
            return _number(options, processes)
    replicas = _number(options, "replicas") if "replicas" in options else _stored(config, "replicas")
    return replicas * _stages(options, config)


def _options(argv: Sequence[str]) -> dict[str, list[str]]:
    """Every option with its values; the later one counts."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in argv:
        match = _OPTION.fullmatch(word)
        if match:
            values = found[match[1].replace("_", "-")] = [] if match[2] is None else [match[2]]
        else:
            values.append(word)
    return found


def _stages(options: Mapping[str, list[str]], config: Mapping[str, object]) -> int:
    if "shards" in options:  # TensorFlow's word
        return _number(options, "shards")
    splits: object = options.get("pipeline-splits", options.get("pipeline-split", config.get("pipeline-splits", [])))
    names = splits if isinstance(splits, list) else [splits]
    if names and str(names[0]).startswith("auto:"):
        return max(1, _whole(str(names[0]).removeprefix("auto:")))
    return len(names) + 1


def _number(options: Mapping[str, list[str]], name: str) -> int:
    return _whole((options.get(name) or ["1"])[0])


def _stored(config: Mapping[str, object], name: str) -> int:
    return _whole(str(config.get(name, "1")))


def _whole(text: str) -> int:
    """1 for what is no number: the command itself says what is wrong with it."""
    return int(text) if text.isascii() and text.isdecimal() else 1
