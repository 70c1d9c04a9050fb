"""The chart's scripts on two "nodes" of this machine, with stand-ins for deep_ep, ssh, sshd, mpirun and getent."""

import os
import shutil
import signal
import subprocess

from support import CHART, InFolder, environment, main, stand_in

SAMPLE = """#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
     2097152        524288     float     sum      -1    123.4   17.01   31.89      0    123.4   17.01   31.89      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 31.89
"""
DEEP_EP = r"""
echo "deep_ep $*" >>"$TEST/calls$JOB_COMPLETION_INDEX"
case "$1 $2" in
  "doctor --quick") exit "${DOCTOR:-0}" ;;
  "bench internode") echo "Best dispatch on $RANK/$WORLD_SIZE" && exit "${BENCH:-0}" ;;
esac
"""
# Both nodes' folders are on this machine; a path of the caller's becomes the other's.
SSH = r"""
[ "$1" = -F ] && [ -r "$2" ] || exit 9
node=${3#testbed-workload-0-}
node=${node%%.*}
[ -e "$TEST/work$node/nccl/ssh_config" ] || { echo "nobody listens" >&2; exit 255; }
shift 3
exec sh -c "$(echo "$*" | sed "s,/work[01]/,/work$node/,g")"
"""
MPIRUN = r"""
while [ "$1" != --hostfile ]; do shift; done
cp "$2" "$TEST/hosts"
echo "$*" >"$TEST/mpirun"
sed -e "s/ 0\$/ ${WRONG:-0}/" -e "${CUT:-}" "$TEST/sample"
exit "${MPIRUN:-0}"
"""


