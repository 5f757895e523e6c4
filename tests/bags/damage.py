"""Ways to damage a file, and a full reading of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock.bags import open_bag
from penstock.errors import DataError


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    """Damage bytes in one of the ways that happen: cut, flipped bits, huge lengths, garbage."""
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(len(out))) if out else 0
        match int(rng.integers(7)):
            case 0:
                del out[at:]
            case 1:
                if out:
                    out[at] ^= 1 << int(rng.integers(8))
            case 2:
                out[at : at + 8] = rng.choice([0xFF, 0x7F, 0x00]).item().to_bytes(1, "little") * 8
            case 3:
                out[at : at + 4] = int(rng.integers(2**32)).to_bytes(4, "little")
            case 4:
                n = int(rng.integers(1, 64))
                out[at : at + n] = rng.bytes(n)
            case 5:
                n = int(rng.integers(1, 2000))
                del out[at : at + n]
            case 6:
                n = int(rng.integers(1, 2000))
                out[at:at] = out[at // 2 : at // 2 + n]
    return bytes(out)


def read_all(path: Path, *, salvage: bool, decode: bool = True) -> int:
    """Use every part of a bag; returns the number of messages."""
    count = 0
    with open_bag(path, salvage=salvage) as bag:
        decoders = {}
        for topic in bag.topics:
            bag.times(topic)
            if not decode:
                continue
            try:
                decoders[topic] = bag.decoder(topic)
                decoders[topic].fields()
            except DataError:
                continue
        for message in bag.read():
            count += 1
            decoder = decoders.get(message.topic)
            if decoder is not None and count % 5 == 0:
                try:
                    decoder.stamp_ns(message.data)
                    for path in decoder.fields():
                        decoder.vector(message.data, path)
                    if "Image" in bag.topics[message.topic].type:
                        decoder.image(message.data)
                except DataError:
                    continue
        assert count == bag.message_count
        str(bag.salvage)
    return count
