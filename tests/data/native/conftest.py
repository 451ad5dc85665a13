"""The library under test, photographs for it, and a small JPEG encoder for what Pillow does not write."""

import io
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from falconet.data import native
from falconet.data.native import compiler
from falconet.data.native.binding import Library


@pytest.fixture(scope="session")
def library() -> Library:
    """The library, built if it is missing or stale; tests are skipped only if there is no compiler."""
    try:
        compiler.find_compiler()
    except compiler.CannotBuildError as error:
        pytest.skip(str(error))
    if native.library() is None:
        compiler.build()
        from falconet.data.native import binding

        binding.load.cache_clear()
    found = native.library()
    assert found is not None, native.why_not()
    return found


def make_photo(width: int, height: int, seed: int) -> Image.Image:
    """Gradients, coloured shapes and noise of several grains: smooth parts, edges and texture, as in photographs."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    pixels = np.zeros((height, width, 3))
    for channel in range(3):
        a, b, c, d = rng.uniform(-1, 1, 4)
        pixels[..., channel] = 120 + 60 * (a * x + b * y) + 25 * np.sin(6 * (c * x + d * y))
    for grain, strength in ((1, 6), (3, 14), (12, 30)):
        coarse = rng.normal(0, strength, (height // grain + 2, width // grain + 2, 3))
        noise = np.stack([_enlarged(coarse[..., c], width, height) for c in range(3)], axis=-1)
        pixels += 0.7 * noise + 0.3 * noise.mean(axis=-1, keepdims=True)
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(6):
        left, top = rng.uniform(0, width), rng.uniform(0, height)
        right, bottom = left + rng.uniform(0, width / 2), top + rng.uniform(0, height / 2)
        colour = tuple(rng.integers(20, 236, 3).tolist())
        (draw.ellipse if rng.random() < 0.5 else draw.rectangle)((left, top, right, bottom), fill=colour)
    return image.filter(ImageFilter.GaussianBlur(0.8))  # a lens


def _enlarged(noise, width, height):
    return np.asarray(Image.fromarray(noise.astype(np.float32)).resize((width, height), Image.Resampling.BICUBIC))


@pytest.fixture(scope="session")
def photo() -> Callable[[int, int, int], Image.Image]:
    return make_photo


@pytest.fixture(scope="session")
def jpeg() -> Callable[..., bytes]:
    """A function that encodes an image with Pillow."""

    def written(image: Image.Image, **options) -> bytes:
        file = io.BytesIO()
        image.save(file, "JPEG", **options)
        return file.getvalue()

    return written


# The standard's example Huffman tables (annex K.3), luminance for all components: counts, then symbols.
DC_TABLE = (bytes((0, 1, 5, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0)), bytes(range(12)))
AC_COUNTS = bytes((0, 2, 1, 3, 3, 2, 4, 3, 5, 5, 4, 4, 0, 0, 1, 0x7D))
AC_SYMBOLS = bytes.fromhex(
    "01020300041105122131410613516107227114328191a1082342b1c11552d1f02433627282090a161718191a25262728292a3435363738393a"
    "434445464748494a535455565758595a636465666768696a737475767778797a838485868788898a92939495969798999aa2a3a4a5a6a7a8a9"
    "aab2b3b4b5b6b7b8b9bac2c3c4c5c6c7c8c9cad2d3d4d5d6d7d8d9dae1e2e3e4e5e6e7e8e9eaf1f2f3f4f5f6f7f8f9fa"
)
AC_TABLE = (AC_COUNTS, AC_SYMBOLS)
ZIG_ZAG = sorted(range(64), key=lambda k: (k // 8 + k % 8, k // 8 if (k // 8 + k % 8) % 2 else k % 8))
COSINES = np.array(
    [[np.sqrt((1 if u == 0 else 2) / 8) * np.cos((2 * x + 1) * u * np.pi / 16) for x in range(8)] for u in range(8)]
)


def _codes(table: tuple[bytes, bytes]) -> dict[int, str]:
    code, codes, symbols = 0, {}, iter(table[1])
    for length, count in enumerate(table[0], start=1):
        for _ in range(count):
            codes[next(symbols)] = format(code, f"0{length}b")
            code += 1
        code <<= 1
    return codes


def _value(value: int) -> str:
    return (
        ""
        if value == 0
        else format(value if value > 0 else value + (1 << abs(value).bit_length()) - 1, "b").zfill(
            abs(value).bit_length()
        )
    )


def _block_bits(coefficients: list[int], before: int, dc: dict[int, str], ac: dict[int, str]) -> str:
    difference = coefficients[0] - before
    bits = [dc[abs(difference).bit_length()] + _value(difference)]
    zeros = 0
    for value in coefficients[1:]:
        if value == 0:
            zeros += 1
            continue
        bits += [ac[0xF0]] * (zeros // 16)
        bits.append(ac[(zeros % 16) << 4 | abs(value).bit_length()] + _value(value))
        zeros = 0
    return "".join(bits) + (ac[0] if zeros else "")


def encode(image: Image.Image, sampling: tuple[tuple[int, int], ...], *, step: int = 4, restart: int = 0) -> bytes:
    """A baseline JPEG with these (horizontal, vertical) sampling factors for Y, Cb, Cr and one quantiser step."""
    planes = np.asarray(image.convert("YCbCr"), dtype=np.float64)
    widest, highest = max(h for h, _ in sampling), max(v for _, v in sampling)
    across, down = -(-image.width // (8 * widest)), -(-image.height // (8 * highest))
    padded = np.pad(
        planes, ((0, down * 8 * highest - image.height), (0, across * 8 * widest - image.width), (0, 0)), mode="edge"
    )
    blocks = []
    for c, (h, v) in enumerate(sampling):
        rx, ry = widest // h, highest // v
        plane = padded[..., c].reshape(down * 8 * v, ry, across * 8 * h, rx).mean(axis=(1, 3)) - 128
        cut = plane.reshape(down * v, 8, across * h, 8).transpose(0, 2, 1, 3)
        coefficients = np.rint(COSINES @ cut @ COSINES.T / step).astype(int)
        blocks.append(coefficients.reshape(down * v, across * h, 64)[..., ZIG_ZAG].tolist())
    dc, ac = _codes(DC_TABLE), _codes(AC_TABLE)
    segments, bits, before = [], [], [0] * len(sampling)
    for mcu in range(across * down):
        if restart and mcu and mcu % restart == 0:
            segments.append("".join(bits))
            bits, before = [], [0] * len(sampling)
        for c, (h, v) in enumerate(sampling):
            for block in range(h * v):
                coefficients = blocks[c][mcu // across * v + block // h][mcu % across * h + block % h]
                bits.append(_block_bits(coefficients, before[c], dc, ac))
                before[c] = coefficients[0]
    segments.append("".join(bits))
    return _file(image, sampling, step=step, restart=restart, segments=segments)


def _marker(code: int, payload: bytes) -> bytes:
    return bytes((0xFF, code)) + (len(payload) + 2).to_bytes(2, "big") + payload


def _file(image, sampling, *, step, restart, segments):
    size = image.height.to_bytes(2, "big") + image.width.to_bytes(2, "big")
    factors = b"".join(bytes((c + 1, h << 4 | v, 0)) for c, (h, v) in enumerate(sampling))
    parts = [
        b"\xff\xd8",
        _marker(0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0"),
        _marker(0xDB, bytes([0] + [step] * 64)),
        _marker(0xC0, bytes([8]) + size + bytes([len(sampling)]) + factors),
        _marker(0xC4, b"\x00" + DC_TABLE[0] + DC_TABLE[1]),
        _marker(0xC4, b"\x10" + AC_TABLE[0] + AC_TABLE[1]),
        _marker(0xDD, restart.to_bytes(2, "big")) if restart else b"",
        _marker(0xDA, bytes([len(sampling)]) + b"".join(bytes((c + 1, 0)) for c in range(len(sampling))) + b"\0\x3f\0"),
    ]
    for number, bits in enumerate(segments):
        bits += "1" * (-len(bits) % 8)
        coded = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\x00")
        parts += [coded, bytes((0xFF, 0xD0 + number % 8)) if number < len(segments) - 1 else b"\xff\xd9"]
    return b"".join(parts)


@pytest.fixture(scope="session")
def odd_jpeg() -> Callable[..., bytes]:
    return encode