def end_group(process):
    """Whatever a run that hung has left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


class Testbed(InFolder):
    def setUp(self):
        super().setUp()
        self.results = self.top / "results"
        programs = self.top / "bin"
        for name, script in (
            ("deep_ep", DEEP_EP),
            ("ssh", SSH),
            ("sshd", "exec sleep 150\n"),
            ("mpirun", MPIRUN),
            ("getent", '[ -n "$NO_NAMES" ] && exit 2; echo "10.0.0.1 $2"\n'),
        ):
            stand_in(programs, name, script)
        (self.top / "sample").write_text(SAMPLE)
        keys = self.top / "keys"
        keys.mkdir()
        (keys / "id").write_text("private\n")
        (keys / "id.pub").write_text("ssh-ed25519 public testbed\n")
        scripts = self.top / "scripts"
        scripts.mkdir()
        for path in (CHART / "scripts").iterdir():
            (scripts / path.name).write_text(path.read_text())
        (scripts / "nccl.args").write_text("/opt/nccl-tests/build/all_reduce_perf\n-b\n2M\n")
        (scripts / "internode.args").write_text("\n")
        (scripts / "launcher.sh").write_text("echo mine; exit 5\n")

    def start(self, stages="connectivity nccl internode", **extra):
        """Both nodes: their statuses, and what the first printed."""
        running = []
        for node in range(2):
            settings = {
                "TEST": self.top, "JOB_COMPLETION_INDEX": node, "TESTBED_NODES": 2, "MASTER_PORT": 29500,
                "MASTER_ADDR": "testbed-workload-0-0.testbed",
                "TESTBED_NODE_NAME": "testbed-workload-0-%d.testbed", "TESTBED_STAGES": stages,
                "TESTBED_CONNECT_SECONDS": 120, "TESTBED_RESULTS": self.results, "TESTBED_WORK": self.top / f"work{node}",
                "TESTBED_DEEP_EP": self.top / "bin/deep_ep",
                "TESTBED_KEYS": self.top / "keys",
                "TESTBED_TOPOLOGY": ("b/2", "b/1")[node], **extra,
            }
            if node == 1:
                settings.update({key[:-2]: value for key, value in extra.items() if key.endswith("_1")})
            running.append(
                subprocess.Popen(
                    ["bash", self.top / "scripts/run.sh"], start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    env=environment(self.top / "bin", **{key: str(value) for key, value in settings.items()}),
                )
            )  # fmt: skip
        for one in running:
            self.addCleanup(end_group, one)
        texts = [one.communicate(timeout=150)[0] for one in running]
        return [one.returncode for one in running], texts[0]

    def test_all_stages(self):
        (self.top / "routes").write_text("Iface Destination\neth2 0001A8C0\neth0 00000000\n")
        statuses, text = self.start(NCCL_DEBUG="INFO", TESTBED_ROUTES=self.top / "routes")
        self.assertEqual(statuses, [0, 0], text)
        for stage in ("connectivity", "nccl", "internode"):
            self.assertIn(f"stage {stage} passed", text)
        names = sorted(str(path.relative_to(self.results)) for path in self.results.rglob("*") if path.is_file())
        self.assertEqual(
            names,
            ["connectivity-test.log", "nccl-test-results.txt", "node-map.txt", "pod-logs/coordinator.log", "pod-logs/worker-1.log"],
        )  # fmt: skip
        for node in range(2):
            self.assertIn("deep_ep bench internode --spawn 8 --nodes 2 --check", (self.top / f"calls{node}").read_text())
        self.assertIn("Best dispatch on 0/2\n", text)
        self.assertEqual((self.results / "nccl-test-results.txt").read_text(), SAMPLE)
        # Who has only the log gets the same out of it.
        inside = text.split("=== begin nccl-test-results.txt\n")[1].split("=== end nccl-test-results.txt")[0]
        self.assertEqual(inside, SAMPLE)
        self.assertIn("node 0: testbed-workload-0-1.testbed is 10.0.0.1", (self.results / "connectivity-test.log").read_text())
        # Nodes are ordered by their place.
        names = [f"testbed-workload-0-{node}.testbed" for node in (1, 0)]
        self.assertEqual((self.top / "hosts").read_text(), "".join(f"{name} slots=8\n" for name in names))
        self.assertEqual(
            (self.results / "node-map.txt").read_text(), f"# node 1 {names[0]} b/1\n# node 0 {names[1]} b/2\n"
        )
        words = (self.top / "mpirun").read_text()
        for part in ("-np 16", "/opt/nccl-tests/build/all_reduce_perf -b 2M", "oob_tcp_if_include eth0", "btl_tcp_if_include eth0",
                     "-x NCCL_DEBUG ", "-x NCCL_SOCKET_IFNAME "):  # fmt: skip
            self.assertIn(part, words)
        self.assertEqual((self.top / "work0/nccl/id").stat().st_mode & 0o777, 0o600)
        self.assertEqual((self.top / "work0/nccl/known_hosts").read_text(), "* ssh-ed25519 public\n")

    def test_every_stage_can_fail(self):
        for setting, expected, words in (
            # One node alone fails, and the other waits for it in vain.
            ({"DOCTOR_1": 1, "TESTBED_CONNECT_SECONDS": 2}, [1, 1], "stage nccl failed with status 1"),
            ({"DOCTOR": 1, "DOCTOR_1": 0, "TESTBED_CONNECT_SECONDS": 2}, [1, 1], "stage connectivity failed with status 1"),
            ({"MPIRUN": 3}, [3, 3], "stage nccl failed with status 3"),
            ({"WRONG": 7}, [1, 1], "stage nccl failed with status 1"),
            ({"CUT": "/Avg/d"}, [1, 1], "stage nccl failed with status 1"),
            ({"CUT": "/sum/d"}, [1, 1], "stage nccl failed with status 1"),
            ({"BENCH": 7}, [7, 7], "stage internode failed with status 7"),
        ):
            with self.subTest(setting):
                # What ssh finds must be of this run.
                for node in range(2):
                    shutil.rmtree(self.top / f"work{node}", ignore_errors=True)
                statuses, text = self.start(**setting)
                self.assertEqual(statuses, expected, text)
                self.assertTrue(text.rstrip().endswith(words), text)

    def test_a_pod_that_never_comes(self):
        statuses, text = self.start(NO_NAMES=1, TESTBED_CONNECT_SECONDS=1)
        self.assertEqual(statuses, [1, 1])
        self.assertIn("testbed-workload-0-0.testbed has no address after 1 s", text)

    def test_launcher_and_unknown_stage(self):
        self.assertEqual(self.start("launcher")[0], [5, 5])
        statuses, text = self.start("sleep")
        self.assertEqual(statuses, [2, 2])
        self.assertIn("'sleep' is unknown, allowed: ", text)


main()
