"""Relays Ethernet frames between TAP devices: `python frame_relay.py FD FD ...`.

Reads settings from its input, one JSON object a line, answers "done" to each and ends when the input
does. A frame goes to the device behind which its address was last seen, else to all others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import json
import os
import random
import selectors
import sys
import time

FRAME_BYTES = 1 << 16


@dataclasses.dataclass
class Settings:
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss_percent: float = 0.0
    dropped_host: int = -1


def relay(taps: list[int]) -> None:
    settings = Settings()
    dice = random.Random(7)
    places: dict[bytes, int] = {}
    late: list[tuple[float, int, int, bytes]] = []
    numbers = itertools.count()
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    for tap in taps:
        os.set_blocking(tap, False)
        selector.register(tap, selectors.EVENT_READ)

    def forward(source: int, frame: bytes) -> None:
        places[frame[6:12]] = source
        known = places.get(frame[:6])
        for target in taps if known is None else [known]:
            if target == source or dice.random() * 100 < settings.loss_percent:
                continue
            if settings.dropped_host in (taps.index(source), taps.index(target)):
                continue
            wait_ms = max(0.0, settings.delay_ms + settings.jitter_ms * dice.uniform(-1, 1))
            heapq.heappush(late, (time.monotonic() + wait_ms / 1e3, next(numbers), target, frame))

    while True:
        now = time.monotonic()
        while late and late[0][0] <= now:
            _, _, target, frame = heapq.heappop(late)
            with contextlib.suppress(OSError):  # down, or its queue is full: frames may be lost
                os.write(target, frame)
        timeout_s = max(0.0, late[0][0] - now) if late else None
        for key, _ in selector.select(timeout_s):
            if key.fileobj is sys.stdin:
                line = sys.stdin.readline()
                if not line:
                    return
                settings = dataclasses.replace(settings, **json.loads(line))
                sys.stdout.write("done\n")
                sys.stdout.flush()
                continue
            for _ in range(64):
                try:
                    frame = os.read(key.fd, FRAME_BYTES)
                except OSError:
                    break
                forward(key.fd, frame)


if __name__ == "__main__":
    relay([int(argument) for argument in sys.argv[1:]])
