"""Numbers with their words, as a person writes them."""


def counted(number: int, word: str) -> str:
    """`1 epoch`, `2,000 epochs`."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
