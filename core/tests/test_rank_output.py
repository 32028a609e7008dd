"""Lines, labels, progress bars and terminals."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.launch._output import LineWriter, OutputRouter, Sink, Source
from drivetrain.launch._processes import OutputPolicy, RankProcesses


def _writer(**options):
    stream = io.StringIO()
    return stream, LineWriter(Sink(stream), **options)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.binary(max_size=6).map(lambda b: bytes(b"ab\n\r"[c % 4] for c in b))),
        max_size=30,
    )
)
@settings(max_examples=200, deadline=None)
def test_any_chunking_keeps_every_byte_of_every_rank_and_mixes_no_lines(chunks):
    stream, writer = _writer()
    sources = [Source(label=f"[rank {i}] ".encode()) for i in range(3)]
    written = [b"", b"", b""]
    for i, data in chunks:
        writer.feed(sources[i], data, 0.0)
        written[i] += data
    for source in sources:
        writer.flush(source)
    writer.finish()
    lines = re.split(r"(?<=\n)|(?<=\r)(?!\n)", stream.getvalue())
    for i in range(3):
        label = f"[rank {i}] "
        mine = "".join(line.removeprefix(label) for line in lines if line.startswith(label))
        # Empty segments that a carriage return alone makes are written without a label.
        assert re.sub(r"[\r\n]", "", mine) == re.sub(r"[\r\n]", "", written[i].decode())
    for line in lines:
        assert line.count("[rank ") <= 1
        assert not line.strip() or line.startswith("[rank ")


def test_a_progress_bar_of_one_rank_keeps_drawing_over_itself():
    stream, writer = _writer()
    source = Source(label=b"[rank 1] ")
    for data in (b"\r 10%|#  ", b"\r 50%|## ", b"\r100%|###\n", b"done\n"):
        writer.feed(source, data, 0.0)
        writer.flush(source)
    assert stream.getvalue() == "\r[rank 1]  10%|#  \r[rank 1]  50%|## \r[rank 1] 100%|###\n[rank 1] done\n"


def test_an_unfinished_line_is_ended_before_another_ranks_line_and_goes_on_with_its_label():
    stream, writer = _writer()
    first, second = Source(label=b"[rank 0] "), Source(label=b"[rank 1] ")
    writer.feed(first, b"loading ", 0.0)
    writer.flush(first)
    writer.feed(second, b"hello\n", 0.0)
    writer.feed(first, b"done\n", 0.0)
    assert stream.getvalue() == "[rank 0] loading \n[rank 1] hello\n[rank 0] done\n"


def test_a_line_of_another_rank_wipes_the_bar_that_stands_on_the_terminal():
    stream, writer = _writer(erase=True)
    writer.feed(Source(label=b"[rank 1] "), b"hello\nagain\n", 0.0)
    assert stream.getvalue() == "\r\x1b[K[rank 1] hello\n\r\x1b[K[rank 1] again\n"


def test_unfinished_lines_appear_by_themselves_after_a_moment():
    stream = io.StringIO()
    router = OutputRouter()
    reading, writing = os.pipe()
    router.add(reading, Source(label=b"[rank 0] ", writer=LineWriter(Sink(stream))))
    os.write(writing, b"name? ")
    deadline = time.monotonic() + 5
    while not stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert stream.getvalue() == "[rank 0] name? "
    os.close(writing)
    router.close()


def test_a_stream_that_does_not_block_loses_nothing():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    received = bytearray()

    def read():
        time.sleep(0.2)
        while data := os.read(reading, 1 << 12):
            received.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(writing, "w") as stream:
        Sink(stream).write(b"x" * 500_000)
    reader.join()
    os.close(reading)
    assert len(received) == 500_000


def test_a_reader_that_is_gone_is_gone_for_the_rank_too():
    reading, writing = os.pipe()
    os.close(reading)
    broken = os.fdopen(writing, "w")
    router = OutputRouter()
    from_rank, rank_end = os.pipe()
    router.add(from_rank, Source(writer=LineWriter(Sink(broken))))
    os.write(rank_end, b"text")
    deadline = time.monotonic() + 5
    with pytest.raises(BrokenPipeError):
        while time.monotonic() < deadline:
            os.write(rank_end, b"more")
            time.sleep(0.02)
    router.close()
    os.close(rank_end)


SCRIPT = """
import os, sys
rank = int(os.environ["RANK"])
if rank == 1:
    print("from rank 1")
    print(sys.stdout.isatty())
else:
    sys.stderr.write("\\r 50%|#####     |")
    sys.stderr.flush()
    print(sys.stdout.isatty(), sys.stderr.isatty())
"""


def _on_terminal(tmp_path, script):
    """Run two ranks with a pseudo-terminal as the launcher's streams; what the terminal got."""
    ours, terminal = os.openpty()
    seen = bytearray()

    def read():
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while data := os.read(ours, 1 << 16):
                seen.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(terminal, "w") as stream:
        sink = Sink(stream)
        processes = RankProcesses(OutputPolicy(label=True, directory=None, stdout=sink, stderr=sink), tmp_path)
        environments = {rank: {**os.environ, "RANK": str(rank)} for rank in (0, 1)}
        processes.start(environments, [sys.executable, "-u", "-c", script])
        while processes.wait(1.0) is None:
            pass
        processes.close()
    reader.join()
    os.close(ours)
    return seen.decode().replace("\r\n", "\n")


def test_on_a_terminal_rank_0_has_it_and_the_others_are_labelled(tmp_path):
    seen = _on_terminal(tmp_path, SCRIPT)
    assert "True True\n" in seen
    assert "\r\x1b[K[rank 1] from rank 1\n" in seen
    assert "[rank 1] False\n" in seen
    assert "[rank 0]" not in seen
    assert "\r 50%|#####     |" in seen


def test_both_streams_keep_their_order_where_they_go_to_one_place(tmp_path):
    script = "import sys\nfor i in range(200):\n    print('out', i)\n    print('err', i, file=sys.stderr)\n"
    seen = _on_terminal(tmp_path, script)
    mine = re.findall(r"\[rank 1\] (.*)\n", seen)
    assert mine == [f"{kind} {i}" for i in range(200) for kind in ("out", "err")]


def test_only_rank_0_reads_the_launchers_input(tmp_path, monkeypatch):
    reading, writing = os.pipe()
    os.write(writing, b"typed\n")
    os.close(writing)
    saved = os.dup(0)
    os.dup2(reading, 0)
    try:
        stream = io.StringIO()
        sink = Sink(stream)
        processes = RankProcesses(OutputPolicy(label=True, directory=None, stdout=sink, stderr=sink), tmp_path)
        environments = {rank: {**os.environ, "RANK": str(rank)} for rank in (0, 1)}
        processes.start(environments, [sys.executable, "-c", "import sys; print(repr(sys.stdin.read()))"])
        while processes.wait(1.0) is None:
            pass
        processes.close()
    finally:
        os.dup2(saved, 0)
        os.close(saved)
        os.close(reading)
    assert sorted(stream.getvalue().splitlines()) == ["[rank 0] 'typed\\n'", "[rank 1] ''"]
