"""Log lines go where the program says, from any thread of the library, and do not hold it up."""

import logging
import os
import subprocess
import sys
import threading

import pytest
from time_scale import scaled

import deep_ep
from deep_ep import Buffer, ElasticBuffer


def lines_of(group):
    lines = []
    deep_ep.set_log_sink(lambda level, line: lines.append((level, line, threading.current_thread().name)), logging.DEBUG)
    buffer = Buffer(group, 1 << 22, 1 << 22, low_latency_mode=True, explicitly_destroy=True)
    text = buffer.describe()
    buffer.destroy()
    deep_ep.set_log_sink(None)
    kept = len(lines)
    Buffer(group, 1 << 22, explicitly_destroy=True).destroy()
    assert len(lines) == kept, "after set_log_sink has returned the sink is not called any more"
    assert lines and all(level in (10, 20, 30, 40) for level, _, _ in lines), lines
    assert {name for _, _, name in lines} == {"deep_ep log"}, "the library never waits for the sink"
    elastic = ElasticBuffer(group, num_bytes=1 << 22, explicitly_destroy=True)
    assert "rank" in elastic.describe()
    elastic.destroy()
    return text


def test_lines_and_descriptions(ranks):
    for rank, text in enumerate(ranks(2).run(lines_of)):
        assert f"rank {rank} of 2 on cpu" in text and "low latency: room for" in text, text


def test_mistakes():
    with pytest.raises(TypeError, match="sink is of type int"):
        deep_ep.set_log_sink(3)
    with pytest.raises(TypeError, match="least"):
        deep_ep.set_log_sink(print, "info")
    with pytest.raises(deep_ep.errors.InvalidArgument, match="least is 0"):
        deep_ep.set_log_sink(print, 0)


# One rank in a process of its own: the sink is there until the end, raises once, and a child has no thread for it.
PROGRAM = """
import logging, os, sys, threading
import deep_ep

class Alone:
    Get_rank, Get_size, allgather = (lambda self: 0), (lambda self: 1), (lambda self, mine: [mine])

reported = []
threading.excepthook = lambda args: reported.append(args.exc_type)

def sink(level, line):
    if not got:
        got.append(line)
        raise KeyError("once")
    got.append(line)
    try:
        deep_ep.set_log_sink(None)
    except RuntimeError as error:
        assert "the sink itself" in str(error)

got = []
deep_ep.set_log_sink(sink, logging.DEBUG)
for _ in range(2):
    deep_ep.Buffer(None, 1 << 22, comm=Alone(), explicitly_destroy=True).destroy()
child = os.fork()
if child == 0:
    deep_ep.set_log_sink(sink, logging.DEBUG)
    deep_ep.set_log_sink(None)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
deep_ep.set_log_sink(sink, logging.DEBUG)
assert len(got) > 1 and reported == [KeyError], (got, reported)

def last(level, line):
    sys.stdout.write(line + "\\n")
    sys.stdout.flush()

deep_ep.set_log_sink(last, logging.DEBUG)
buffer = deep_ep.Buffer(None, 1 << 22, comm=Alone())  # and it ends with the program
"""


def test_a_sink_that_raises_a_forked_child_and_the_end_of_the_program():
    environment = dict(os.environ, DEEP_EP_LOG="error")
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, timeout=scaled(60), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "lines come before the program ends"
