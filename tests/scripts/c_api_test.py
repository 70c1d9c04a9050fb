"""deep_ep.h from another language: a binding by ctypes, what it refuses, and the header under strict compilers.

    c_api_test.py LIBRARY        the shared library deep_ep
"""

import array
import concurrent.futures
import ctypes
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BFLOAT16, INT64, FLOAT32 = 5, 3, 4
OK, INVALID, RANK_MISMATCH, OUT_OF_MEMORY, TIMEOUT, SYSTEM_ERROR, ERROR = 0, 1, 3, 4, 5, 7, 8
Handle = ctypes.c_void_p


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("dims", ctypes.c_int),
        ("shape", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 4),
    )


class Sized(ctypes.Structure):
    def __init__(self, **members):
        super().__init__(ctypes.sizeof(self), **members)


class Options(Sized):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("rank", ctypes.c_int),
        ("num_ranks", ctypes.c_int),
        ("all_gather", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)),
        ("context", ctypes.c_void_p),
        ("on_cpu", ctypes.c_int),
        ("device", ctypes.c_int),
        ("heap_bytes", ctypes.c_size_t),
        ("low_latency_bytes", ctypes.c_size_t),
        ("timeout_s", ctypes.c_double),
    )


class Dispatch(Sized):
    _fields_ = (
        ("size", ctypes.c_size_t),
        *((name, Tensor) for name in ("x", "x_scales", "topk_idx", "topk_weights")),
        ("num_experts", ctypes.c_int),
        ("num_worst_tokens", ctypes.c_int64),
    )


library = ctypes.CDLL(sys.argv.pop(1))
library.deep_ep_last_error.restype = ctypes.c_char_p
library.deep_ep_heap_bytes.restype = ctypes.c_size_t
library.deep_ep_heap_bytes.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
library.deep_ep_result_tensor.restype = Tensor
library.deep_ep_rows_per_expert.restype = ctypes.POINTER(ctypes.c_int)


def matrix(values, dtype, rows, columns):
    return Tensor(values.buffer_info()[0], dtype, 2, (rows, columns))


def refused(status):
    assert status == INVALID, status
    return library.deep_ep_last_error().decode()


