"""Values of old lines as texts of new ones."""

import pytest

from falconet.legacy.table import short

NUMBERS = {
    16384.0: "16384",
    0.5: "0.5",
    0.1 + 0.2: "0.3",  # what arithmetic left in the last digit
    2**-9.5 * 2304: "3.181980515339464",
    3e-05: "3e-05",
    2.0**-60: "8.67361738e-19",  # the originals' rates are powers of two
}


@pytest.mark.parametrize(("number", "text"), NUMBERS.items())
def test_a_number_is_typed_as_a_person_would_with_every_digit_that_matters(number, text):
    assert short(number) == text
