"""CRC-32C (Castagnoli), which the standard library does not have; RFC 3720, section 12.1 and appendix B.4.

Tables of headers end in long runs of zeros. Those are not walked byte by byte: to append zeros is to multiply the
state by a power of x, modulo the polynomial.
"""

from __future__ import annotations

from functools import lru_cache

#: The polynomial 0x1EDC6F41 with its bits in reverse, as all states here: the highest bit stands for x^0.
_POLYNOMIAL = 0x82F63B78
_ONE, _X = 1 << 31, 1 << 30


def crc32c(data: bytes) -> int:
    """The checksum of some bytes; takes time by the bytes up to the last one that is not zero."""
    filled = data.rstrip(b"\0")
    table, state = _table(), 0xFFFFFFFF
    for byte in filled:
        state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
    zeros = len(data) - len(filled)
    return _product(state, _power_of_x(8 * zeros)) ^ 0xFFFFFFFF


@lru_cache(maxsize=1)
def _table() -> tuple[int, ...]:
    return tuple(_product(byte, _power_of_x(8)) for byte in range(256))


def _product(left: int, right: int) -> int:
    """The product of two polynomials modulo the polynomial."""
    result = 0
    while right:
        if right & _ONE:
            result ^= left
        right = (right << 1) & 0xFFFFFFFF
        left = (left >> 1) ^ (_POLYNOMIAL if left & 1 else 0)
    return result


@lru_cache(maxsize=256)
def _power_of_x(exponent: int) -> int:
    """x to the power of ``exponent``, modulo the polynomial."""
    result, square = _ONE, _X
    while exponent:
        if exponent & 1:
            result = _product(result, square)
        square = _product(square, square)
        exponent >>= 1
    return result
