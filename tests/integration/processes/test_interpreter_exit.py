"""The end of a forked process: what modules refer to is finalized, blocked streams are left."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import pytest
from tests.support.programs import run_python

# Reads its arguments before the fork that it stands for; all else is after it.
PROGRAM = """
import sys
from phalanx.runtime import interpreter_exit
folder, holding, name = sys.argv[1:]
interpreter_exit.freeze()
sys.path.insert(0, folder)
__import__(holding)
sys.modules[name] = sys.modules.pop(holding)
sys.modules["not_to_be_imported"] = None
interpreter_exit.leave(3)
"""
HOLDS = """
import gzip, os, tempfile, zipfile
here = os.path.dirname(__file__)
packed = gzip.open(f"{here}/packed.gz", "wt")
packed.write("all of it")
archive = zipfile.ZipFile(f"{here}/archive.zip", "w")
archive.writestr("name", "all of it")
temporary = tempfile.NamedTemporaryFile(dir=here, prefix="temporary")
import sys; me = sys.modules[__name__]
"""
# The lock of each stream is held by a thread that will not give it back.
BLOCKED = """
import io, os, threading, time
here = os.path.dirname(__file__)
read, write = os.pipe()
full = open(write, "wb", buffering=1 << 16)
os.set_blocking(write, False)
try:
    while True:
        os.write(write, bytes(1 << 16))
except BlockingIOError:
    os.set_blocking(write, True)
other, never = os.pipe()
both = io.BufferedRWPair(open(other, "rb", buffering=0), open(os.devnull, "wb", buffering=0))
first = io.TextIOWrapper(both, write_through=True)
plain = open(f"{here}/plain", "w")
plain.write("all of it")
started = threading.Barrier(3)
def hold(what):
    started.wait()
    what()
for what in (lambda: full.write(bytes(1 << 20)), lambda: first.read(1)):
    threading.Thread(target=hold, args=(what,), daemon=True).start()
started.wait()
time.sleep(0.1)  # nothing tells that a thread is within a write
"""


def end(folder: Path, text: str, name: str = "holding") -> str:
    (folder / "holding.py").write_text(text)
    ended = run_python("-c", PROGRAM, str(folder), "holding", name, timeout=60.0)
    assert (ended.returncode, ended.stdout) == (3, "")
    return ended.stderr


@pytest.mark.parametrize("name", ["holding", "__main__"])  # that of a program is a new one
def test_what_modules_refer_to_is_closed_and_removed(tmp_path: Path, name: str) -> None:
    assert end(tmp_path, HOLDS, name) == ""

    assert gzip.decompress((tmp_path / "packed.gz").read_bytes()) == b"all of it"
    with zipfile.ZipFile(tmp_path / "archive.zip") as archive:
        assert archive.read("name") == b"all of it"
    assert not list(tmp_path.glob("temporary*"))


def test_a_stream_that_a_thread_holds_does_not_keep_the_others_from_being_written(
    tmp_path: Path,
) -> None:
    end(tmp_path, BLOCKED)

    assert (tmp_path / "plain").read_text() == "all of it"