class OneRank(unittest.TestCase):
    T, H, K, E = 5, 64, 2, 4

    def setUp(self):
        self.gathered = []

        def all_gather(_, mine, size, everything):
            self.gathered.append(size)
            ctypes.memmove(everything, mine, size)
            return 0 if self.agree else 9

        self.agree = True
        self.options = Options(rank=0, num_ranks=1, on_cpu=1, heap_bytes=library.deep_ep_heap_bytes(1, self.T, 2 * self.H, self.K))
        self.options.all_gather = type(self.options.all_gather)(all_gather)
        self.buffer = Handle()
        self.must(library.deep_ep_create(ctypes.byref(self.options), ctypes.byref(self.buffer)))
        self.x = array.array("H", [0x3F80 + t for t in range(self.T) for _ in range(self.H)])
        self.idx = array.array("q", [(t + k) % self.E for t in range(self.T) for k in range(self.K)])
        self.idx[0] = self.idx[1] = -1  # the first token goes nowhere
        self.weights = array.array("f", [1 + t + 0.5 * k for t in range(self.T) for k in range(self.K)])
        self.arguments = Dispatch(
            x=matrix(self.x, BFLOAT16, self.T, self.H),
            topk_idx=matrix(self.idx, INT64, self.T, self.K),
            topk_weights=matrix(self.weights, FLOAT32, self.T, self.K),
            num_experts=self.E,
        )

    def tearDown(self):
        self.must(library.deep_ep_destroy(self.buffer))

    def must(self, status):
        self.assertEqual(status, OK, library.deep_ep_last_error())

    def dispatch(self):
        result = Handle()
        return library.deep_ep_dispatch(self.buffer, ctypes.byref(self.arguments), None, ctypes.byref(result)), result

    def test_there_and_back(self):
        self.assertTrue(self.gathered, "the program's own all-gather was used")
        status, dispatched = self.dispatch()
        self.must(status)
        self.must(library.deep_ep_synchronize(self.buffer))
        rows = [library.deep_ep_result_tensor(dispatched, which) for which in range(7)]
        self.assertEqual([list(row.shape[: row.dims]) for row in rows], [[4, self.H], [], [4, self.K], [4, self.K], [], [], []])
        self.assertEqual([rows[0].dtype, rows[0].strides[0], rows[0].strides[1]], [BFLOAT16, self.H, 1])
        self.assertEqual(ctypes.string_at(rows[0].data, 2 * 4 * self.H), self.x[self.H :].tobytes())
        self.assertEqual(ctypes.string_at(rows[2].data, 64), self.idx[2:].tobytes())
        self.assertEqual(library.deep_ep_rows_per_expert(dispatched)[: self.E], [2, 2, 2, 2])
        again, combined = Handle(), Handle()
        x = self.arguments.x
        self.must(library.deep_ep_cached_dispatch(self.buffer, dispatched, ctypes.byref(x), None, ctypes.byref(again)))
        back = library.deep_ep_result_tensor(again, 0)
        self.must(
            library.deep_ep_combine(
                self.buffer, dispatched, ctypes.byref(back), ctypes.byref(rows[3]), None, ctypes.byref(combined)
            )
        )
        self.must(library.deep_ep_synchronize(self.buffer))
        sums, weights = (library.deep_ep_result_tensor(combined, which) for which in (5, 6))
        self.assertEqual(ctypes.string_at(sums.data, 2 * self.T * self.H), bytes(2 * self.H) + self.x[self.H :].tobytes())
        self.assertEqual(ctypes.string_at(weights.data, 4 * self.T * self.K), bytes(8) + self.weights[2:].tobytes())
        self.assertIsNone(library.deep_ep_result_tensor(combined, 0).data)
        wrong = library.deep_ep_combine(self.buffer, combined, ctypes.byref(back), None, None, ctypes.byref(Handle()))
        self.assertIn("handle is missing or empty", refused(wrong))
        for result in (again, combined, dispatched, None):
            library.deep_ep_release(result)

    def test_refusals_name_the_argument(self):
        def changed(value, change):
            change(value)
            status, result = self.dispatch()
            self.assertFalse(result)
            return refused(status)

        self.assertIn("x is bfloat16 of 9 dimensions", changed(self.arguments, lambda a: setattr(a.x, "dims", 9)))
        self.arguments.x.dims = 2
        self.assertIn("topk_idx.dtype is 77", changed(self.arguments, lambda a: setattr(a.topk_idx, "dtype", 77)))
        self.arguments.topk_idx.dtype = INT64
        self.assertIn("x is bfloat16[-3, 64]", changed(self.arguments, lambda a: a.x.shape.__setitem__(0, -3)))
        self.arguments.x.shape[0] = self.T
        size = self.arguments.size
        for wrong in (0, size + 1):
            self.assertIn(f"arguments->size is {wrong}", changed(self.arguments, lambda a, wrong=wrong: setattr(a, "size", wrong)))
        # A program of an older version ends its structure before num_worst_tokens.
        self.arguments.size, self.arguments.num_worst_tokens = Dispatch.num_worst_tokens.offset, -5
        status, dispatched = self.dispatch()
        self.must(status)
        self.assertIn("buffer is NULL", refused(library.deep_ep_synchronize(None)))
        self.assertIn("result is NULL", refused(library.deep_ep_dispatch(self.buffer, ctypes.byref(self.arguments), None, None)))
        place, x = Handle(1), ctypes.byref(self.arguments.x)
        same = library.deep_ep_low_latency_combine(self.buffer, dispatched, x, x, x, x, None)
        self.assertIn("needs low-latency memory", refused(same))
        self.assertIn("handle is NULL", refused(library.deep_ep_combine(self.buffer, None, x, None, None, ctypes.byref(place))))
        self.assertFalse(place, "nothing is left in the result")
        library.deep_ep_release(dispatched)
        self.assertEqual(library.deep_ep_heap_bytes(0, 1, 1, 1), 0)

    def test_a_group_that_cannot_meet(self):
        self.options.all_gather = type(self.options.all_gather)()
        buffer = Handle(1)
        self.assertIn("options->all_gather is NULL", refused(library.deep_ep_create(ctypes.byref(self.options), ctypes.byref(buffer))))
        self.assertFalse(buffer)
        self.setUp()
        self.agree = False
        self.assertEqual(library.deep_ep_destroy(self.buffer), SYSTEM_ERROR)
        self.assertIn(b"options->all_gather returned 9", library.deep_ep_last_error())
        self.setUp()


    def test_rows_that_have_no_room(self):
        self.arguments.num_worst_tokens = 1
        status, dispatched = self.dispatch()
        self.must(status)
        self.assertEqual(library.deep_ep_synchronize(self.buffer), OUT_OF_MEMORY, library.deep_ep_last_error())
        library.deep_ep_release(dispatched)
        library.deep_ep_destroy(self.buffer)
        self.setUp()

    def test_a_forked_child(self):
        child = os.fork()
        if child == 0:
            os._exit(library.deep_ep_synchronize(self.buffer))
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), ERROR)


