"""Numbers with their words, as a person writes them."""


def counted(number: int, word: str) -> str:
    """`1 epoch`, `2,000 epochs`, `3 classes`."""
    many = "es" if word.endswith(("s", "tch")) else "s"
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}{many}"


def are(number: int, word: str) -> str:
    """`1 core is`, `2 cores are`."""
    return f"{counted(number, word)} {'is' if number == 1 else 'are'}"
