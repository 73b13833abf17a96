"""Pieces of an image, drawn evenly and by chance, and what can be said of the whole from them."""

from __future__ import annotations

import math
import random
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

#: Largest piece that is compressed at once, in bytes. qemu's window is 4 KiB: larger pieces say no more.
MAX_PIECE = 64 * 1024
#: Rounds that the sample is drawn in, so that a sample that runs out of time is still spread over the whole image.
ROUNDS = 16
#: Bytes in which space can be given back to a filesystem.
BLOCK = 4096
#: How many standard errors the range spans to either side.
_SIGMAS = 3.0


def rounds(pieces: int, samples: int, chance: random.Random) -> Iterator[list[int]]:
    """Numbers of pieces, one by chance from each of ``samples`` equal stretches, in :data:`ROUNDS` ascending lists.

    Args:
        pieces: how many there are.
        samples: how many are wanted; where there are no more, each is drawn.
        chance: where the luck comes from.
    """
    wanted = min(pieces, samples)
    for start in range(min(ROUNDS, wanted)):
        yield [
            chance.randrange(number * pieces // wanted, (number + 1) * pieces // wanted)
            for number in range(start, wanted, ROUNDS)
        ]


def compressed_size(piece: bytes) -> int:
    """Bytes that qemu's zlib makes of a piece: raw deflate, 4 KiB window (qcow2-threads.c); at most all of it."""
    deflate = zlib.compressobj(zlib.Z_DEFAULT_COMPRESSION, zlib.DEFLATED, -12, 9, zlib.Z_DEFAULT_STRATEGY)
    return min(len(deflate.compress(piece)) + len(deflate.flush()), len(piece))


def zero_bytes(piece: bytes) -> int:
    """Bytes of a piece in blocks of 4 KiB that hold zeros only."""
    if not piece.strip(b"\0"):
        return len(piece)
    empty = bytes(BLOCK)
    blocks = range(0, len(piece) - BLOCK + 1, BLOCK)
    return BLOCK * sum(piece[start : start + BLOCK] == empty for start in blocks)


@dataclass
class Sample:
    """Numbers that were measured on pieces.

    Args:
        population: how many pieces there are in all.
        most: the largest value that a piece can have.
    """

    population: int
    most: float
    values: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        """Take in what was measured on one more piece."""
        self.values.append(value)

    @property
    def mean(self) -> float:
        """Of what was measured; 0 where nothing was."""
        return math.fsum(self.values) / len(self.values) if self.values else 0.0

    def total(self) -> float:
        """Of all pieces, estimated."""
        return self.mean * self.population

    def margin(self) -> float:
        """How far the true total may lie from the estimate: three standard errors.

        A rare kind of piece may not have been drawn at all: three in as many as were drawn are allowed for that
        (the rule of three).
        """
        drawn = len(self.values)
        if drawn >= self.population:
            return 0.0
        if drawn < 2:
            return self.most * self.population
        mean = self.mean
        variance = math.fsum((value - mean) ** 2 for value in self.values) / (drawn - 1)
        share_left = math.sqrt(1 - drawn / self.population)
        by_chance = max(_SIGMAS * math.sqrt(variance / drawn), _SIGMAS / drawn * self.most)
        return min(by_chance, self.most) * share_left * self.population


class Budget:
    """Time that a sample may take, asked for before each round; the first one is drawn whatever it takes.

    A round is drawn whole or not at all: half of one would count the image's beginning twice. What counts is the
    processor's time, so that a busy machine does not make a poor sample, up to four times as much of the clock's.

    Args:
        seconds: of processor time.
    """

    def __init__(
        self,
        seconds: float,
        processor: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processor, self._clock = processor, clock
        self._begun = self._asked = processor()
        self._seconds, self._deadline = seconds, clock() + 4 * seconds
        self._rounds = 0

    def allows_another_round(self) -> bool:
        """Whether one more round is to be drawn, which will cost about as much as the last one did."""
        now = self._processor()
        last, self._asked = now - self._asked, now
        self._rounds += 1
        if self._rounds == 1:
            return True
        return now - self._begun + last <= self._seconds and self._clock() < self._deadline
