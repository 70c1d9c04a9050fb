#!/usr/bin/env python3
"""Fails when an object file lacks machine code that loads on one of the given GPUs.

Reads the fat binaries that nvcc puts into objects (the headers of their entries; needs no tool of the toolkit), prints
what code there is and where it loads, and exits 1 when some object has none for a GPU, or no fat binary at all.
"""

import argparse
import collections
import pathlib
import struct
import sys

FATBIN = struct.pack("<I", 0xBA55ED50)  # then version (2 bytes), size of this header (2), size of what follows (8)
ENTRY = struct.Struct("<HHIQIIHHIIIQ")  # kind, version, sizes of header and payload, ..., architecture, ..., flags
PTX, ELF = 1, 2
SPECIFIC, FAMILY = 1 << 20, 1 << 21  # flags


class Code(collections.namedtuple("Code", "machine number suffix")):
    def __str__(self):
        return f"{'sm' if self.machine else 'compute'}_{self.number}{self.suffix}"

    def loads_on(self, capability):
        """Without the driver's compiler. Code of one GPU ("a") loads there alone, all other code in its family."""
        if not self.machine or self.number // 10 != capability // 10:
            return False
        return self.number == capability if self.suffix == "a" else self.number <= capability


def codes_in(data):
    at = data.find(FATBIN)
    while at >= 0:
        header, size = struct.unpack_from("<HQ", data, at + 6)
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, head, payload, *_, number, _, _, flags = ENTRY.unpack_from(data, entry)
            if head < ENTRY.size:
                raise ValueError("an entry of a fat binary has a header that this script does not know")
            if kind in (PTX, ELF):
                yield Code(kind == ELF, number, "a" if flags & SPECIFIC else "f" if flags & FAMILY else "")
            entry += head + payload
        at = data.find(FATBIN, end)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("object", nargs="+", type=pathlib.Path)
    parser.add_argument("--loads-on", action="append", default=[], metavar="X.Y", help="a compute capability")
    arguments = parser.parse_args()
    capabilities = {text: int(text.replace(".", "")) for text in arguments.loads_on}

    bad = 0
    seen = collections.Counter()
    for path in arguments.object:
        found = sorted(set(codes_in(path.read_bytes())))
        seen.update(found)
        if not found:
            print(f"{path}: no fat binary")
            bad += 1
        for text, capability in capabilities.items():
            if found and not any(code.loads_on(capability) for code in found):
                print(f"{path}: no machine code that loads on {text}, only {', '.join(map(str, found))}")
                bad += 1
    for code, objects in sorted(seen.items()):
        where = [text for text, capability in capabilities.items() if code.loads_on(capability)]
        what = f"loads on {', '.join(where) or 'none of these GPUs'}" if code.machine else "is compiled by the driver"
        print(f"{code}: in {objects} of {len(arguments.object)} objects, {what}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
