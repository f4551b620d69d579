"""The end of a forked process: what is open is complete, and what is blocked is given up."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

from tests.support.programs import run_python

# Stands for a forked process: all that is imported after `freeze` is its own.
PROGRAM = """
import sys
from phalanx.runtime import interpreter_exit
interpreter_exit.freeze()
sys.path.insert(0, sys.argv[1])
sys.modules["tarfile"] = None  # whatever may be there
import holding
interpreter_exit.leave(3)
"""
HOLDS = """
import gzip, os, tempfile, zipfile
here = os.path.dirname(__file__)
def hold():
    packed = gzip.open(f"{here}/packed.gz", "wt")
    packed.write("all of it")
    yield
held = hold()  # the files are in a frame that does not end
next(held)
outer = gzip.open(f"{here}/twice.gz", "wb")
inner = gzip.open(outer, "wb")
inner.write(b"all of it")
archive = zipfile.ZipFile(f"{here}/archive.zip", "w")
archive.writestr("name", "all of it")
temporary = tempfile.NamedTemporaryFile(dir=here, prefix="temporary")
plain = open(f"{here}/plain", "w")
plain.write("all of it")
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


def end(folder: Path, text: str) -> None:
    (folder / "holding.py").write_text(text)
    ended = run_python("-c", PROGRAM, str(folder), timeout=60.0)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "", "")


def test_what_is_still_open_is_complete_and_temporary_files_are_gone(tmp_path: Path) -> None:
    end(tmp_path, HOLDS)

    assert (tmp_path / "plain").read_text() == "all of it"
    packed, twice = (tmp_path / f"{name}.gz" for name in ("packed", "twice"))
    assert gzip.decompress(packed.read_bytes()) == b"all of it"
    assert gzip.decompress(gzip.decompress(twice.read_bytes())) == b"all of it"
    with zipfile.ZipFile(tmp_path / "archive.zip") as archive:
        assert archive.read("name") == b"all of it"
    assert not list(tmp_path.glob("temporary*"))


def test_a_stream_that_a_thread_holds_does_not_keep_the_others_from_being_written(
    tmp_path: Path,
) -> None:
    end(tmp_path, BLOCKED)

    assert (tmp_path / "plain").read_text() == "all of it"
