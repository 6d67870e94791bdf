"""What ``serve`` keeps of memory it no longer uses; each in a process of its own, since the settings are a process'."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

from extproc import heap

SETTLED = """
import gc, json
from extproc import heap
loaded = [[] for _ in range(10_000)]
heap.settle()
later = [[] for _ in range(10)]
watched = {id(one) for one in gc.get_objects()}
print(json.dumps([sum(id(one) in watched for one in some) for some in (loaded, later)]))
"""
#: Six threads that take memory at once; then how many heaps glibc says there are.
HEAPS = """
import ctypes, json, tempfile, threading
from extproc import heap
heap.share_heaps()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
all_have = threading.Barrier(7)
def take():
    libc.malloc(1000)
    all_have.wait()
    all_have.wait()
threads = [threading.Thread(target=take) for _ in range(6)]
for thread in threads:
    thread.start()
all_have.wait()
with tempfile.NamedTemporaryFile() as file:
    told = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, told)
    libc.fclose(told)
    print(json.dumps(file.read().count(b"<heap nr=")))
all_have.wait()
"""


def told(script: str, **environment: str) -> object:
    """What a script prints as JSON."""
    known = {name: value for name, value in os.environ.items() if name != heap.HEAPS_VARIABLE}
    found = subprocess.run(
        [sys.executable, "-c", script], env=known | environment, stdout=subprocess.PIPE, check=True, timeout=300
    )
    return json.loads(found.stdout)


def test_what_was_loaded_is_out_of_later_collections() -> None:
    """The collector looks at nothing that lived before, and at everything that was made since."""
    assert told(SETTLED) == [0, 10]


@pytest.mark.parametrize(("environment", "heaps"), [({}, heap.HEAPS), ({heap.HEAPS_VARIABLE: "4"}, 4)])
def test_threads_share_heaps_unless_the_environment_says_how_many(environment: dict[str, str], heaps: int) -> None:
    """Six threads get one heap beside the first thread's; an operator's own number stands."""
    if platform.libc_ver()[0] == "glibc":
        assert told(HEAPS, **environment) == heaps
    else:
        assert told("import json\nfrom extproc import heap\nprint(json.dumps(heap.share_heaps()))") is None
