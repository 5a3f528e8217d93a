# SPDX-License-Identifier: Apache-2.0
"""The file of the primary tier in /dev/shm, which is as large as that tier."""

import glob
import os


def unlink_region(path: str, num_workers: int) -> bool:
    """Removes the name of the file as soon as all who need it have mapped it: each worker, and the scheduler. The
    memory then goes with the last of them, however that ends; vLLM itself removes the file only at an orderly end.
    False: not all have mapped it, or that can't be seen, so the name is left."""
    if _num_mappings(path) < num_workers + 1:
        return False
    os.unlink(path)
    return True


def _num_mappings(path: str) -> int:
    """Of the whole file, by all processes that can be seen. Each has one part that begins at offset 0."""
    return sum(_mappings_in(maps, path) for maps in glob.glob("/proc/[0-9]*/maps"))


def _mappings_in(maps: str, path: str) -> int:
    try:
        with open(maps, encoding="utf-8", errors="replace") as lines:
            return sum(line.split()[2] == "00000000" for line in lines if line.rstrip("\n").endswith(" " + path))
    except OSError:  # it has ended, or belongs to somebody else
        return 0
