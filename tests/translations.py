"""Tables of lines and what they mean: one comparison each, whose failure shows every case that differs."""

from functools import cache

from falconet.errors import ConfigError
from falconet.legacy.table import Place
from falconet.legacy.translate import translate


@cache
def translated(program, line, replicas=None):
    """A line of one of the originals' programs."""
    return translate(program, line.split(), place=Place(replicas=replicas))


def settings(program, line, replicas=None):
    """Its canonical options by name."""
    return {setting.option: " ".join(setting.values) for setting in translated(program, line, replicas).settings}


def refusal(call):
    """The one line that a mistake is answered with; None: nothing was refused."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return None


def refused(program, line):
    return refusal(lambda: translated(program, line))


def wrong(cases, answer):
    """Every case whose answer is not the expected one: (case, answer, expected)."""
    answered = [(case, answer(case), expected) for case, expected in cases]
    return [each for each in answered if each[1] != each[2]]


def lacking(cases, answer):
    """The same for dictionaries, comparing only the keys of the expected ones; a missing key is None."""

    def shared(case):
        found = answer(case[0])
        return {key: found.get(key) for key in case[1]}

    return wrong([((case, expected), expected) for case, expected in cases], shared)


def unlike(cases, answer):
    """The same for lines, comparing only their starts."""
    answered = [(case, answer(case), start) for case, start in cases]
    return [each for each in answered if not (each[1] or "").startswith(each[2]) or "\n" in each[1]]
