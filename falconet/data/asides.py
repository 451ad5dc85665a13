"""A line beside the output, about the data: on standard error, as progress is."""

from rich.console import Console


def say(text: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False, emoji=False)
