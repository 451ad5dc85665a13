"""A line beside the output, about the data: on standard error, as progress is."""

from falconet.report.screen import Lines


def say(text: str) -> None:
    Lines(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False, emoji=False)
