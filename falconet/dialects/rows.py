"""Short ways to write the rows of a dialect's table."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from falconet.dialects.table import Effect, Kind, Old, Rule, Say, To
from falconet.dialects.values import Values


def same(name: str, kind: Kind, default: str | None = None, *, new: str = "", effect: str = "", **more: Any) -> Old:
    """An option whose value is taken as it is, under its own name or a `new` one."""
    option = new or name.lstrip("-")

    def rule(old: Values) -> Iterable[Effect]:
        if kind == "flag":
            if old.flag(name):
                yield To(option)
        elif old.has(name):
            yield To(option, old.texts(name))

    says = effect or ("the same" if option == name.lstrip("-") else "the same, under another name")
    return Old(name=name, kind=kind, default=default, new=(option,), effect=says, rule=rule, **more)


def becomes(name: str, kind: Kind, default: str | None, new: str, rule: Rule, effect: str, **more: Any) -> Old:
    """An option whose value is worked out by `rule`; `new` names the canonical options it sets."""
    return Old(name=name, kind=kind, default=default, new=tuple(new.split()), effect=effect, rule=rule, **more)


def part_of(name: str, kind: Kind, default: str | None, new: str, effect: str, **more: Any) -> Old:
    """An option that the rule of another one reads."""
    return Old(name=name, kind=kind, default=default, new=tuple(new.split()), effect=effect, **more)


def nothing(name: str, kind: Kind, why: str, default: str | None = None, **more: Any) -> Old:
    """An option without effect here: `why` says so, and what to use instead."""

    def rule(old: Values) -> Iterable[Effect]:
        if old.given(name):
            yield Say(f"{name}: {why}")

    return Old(name=name, kind=kind, default=default, effect=why, rule=rule, **more)


def idle(option: Old, why: str) -> Old:
    """The same option in a program where it does nothing."""
    passive = nothing(option.name, option.kind, why)
    return replace(option, rule=passive.rule, new=(), effect=why, required=False)


IPU = "only tuned the IPU; nothing to set here"
