"""Read damaged bags as a conversion does, in a process with a memory limit and a clock.

Usage: fuzz_worker.py FOLDER FIRST COUNT. Prints one JSON line per case and a last one with the
figures. Every case is named by its number: `fuzz_worker.py FOLDER 1234 1` repeats one.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np

from penstock.bags import open_bag
from penstock.conversion.guess import guess_mapping
from penstock.conversion.plan import plan_bag
from penstock.errors import DataError, PenstockError
from penstock.samples import write_sample

MOST_S = 10.0
MOST_BYTES = 3 * 2**30  # of address space; the libraries map more than a gigabyte by themselves
MOST_GROWTH_KB = 300_000  # of resident memory
KINDS = [
    ("bag", "none"),
    ("bag", "lz4"),
    ("bag", "bz2"),
    ("mcap", "none"),
    ("mcap", "zstd"),
    ("mcap", "lz4"),
    ("db3", "none"),
    ("db3", "zstd"),
]
LENGTHS = (0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0x10000000, 0x00FFFFFF, 0)


def damage(good: bytes, rng: np.random.Generator) -> tuple[str, bytes]:
    """Damage bytes in one of the ways that happen, or that somebody would try."""
    data = bytearray(good)
    at = int(rng.integers(len(data)))
    kind = ("cut", "flip", "flips", "length", "long", "random", "page", "lost", "twice", "garbage")[
        int(rng.integers(10))
    ]
    match kind:
        case "cut":
            del data[at:]
        case "flip":
            data[at] ^= 1 << int(rng.integers(8))
        case "flips":
            for place in rng.integers(len(data), size=20):
                data[place] ^= 1 << int(rng.integers(8))
        case "length":
            data[at : at + 4] = int(rng.choice(LENGTHS)).to_bytes(4, "little")
        case "long":  # 64 bits, little (mcap) or big (sqlite)
            value = (2**63 - 1, 2**64 - 1, 2**40, 2**31)[int(rng.integers(4))]
            data[at : at + 8] = value.to_bytes(8, "big" if rng.integers(2) else "little")
        case "random":
            count = int(rng.integers(1, 600))
            data[at : at + count] = rng.bytes(count)
        case "page":
            begin = at // 4096 * 4096
            data[begin : begin + 4096] = bytes(len(data[begin : begin + 4096]))
        case "lost":
            del data[at : at + int(rng.integers(1, 5000))]
        case "twice":
            data[at:at] = data[at // 2 : at // 2 + int(rng.integers(1, 5000))]
        case "garbage":
            keep = int(rng.integers(16, 64))
            data[keep:] = rng.bytes(int(rng.integers(0, 5000)))
    return kind, bytes(data)


def use(path: Path, salvage: bool) -> str:
    """Open, plan, read and decode everything; return how it went."""
    with open_bag(path, salvage=salvage) as bag:
        try:
            plan_bag(bag, guess_mapping(bag))
        except PenstockError as error:
            check_text(error)
        decoders = {}
        for topic in bag.topics:
            bag.times(topic)
            try:
                decoders[topic] = bag.decoder(topic)
                decoders[topic].fields()
            except DataError as error:
                check_text(error)
        count = 0
        for message in bag.read():
            count += 1
            decoder = decoders.get(message.topic)
            if decoder is None:
                continue
            try:
                decoder.stamp_ns(message.data)
                if "Image" in bag.topics[message.topic].type:
                    decoder.image(message.data)
                elif count % 7 == 0:
                    [decoder.vector(message.data, path) for path in decoder.fields()]
            except DataError as error:
                check_text(error)
        if count != bag.message_count:
            raise AssertionError(f"{count} messages read of {bag.message_count}")
        return "salvaged" if bag.salvage is not None and str(bag.salvage) else "read"


def check_text(error: PenstockError) -> str:
    text = str(error)
    if "\n" in text or len(text) > 500:
        raise AssertionError(f"not one line: {text!r}")
    return text


def main(folder: Path, first: int, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    good: dict[tuple[str, str], bytes] = {}
    size = {"seconds": 0.1, "cameras": 1, "width": 64, "height": 48, "state_hz": 50}
    for kind, compression in KINDS:
        path = folder / f"good-{compression}.{kind}"
        facts = write_sample(path, kind=kind, compression=compression, **size)
        good[kind, compression] = facts.path.read_bytes()
        # What is imported lazily is imported now, so that it does not count as growth.
        use(facts.path, False)
    base_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: dict[str, int] = {}
    wrong = []
    slowest_s = 0.0
    for case in range(first, first + count):
        rng = np.random.default_rng([11, case])
        kind, compression = KINDS[case % len(KINDS)]
        how, data = damage(good[kind, compression], rng)
        path = folder / f"{case}.{kind}"
        path.write_bytes(data)
        for salvage in (False, True):
            # A hang ends the process: the watchdog prints where, and no figures follow.
            faulthandler.dump_traceback_later(MOST_S, exit=True)
            start_s = time.perf_counter()
            try:
                outcome = use(path, salvage)
            except PenstockError as error:
                outcome = "refused"
                if str(path) not in check_text(error):
                    wrong.append(f"case {case} {how} {salvage=}: names no file: {error}")
            except BaseException as error:
                outcome = "wrong"
                wrong.append(f"case {case} {how} {salvage=}: {type(error).__name__}: {error}")
            faulthandler.cancel_dump_traceback_later()
            slowest_s = max(slowest_s, time.perf_counter() - start_s)
            label = f"{outcome} with salvage" if salvage else outcome
            outcomes[label] = outcomes.get(label, 0) + 1
        os.unlink(path)
        for left in folder.glob(f"{case}.{kind}?*"):
            left.unlink()
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base_kb
    if grown_kb > MOST_GROWTH_KB:
        wrong.append(f"resident memory grew by {grown_kb} kB")
    figures = {
        "cases": count,
        "outcomes": outcomes,
        "slowest_s": round(slowest_s, 3),
        "grown_kb": grown_kb,
        "wrong": wrong,
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
