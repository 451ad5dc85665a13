"""The page of options is the schema's, never a copy that went stale."""

from pathlib import Path

from falconet.config.docs import options_page

ROOT = Path(__file__).parents[2]


def test_the_page_of_options_is_not_stale():
    assert (ROOT / "docs/knowing/options.md").read_text() == options_page(), "run `make docs`"
