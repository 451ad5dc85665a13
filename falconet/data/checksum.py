"""CRC-32C, the checksum of TFRecords and packed shards: by the native library, or by numpy where there is none."""

from functools import cache

import numpy as np
import numpy.typing as npt

from falconet.data import native

Words = npt.NDArray[np.uint32]

POLYNOMIAL = np.uint32(0x82F63B78)  # Castagnoli's, its bits reversed
MASK_DELTA = 0xA282EAD8  # of TFRecords, whose checksums may lie within checksummed bytes
STRETCH = 128  # bytes; numpy goes through all stretches at once


def crc32c(data: bytes) -> int:
    """110 kB take 12 us natively and about 1 ms here."""
    library = native.library()
    return crc32c_numpy(data) if library is None else library.crc32c(data)


def unmasked(stored: int) -> int:
    """The checksum that TFRecords store so."""
    turned = (stored - MASK_DELTA) & 0xFFFFFFFF
    return (turned >> 17 | turned << 15) & 0xFFFFFFFF


def crc32c_numpy(data: bytes) -> int:
    """Equal stretches side by side, then neighbours joined: a checksum moved over n zero bytes is linear in its bits.

    Zero bytes in front change nothing while the register is 0, so the bytes are padded there to 2**k stretches; what
    the register begins with, all ones, is xored into the first four bytes instead.
    """
    if len(data) < 4:
        return _plain(data)
    lanes = 1 << (-(-len(data) // STRETCH) - 1).bit_length()
    padded = np.zeros(lanes * STRETCH, np.uint8)
    padded[-len(data) :] = np.frombuffer(data, np.uint8)
    padded[len(padded) - len(data) :][:4] ^= 0xFF
    words: Words = np.zeros(lanes, np.uint32)
    for column in padded.reshape(lanes, STRETCH).T:
        words = _table()[(words ^ column) & 0xFF] ^ (words >> 8)
    zeros = STRETCH
    while len(words) > 1:
        words = _moved(words[::2], zeros) ^ words[1::2]
        zeros *= 2
    return int(~words[0])


def _plain(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = int(_table()[(crc ^ byte) & 0xFF]) ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@cache
def _table() -> Words:
    """The register after one byte."""
    words: Words = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        words = (words >> np.uint32(1)) ^ np.where(words & np.uint32(1), POLYNOMIAL, np.uint32(0))
    return words


def _moved(words: Words, zeros: int) -> Words:
    """The registers after `zeros` zero bytes, a power of two."""
    tables = _operator(zeros)
    moved: Words = tables[0][words & 0xFF]
    for place in (1, 2, 3):
        moved = moved ^ tables[place][words >> np.uint32(8 * place) & 0xFF]
    return moved


@cache
def _operator(zeros: int) -> Words:  # 4 x 256: what each byte at each place of a register becomes
    bytes_at = np.arange(256, dtype=np.uint32)[None, :] << (8 * np.arange(4, dtype=np.uint32))[:, None]
    if zeros == 1:
        after: Words = _table()[bytes_at & 0xFF] ^ (bytes_at >> 8)
        return after
    return _moved(_moved(bytes_at, zeros // 2), zeros // 2)