class TwoRanks(unittest.TestCase):
    """As threads, whose calls run side by side."""

    def setUp(self):
        self.over = threading.Event()  # a rank waits for the other one no longer

    def on_ranks(self, function):
        gathered, met = [b"", b""], threading.Barrier(2)

        def all_gather(rank, mine, size, everything):
            if self.over.is_set():
                return 9
            gathered[rank or 0] = ctypes.string_at(mine, size)
            met.wait()
            ctypes.memmove(everything, b"".join(gathered), 2 * size)
            met.wait()
            return 0

        gather = dict(Options._fields_)["all_gather"](all_gather)
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            return list(threads.map(lambda rank: function(rank, gather), range(2)))

    def test_options_that_differ(self):
        def make(rank, gather):
            options = Options(rank=rank, num_ranks=2, all_gather=gather, context=rank, on_cpu=1, heap_bytes=(rank + 1) << 24)
            return library.deep_ep_create(ctypes.byref(options), ctypes.byref(Handle())), library.deep_ep_last_error()

        for status, text in self.on_ranks(make):
            self.assertEqual(status, RANK_MISMATCH, text)
            self.assertIn(b"heap_bytes", text)

    def test_a_rank_that_does_not_come(self):
        def call(rank, gather):
            options = Options(rank=rank, num_ranks=2, all_gather=gather, context=rank, on_cpu=1, heap_bytes=1 << 24, timeout_s=0.2)
            buffer, result = Handle(), Handle()
            status = library.deep_ep_create(ctypes.byref(options), ctypes.byref(buffer))
            if status != OK:
                return status
            if rank == 0:
                x, idx = array.array("H", [0] * 64), array.array("q", [0])
                arguments = Dispatch(x=matrix(x, BFLOAT16, 1, 64), topk_idx=matrix(idx, INT64, 1, 1), num_experts=2)
                status = library.deep_ep_dispatch(buffer, ctypes.byref(arguments), None, ctypes.byref(result))
                text = library.deep_ep_last_error().decode()
                self.over.set()
                assert status != TIMEOUT or "rank 1" in text, text
            else:
                self.over.wait()
            library.deep_ep_destroy(buffer)
            return status

        self.assertEqual(self.on_ranks(call), [TIMEOUT, OK])


class Header(unittest.TestCase):
    def test_strict_compilers_say_nothing(self):
        warnings = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror", "-fsyntax-only", f"-I{ROOT}/include")
        example = ROOT / "examples/from_c.c"
        ran = 0
        for compiler in filter(shutil.which, ("gcc", "clang")):
            ran += 1
            subprocess.run([compiler, "-std=c99", "-D_GNU_SOURCE", *warnings, example], check=True)
            text = '#include "deep_ep/deep_ep.h"\n#include "deep_ep/buffer.hpp"\n'
            subprocess.run([compiler, "-std=c++20", *warnings, "-xc++", "-"], input=text, text=True, check=True)
        self.assertTrue(ran, "there is a compiler")


if __name__ == "__main__":
    unittest.main()
