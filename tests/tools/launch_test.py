"""What `deep_ep launch` and `bench --spawn` promise: one exit status, which rank failed first, signals passed on, the
variables of each scheduler, and errors that say what to do.

usage: launch_test.py TOOL [NAME ...]
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))
from time_scale import scaled  # noqa: E402

TOOL = os.path.abspath(sys.argv[1])
PATIENCE = scaled(60)  # seconds for anything; nothing should take more than a few
# Of schedulers under which this test itself may run.
OTHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "JOB_COMPLETION_INDEX")
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if name not in OTHERS and not name.startswith(("SLURM_", "OMPI_", "PMI", "MASTER_", "DEEP_EP_", "TORCHELASTIC_"))
}
SHOW = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NODE_RANK/$NNODES $MASTER_ADDR:$MASTER_PORT"
ENDLESS = "echo up; while :; do sleep 0.1; done"
POD = {"JOB_COMPLETION_INDEX": "1", "DEEP_EP_NODES": "2", "MASTER_ADDR": "ep-0.ep", "MASTER_PORT": "29400"}
SLURM = {"SLURM_NODEID": "2", "SLURM_NNODES": "4", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3",
         "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "5", "SLURM_JOB_NODELIST": "gpu[07-08]-ib,login"}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            "MASTER_ADDR": "node0"}  # fmt: skip
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "node0"}
NODES = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "8361"}


def start(words, variables=None, **options):
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([TOOL, *words], text=True, env=CLEAN | (variables or {}), **pipes, **options)


def run(words, variables=None, **options):
    """(status, standard output, standard error)."""
    process = start(words, variables, **options)
    try:
        out, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    return process.returncode, out, errors


def launch(script, *options, ranks=2, variables=None, **others):
    return run(["launch", "--ranks", str(ranks), *options, "--", "sh", "-c", script], variables, **others)


class Launch(unittest.TestCase):
    def assert_gone(self, processes):
        self.assertEqual(len(processes), 2)
        end = time.monotonic() + PATIENCE
        while left := [one for one in processes if is_running(one)]:
            self.assertLess(time.monotonic(), end, left)
            time.sleep(0.02)

    def test_ranks_know_their_place_and_lines_name_their_rank(self):
        status, out, errors = launch("printf 'a\\nb'; " + SHOW + "; echo $MASTER_PORT $DEEP_EP_JOB_TOKEN >&2")
        self.assertEqual(status, 0, errors)
        lines = sorted(line.rsplit(":", 1)[0] for line in out.splitlines())
        self.assertEqual(lines, ["[0] a", "[0] b0/2 0/2 0/1 127.0.0.1", "[1] a", "[1] b1/2 1/2 0/1 127.0.0.1"])
        ports = {tuple(line.split()[1:]) for line in errors.splitlines()}
        self.assertEqual(len(ports), 1, errors)  # one port and one token for all, another token for each run
        self.assertNotEqual(ports, {tuple(launch("echo $MASTER_PORT $DEEP_EP_JOB_TOKEN")[1].split()[1:3])})

    def test_words_reach_ranks_as_they_are(self):
        words = ["[a,b]", '"q r"', "--", "--ranks", "", "it's", "$X", "{}"]
        status, out, _ = run(["launch", "--ranks", "1", "--", "printf", "%s|", *words])
        self.assertEqual((status, out), (0, "[0] " + "".join(word + "|" for word in words)))

    def test_the_first_failure_ends_the_others_and_is_named(self):
        status, _, errors = launch("test $RANK = 1 && exit 7; trap 'exit 9' TERM; " + ENDLESS, ranks=3)
        self.assertEqual(status, 7)
        self.assertIn("deep_ep: rank 1 ended with status 7; the ranks that still run here are ended\n", errors)
        self.assertNotIn("status 9", errors)

    def test_ranks_that_ignore_the_request_are_killed_with_what_they_started(self):
        script = """
            if test $RANK = 1; then until test -e up; do sleep 0.05; done; exit 7; fi
            trap '' TERM; sleep 1000 & echo $! $$; touch up; wait; sleep 1000"""
        with tempfile.TemporaryDirectory() as folder:
            status, out, _ = launch(script, cwd=folder)
        self.assertEqual(status, 7)
        self.assert_gone(out.split()[1:])

    def test_how_a_rank_ended(self):
        status, _, errors = launch("kill -9 $$", ranks=1)
        self.assertEqual((status, errors), (137, "deep_ep: rank 0 ended with signal 9 (Killed)\n"))
        status, _, errors = run(["launch", "--ranks", "1", "--", "/nonexistent"])
        self.assertEqual(status, 127)
        self.assertIn("[0] /nonexistent: No such file or directory\n", errors)

    def test_signals_reach_the_ranks(self):
        for given, script, expected in (
            (signal.SIGUSR1, "trap 'echo got; exit 3' USR1; ", 3),
            (signal.SIGTERM, "trap 'echo got; exit 0' TERM; ", 128 + signal.SIGTERM),
            (signal.SIGINT, "trap 'echo got; exit 5' INT; ", 128 + signal.SIGINT),
        ):
            with self.subTest(given):
                process = start(["launch", "--ranks", "2", "--", "sh", "-c", script + ENDLESS])
                self.addCleanup(process.kill)
                self.assertEqual(sorted(process.stdout.readline() for _ in range(2)), ["[0] up\n", "[1] up\n"])
                process.send_signal(given)
                out, errors = process.communicate(timeout=PATIENCE)
                self.assertEqual(process.returncode, expected, errors)
                self.assertIn("] got\n", out)

    def test_ranks_end_with_a_launcher_that_is_killed(self):
        process = start(["launch", "--ranks", "2", "--", "sh", "-c", "echo $$; exec sleep 1000"])
        ranks = [process.stdout.readline().split()[1] for _ in range(2)]
        process.kill()
        process.communicate(timeout=PATIENCE)
        self.assert_gone(ranks)

    def test_output_that_cannot_be_written(self):
        for way in (">&-", "> /dev/full"):
            words = f'exec "{TOOL}" launch --ranks 1 -- echo x {way}'
            done = subprocess.run(["sh", "-c", words], env=CLEAN, stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
            self.assertEqual(done.returncode, 1)
            self.assertIn("output of ranks was not written: ", done.stderr)

    def test_nohup_holds(self):
        words = f"trap '' HUP; exec \"{TOOL}\" launch --ranks 1 -- sh -c 'kill -HUP $PPID; exit 5'"
        done = subprocess.run(["sh", "-c", words], env=CLEAN, stderr=subprocess.DEVNULL, timeout=PATIENCE)
        self.assertEqual(done.returncode, 5)

    def test_variables_of_each_scheduler(self):
        auto = ("--scheduler", "auto")
        for variables, options, expected in (
            (POD, (), "3/4 1/2 1/2 ep-0.ep:29400"),
            (POD, ("--scheduler", "indexed-job"), "3/4 1/2 1/2 ep-0.ep:29400"),
            (POD, ("--scheduler", "jobset"), "3/4 1/2 1/2 ep-0.ep:29400"),
            (POD | {"RANK": "1", "WORLD_SIZE": "2"}, auto, "3/4 1/2 1/2 ep-0.ep:29400"),  # they agree
            (SLURM, auto, "5/6 1/2 2/3 gpu07-ib:29500"),
            (SLURM, ("--scheduler", "slurm"), "5/6 1/2 2/3 gpu07-ib:29500"),
            (SLURM | {"SLURM_STEP_NODELIST": "r[2-3]n[01,03]"}, auto, "5/6 1/2 2/3 r2n01:29500"),
            (SLURM | {"MASTER_ADDR": "a"}, auto, "5/6 1/2 2/3 a:29500"),
            (SLURM | {"PMI_RANK": "2", "PMI_SIZE": "3"}, auto, "5/6 1/2 2/3 gpu07-ib:29500"),  # srun --mpi=pmi2
            (SLURM | OPEN_MPI, ("--scheduler", "mpi"), "3/4 1/2 1/2 node0:29500"),
            (OPEN_MPI, auto, "3/4 1/2 1/2 node0:29500"),
            (MPICH, auto, "1/4 1/2 0/2 node0:29500"),
            (NODES, auto, "3/8 1/2 1/4 10.0.0.1:8361"),
            (NODES, ("--scheduler", "nodes"), "3/8 1/2 1/4 10.0.0.1:8361"),
            (POD, ("--scheduler", "none"), "1/2 1/2 0/1 127.0.0.1:"),
            ({"SLURM_NODEID": "0", "SLURM_NNODES": "1", "MASTER_PORT": "29600"}, auto, "1/2 1/2 0/1 127.0.0.1:29600"),
        ):
            with self.subTest(variables, options=options):
                status, out, errors = launch(SHOW, *options, variables=variables)
                self.assertEqual(status, 0, errors)
                rank = expected.split("/")[0]
                self.assertIn(f"[{rank}] {expected}", out)
        token = launch("echo $DEEP_EP_JOB_TOKEN", variables=SLURM, ranks=1)[1]
        self.assertEqual(token, "[2] 77.5\n")
        token = launch("echo $DEEP_EP_JOB_TOKEN", variables=SLURM | {"DEEP_EP_JOB_TOKEN": "mine"}, ranks=1)[1]
        self.assertEqual(token, "[2] mine\n")

    def test_what_is_missing_or_wrong_is_named(self):
        def without(variables, name):
            return {key: value for key, value in variables.items() if key != name}

        for variables, options, text in (
            (without(POD, "DEEP_EP_NODES"), (), "indexed-job: DEEP_EP_NODES is not set"),
            (without(POD, "JOB_COMPLETION_INDEX"), (), "indexed-job: JOB_COMPLETION_INDEX is not set"),
            ({}, ("--scheduler", "jobset"), "jobset: DEEP_EP_NODES is not set"),
            (without(POD, "MASTER_ADDR"), (), "indexed-job: MASTER_ADDR is not set"),
            (without(OPEN_MPI, "MASTER_ADDR"), (), "mpirun -x MASTER_ADDR=NAME"),
            (without(SLURM, "SLURM_NODEID"), ("--scheduler", "slurm"), "slurm: SLURM_NODEID is not set"),
            (without(SLURM, "SLURM_STEP_NUM_NODES"), (), "4 nodes, no SLURM_STEP_NUM_NODES: start it by srun"),
            (SLURM | {"SLURM_STEP_NUM_TASKS": "24"}, (), "SLURM_STEP_NUM_TASKS=24, but launch starts the ranks"),
            (SLURM | {"SLURM_JOB_NODELIST": "gpu[7"}, (), "SLURM_JOB_NODELIST='gpu[7', allowed: names of nodes"),
            (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, (), "mpirun --map-by ppr:1:node"),
            (POD | {"JOB_COMPLETION_INDEX": "2"}, (), "JOB_COMPLETION_INDEX='2', allowed: 0 to 1"),
            (POD | {"MASTER_PORT": "65535"}, (), "MASTER_PORT='65535', allowed: 1 to 65534"),
            (SLURM | OPEN_MPI, (), "slurm (SLURM_NODEID=2, SLURM_STEP_NUM_NODES=3) and mpi (OMPI_COMM_WORLD_RANK=1, "),
            (NODES | {"LOCAL_RANK": "1"}, (), "LOCAL_RANK is set: a rank of torchrun needs no launch"),
            (SLURM | NODES | {"LOCAL_RANK": "1"}, (), "LOCAL_RANK is set: a rank of torchrun needs no launch"),
            ({}, ("--hostfile", "hosts"), "--hostfile,--range,--ssh: launch has no such option any more: let mpirun"),
            ({}, ("--logs", "logs"), "--logs: launch has no such option any more: each line names its rank"),
            ({}, ("--port", "1"), "--master,--port: launch has no such option any more: set MASTER_ADDR and MASTER_PORT"),
            ({}, ("--scheduler", "torchrun"), "--scheduler: what torchrun starts is a rank, and needs no launch"),
            ({}, ("--scheduler", "pbs"), "--scheduler: pbs not in {auto,none,indexed-job,jobset,slurm,mpi,nodes}"),
            ({}, ("--ranks", "1025"), "--ranks: Value 1025 not in range"),
        ):  # fmt: skip
            with self.subTest(text, options=options):
                status, out, errors = run(["launch", *options, "--", "true"], variables)
                self.assertEqual((status, out), (2, ""), errors)
                self.assertIn(text, errors)
                self.assertEqual(errors.count("\n"), 1)
        status, _, errors = run(["launch", "--ranks", "2"])
        self.assertEqual((status, errors), (2, "deep_ep: launch: the command is missing (-- COMMAND ...)\n"))

    def test_bench_as_processes(self):
        sizes = "--device cpu --experts 4 --topk 2 --tokens 4 --hidden 256 --iterations 2 --check".split()
        status, out, errors = run(["bench", "intranode", "--spawn", "2", *sizes])
        self.assertEqual(status, 0, errors)
        self.assertIn("2 ranks (processes, TCP)", out)
        self.assertIn("\nEvery checked result is exact.\n", out)  # without a rank in front
        status, out, errors = run(["launch", "--ranks", "2", "--", TOOL, "bench", "intranode", *sizes])
        self.assertEqual(status, 0, errors)
        self.assertIn("\n[0] Every checked result is exact.\n", out)
        status, _, errors = run(["bench", "low-latency", "--spawn=2", "--device", "cpu", "--experts", "7"])
        self.assertEqual(status, 2, errors)
        self.assertIn("ended with status 2", errors)
        for variables in (NODES, NODES | {"LOCAL_RANK": "1"}):
            status, _, errors = run(["bench", "intranode", "--spawn", "2"], variables)
            text = "deep_ep: --spawn 2: this process is one of several already; leave it out\n"
            self.assertEqual((status, errors), (2, text))


def is_running(process):
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
