"""scripts/nccl_table.py: tables of nccl-tests are read, and what is wrong in them is said."""

import pathlib
import subprocess
import sys
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts/nccl_table.py"
# As all_reduce_perf prints it on 16 ranks. The figures are made up, and fit each other.
HEAD = """# nThread 1 nGpus 1 minBytes 2097152 maxBytes 4194304 step: 2(factor) warmup iters: 10
node-a:71:71 [0] NCCL INFO Using network gIB
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
ROWS = """     2097152        524288     float     sum      -1    131.1   16.00   30.00      0    130.0   16.13   30.24      0
node-a:71:71 [0] NCCL INFO a line of the log in between
     4194304       1048576     float     sum      -1    209.7   20.00   37.50      0    209.7   20.00   37.50      0
"""
END = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 33.81 \n#\n"


class NcclTable(unittest.TestCase):
    def read(self, text, *options, status=0):
        done = subprocess.run([sys.executable, "-B", SCRIPT, "-", *options], input=text, capture_output=True, text=True)
        self.assertEqual(done.returncode, status, done.stderr)
        return done.stdout.splitlines(), done.stderr.splitlines()

    def test_a_table_is_read_and_checked(self):
        lines, said = self.read(HEAD + ROWS + END)
        self.assertEqual(
            lines[0], "benchmark,operation,dtype,mode,part,by,device,ranks,bytes,mean_us,gb_per_s,alg_gb_per_s,note"
        )
        self.assertEqual(lines[2], "nccl,all_reduce,float,in place,sum,NCCL,cuda,16,2097152,130,30.24,16.13,")
        self.assertEqual(len(lines), 5)
        self.assertEqual(
            said,
            ["standard input: all_reduce of 16 ranks (by the bandwidths), 2 sizes; bus bandwidth at most 37.50 GB/s, "
             "average 33.81 GB/s; data checked"],
        )  # fmt: skip

    def test_marks_of_mpirun_are_no_part_of_it(self):
        marked = "".join("[1,0]<stdout>:" + line for line in (HEAD + ROWS + END).splitlines(keepends=True))
        self.assertEqual(len(self.read(marked)[0]), 5)

    def test_the_text_names_collective_and_ranks(self):
        text = (
            "# Collective test starting: all_gather_perf\n#  Rank  0 Group  0 Pid 1 on a device  0 [0x00] B200\n"
            "#  Rank  1 Group  0 Pid 2 on a device  1 [0x00] B200\n" + HEAD +
            "  1024  256  float  none  -1  10.0  20.00  10.00  N/A  10.0  20.00  10.00  N/A\n"
            "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 10\n"
        )  # fmt: skip
        lines, said = self.read(text)
        self.assertEqual(lines[1], "nccl,all_gather,float,out of place,-,NCCL,cuda,2,1024,10,10,20,data not checked")
        self.assertIn("data not checked (#wrong is N/A)", said[0])

    def test_wrong_data_is_a_mistake(self):
        wrong = "17".join(ROWS.rsplit("0", 1))
        lines, said = self.read(HEAD + wrong + END, status=1)
        self.assertEqual(len(lines), 5)
        self.assertEqual(said[1:], ["standard input line 8: 17 wrong values in place"])
        bad_end = END.replace("0 OK", "3 FAILED")
        self.assertIn("itself reports values out of bounds", self.read(HEAD + ROWS + bad_end, status=1)[1][1])

    def test_bandwidths_must_fit(self):
        said = self.read(HEAD + ROWS + END, "--ranks", "8", status=1)[1]
        self.assertEqual(len(said), 5)
        self.assertIn("line 6: busbw 30 out of place does not fit algbw 16: all_reduce of 8 ranks has 1.75 times that", said[1])
        # The formula of each collective, with 4 ranks and an algorithm bandwidth of 8.
        for collective, busbw in (("all_reduce", 12), ("all_gather", 6), ("alltoall", 6), ("broadcast", 8)):
            row = f"1024 256 float sum -1 10 8 {busbw} 0 10 8 {busbw} 0\n# Avg bus bandwidth : {busbw}\n"
            self.read(HEAD + row, "--ranks", "4", "--collective", collective)

    def test_missing_rows_and_ends_are_mistakes(self):
        self.assertIn("line 4 has no line '# Avg bus bandwidth'", self.read(HEAD + ROWS, status=1)[1][1])
        self.read(HEAD + ROWS, "--allow-partial")
        in_a_row = ROWS[:-20] + "\n"
        self.read(HEAD + in_a_row, "--allow-partial")
        self.assertIn("is no row", self.read(HEAD + in_a_row + ROWS, "--allow-partial", status=2)[1][0])
        first = ROWS[: ROWS.index("\n") + 1]
        self.assertIn("rows are missing", self.read(HEAD + first + END, status=1)[1][1])
        self.assertIn("the table has no rows", self.read(HEAD + END, status=1)[1][1])

    def test_garbage_is_refused_with_its_line(self):
        self.assertIn("no table of nccl-tests in its 1 lines", self.read("hello\n", status=2)[1][0])
        self.assertIn(
            "line 6: 'Segmentation fault (core dumped)' is no row of nccl-tests' table: 4 columns, expected 13",
            self.read(HEAD + "Segmentation fault (core dumped)\n" + END, status=2)[1][0],
        )
        comma = ROWS.replace("16.00", "16,00", 1)
        self.assertIn("line 6: algbw is '16,00', expected a number", self.read(HEAD + comma + END, status=2)[1][0])
        self.assertIn("invalid choice: 'gossip'", self.read(HEAD + ROWS + END, "--collective", "gossip", status=2)[1][-1])
        self.assertIn("--ranks 1: allowed: 2 or more", self.read(HEAD + ROWS + END, "--ranks", "1", status=2)[1][-1])


if __name__ == "__main__":
    unittest.main()
