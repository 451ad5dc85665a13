"""CRC-32C against published values and another implementation."""

import numpy as np
import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as tensorboards
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from falconet.data import native
from falconet.data.shards import crc32c, crc32c_numpy, unmasked

# RFC 3720, appendix B.4, and the check value of the CRC catalogue.
PUBLISHED = {
    b"123456789": 0xE3069283,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
    b"": 0,
}


def portable(data):
    library = native.library()
    if library is None:
        pytest.skip(native.why_not())
    return library.crc32c(data, portable=True)


@pytest.mark.parametrize("function", [crc32c, crc32c_numpy, portable])
@pytest.mark.parametrize(("data", "checksum"), PUBLISHED.items())
def test_published_values(function, data, checksum):
    assert function(data) == checksum


@pytest.mark.parametrize("length", [1, 3, 4, 5, 127, 128, 129, 255, 257, 1000, 4096, 70_001])
def test_every_implementation_agrees_with_tensorboards(length):
    data = np.random.default_rng(length).bytes(length)
    assert crc32c(data) == crc32c_numpy(data) == portable(data) == tensorboards(data)


def test_the_mask_is_tensorflows():
    data = b"some bytes"
    assert unmasked(masked_crc32c(data)) == crc32c(data)
