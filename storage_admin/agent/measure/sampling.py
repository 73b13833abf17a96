"""Pieces of an image, drawn evenly and by chance, and what can be said of the whole from them."""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from storage_admin.agent.lifeline import AgentIO

#: Largest piece that a sample compresses at once, in bytes. The window of qemu's zlib is 4 KiB: more says no more.
MAX_PIECE = 64 * 1024
#: Rounds that the sample is drawn in, so that a sample that runs out of time is still spread over the whole image.
ROUNDS = 16
#: Bytes in which space can be given back to a filesystem.
BLOCK = 4096
_TELL_SECONDS = 0.1
#: Nobody writes to it, so that it takes a page of memory and not all of its own.
_ZEROS = bytes(4 << 20)
#: How many times the time of a sample its image's tables may take: half a minute, with the usual second.
_TABLES_TIMES = 30
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


def is_zeros(piece: bytes) -> bool:
    """Whether a piece holds zeros only; an empty one does."""
    # One comparison of memory, where to strip or to count would look at each byte.
    return _ZEROS.startswith(piece) if len(piece) <= len(_ZEROS) else not piece.strip(b"\0")


def zero_runs(piece: bytes) -> tuple[int, int]:
    """Bytes of a piece in blocks of 4 KiB that hold zeros only, and how many separate stretches these make.

    Args:
        piece: a multiple of 4 KiB long.
    """
    if is_zeros(piece):
        return len(piece), 1 if piece else 0
    empty = bytes(BLOCK)
    # One byte a block, so that stretches are counted by looking for their beginnings.
    blocks = bytes([piece.startswith(empty, start) for start in range(0, len(piece), BLOCK)])
    return BLOCK * blocks.count(1), blocks.count(b"\0\1") + blocks[0]


@dataclass
class Sample:
    """Numbers that were measured on pieces.

    Args:
        population: how many pieces there are in all.
        most: the largest value that a piece can have.
    """

    population: int
    most: float
    drawn: int = 0
    _mean: float = 0.0
    _squares: float = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Take in what was measured on one more piece, or the same on several.

        No value is kept, as there may be millions (Welford's sums, as Chan and others put two together).
        """
        before, away = self.drawn, value - self._mean
        self.drawn += times
        if self.drawn:
            self._mean += away * times / self.drawn
            self._squares += away * away * before * times / self.drawn

    @property
    def mean(self) -> float:
        """Of what was measured; 0 where nothing was."""
        return self._mean

    def total(self) -> float:
        """Of all pieces, estimated."""
        return self.mean * self.population

    def margin(self) -> float:
        """How far the true total may lie from the estimate: three standard errors.

        A rare kind of piece may not have been drawn at all: three in as many as were drawn are allowed for that
        (the rule of three).
        """
        drawn = self.drawn
        if drawn >= self.population:
            return 0.0
        if drawn < 2:
            return self.most * self.population
        variance = self._squares / (drawn - 1)
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


class Pace:
    """Which pieces are looked at, how long that may take, and who is told of it.

    Args:
        io: the controller.
        whole: every piece is looked at, however long it takes.
        samples: how many pieces are wanted, else.
        seconds: of processor time that the sample may take, else.
        chance: where the luck comes from.
    """

    def __init__(self, io: AgentIO, *, whole: bool, samples: int, seconds: float, chance: random.Random) -> None:
        self.io, self.whole = io, whole
        self._samples, self._seconds, self._chance = samples, seconds, chance
        self._told = 0.0

    def tell(self, stage: str, done: int, total: int) -> None:
        """Look after the lifeline and say how far a stage is, in bytes; ten times a second are enough."""
        now = time.monotonic()
        if now - self._told >= _TELL_SECONDS:
            self._told = now
            self.io.check()
            self.io.progress(stage, done, total)

    def share(self, share: float) -> Pace:
        """As this one, with such a share of its time."""
        pace = copy.copy(self)
        pace._seconds *= share
        return pace

    def as_sample(self) -> Pace:
        """As this one, for a sample beside a full look, which says nothing of itself."""
        pace = Pace(self.io, whole=False, samples=self._samples, seconds=self._seconds, chance=self._chance)
        pace._told = math.inf
        return pace

    def deadline_of_tables(self) -> float | None:
        """Until when an image's tables have to be read, on the monotonic clock; all of them are, also for a sample."""
        return None if self.whole else time.monotonic() + _TABLES_TIMES * self._seconds

    def looked_at(self, population: int) -> int:
        """How many pieces are looked at, at most."""
        return population if self.whole else min(population, self._samples)

    def drawn(self, population: int) -> Iterator[Sequence[int]]:
        """Numbers of the pieces to look at, in ascending lists: all of them at once, or round after round."""
        if self.whole:
            yield range(population)
            return
        budget = Budget(self._seconds)
        for numbers in rounds(population, self._samples, self._chance):
            if not budget.allows_another_round():
                return
            yield numbers
