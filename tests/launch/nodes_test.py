#!/usr/bin/env python3
"""`deep_ep launch` on nodes that are network namespaces of this machine, joined by a bridge: how runs end, and what is
left of them.

usage: nodes_test.py TOOL [NAME ...]

Everything happens in namespaces of its own (network, mounts, processes), which are gone when this script ends, however it
ends. A process that a run leaves behind is therefore easily seen: nobody else is there. Exit status 77: cannot be made
here, and why.

What the ranks do is small on purpose. Ranks of the CPU executor share memory, which needs sockets that do not reach from
one network namespace into another; so the benchmarks run under two launchers on one network, and ranks in different
namespaces meet over TCP (MEET below).
"""

import json
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import unittest

TOOL = sys.argv[1]
NODES = 3
PATIENCE = 40  # seconds for anything, on a busy machine; nothing should take more than a few
ADDRESS = "10.77.0.{}".format

# Every rank tells rank 0 its number at MASTER_ADDR:MASTER_PORT, and hears how many there are.
MEET = """
import os, socket, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    server = socket.create_server(("", where[1]), backlog=100)
    met = [server.accept()[0] for _ in range(size - 1)]
    numbers = sorted(int(one.recv(10)) for one in met)
    assert numbers == list(range(1, size)), numbers
    for one in met:
        one.sendall(b"%d" % size)
else:
    while True:
        try:
            hub = socket.create_connection(where)
            break
        except OSError:
            time.sleep(0.05)
    hub.sendall(b"%d" % rank)
    assert int(hub.recv(10)) == size
print(f"rank {rank} has met {size - 1} others on {os.environ['LOCAL_RANK']} of {os.environ['NODE_RANK']}", flush=True)
"""


def run(*words):
    subprocess.run(words, check=True, timeout=PATIENCE)


def enter_namespaces():
    """Runs this script again, in namespaces of its own."""
    for tool in ("unshare", "ip"):
        if not shutil.which(tool):
            skip(f"there is no {tool}")
    if os.geteuid() != 0:
        skip("only root makes network namespaces")
    flags = ["--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    trial = "mount -t tmpfs none /run && mkdir /run/netns && ip netns add trial && ip netns exec trial true"
    tried = subprocess.run(["unshare", *flags, "sh", "-c", trial], capture_output=True, text=True, timeout=PATIENCE)
    if tried.returncode != 0:
        skip(f"namespaces cannot be made here: {tried.stderr.strip()}")
    os.environ["DEEP_EP_TEST_INSIDE"] = "1"
    os.execvp("unshare", ["unshare", *flags, sys.executable, "-B", *sys.argv])


def skip(why):
    print(f"SKIP: {why}")
    sys.exit(77)


def make_nodes():
    """Namespaces that are called by their addresses, so that these are names of hosts, too."""
    for folder in ("/run", "/dev/shm"):
        run("mount", "-t", "tmpfs", "none", folder)
    os.mkdir("/run/netns")
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "bridge", "type", "bridge")
    run("ip", "link", "set", "bridge", "up")
    for i in range(1, NODES + 1):
        name = ADDRESS(i)
        run("ip", "netns", "add", name)
        run("ip", "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", f"port{i}", "master", "bridge", "up")
        run("ip", "-n", name, "address", "add", f"{name}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            run("ip", "-n", name, "link", "set", link, "up")


def children():
    """All processes but this one, which is the first of its namespace."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                break
        except ChildProcessError:
            break
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != "1":
            try:
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                pass
    return found


class Nodes(unittest.TestCase):
    port = 21000

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="deep_ep_launch_"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.logs = self.folder / "logs"
        self.started = []
        Nodes.port += 10
        ssh = self.folder / "ssh"
        ssh.write_text('#!/bin/sh\nhost=$1; shift\necho "welcome to $host"\nexec ip netns exec "$host" sh -c "$*"\n')
        ssh.chmod(0o755)
        (self.folder / "meet.py").write_text(MEET)

    def tearDown(self):
        """Nothing is left: no process, no shared memory."""
        for one in self.started:
            if one.poll() is None:
                one.kill()
            one.communicate()
        end = time.monotonic() + 15
        while children() and time.monotonic() < end:
            time.sleep(0.02)
        left = children()
        for process in left:
            os.kill(process, signal.SIGKILL)
        self.assertEqual(left, {})
        self.assertEqual(os.listdir("/dev/shm"), [])

    def start(self, *words, node=None, variables=None, **arguments):
        where = ["ip", "netns", "exec", ADDRESS(node)] if node else []
        arguments = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | arguments
        process = subprocess.Popen([*where, TOOL, "launch", *words], text=True, cwd=self.folder,
                                   env=os.environ | (variables or {}), **arguments)
        self.started.append(process)
        return process

    def end(self, process):
        """(status, standard output, standard error) of a launcher that ends in time."""
        out, err = process.communicate(timeout=PATIENCE)
        return process.returncode, out, err

    def start_on_hosts(self, *words, lines=None, **arguments):
        (self.folder / "hosts").write_text("\n".join(lines or (f"{ADDRESS(i)} slots=2" for i in range(1, NODES + 1))))
        return self.start("--hostfile", "hosts", "--ssh", "./ssh", "--logs", "logs", "--port", str(self.port), *words,
                          **arguments)

    def start_pod(self, index, *words, nodes=NODES, master=ADDRESS(1), **arguments):
        variables = {"JOB_COMPLETION_INDEX": str(index), "DEEP_EP_NODES": str(nodes), "MASTER_ADDR": master,
                     "MASTER_PORT": str(self.port)}
        return self.start("--scheduler", "auto", "--ranks", "2", "--logs", "logs", *words, node=index + 1,
                          variables=variables, **arguments)

    def log(self, rank):
        return (self.logs / f"rank-{rank}.log").read_text()

    def wait_for(self, condition):
        end = time.monotonic() + PATIENCE
        while not condition():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)

    def wait_for_ranks(self, count):
        """Until so many ranks have made a file of their number in the folder of this test."""
        self.wait_for(lambda: len(list(self.folder.glob("up.*"))) == count)

    def wait_for_text(self, file, text):
        self.wait_for(lambda: text in file.read_text())

    def launcher_on(self, node, first):
        """The process that has been ssh, and then became the launcher there."""
        network = os.stat(f"/run/netns/{ADDRESS(node)}").st_ino
        for child in children():
            parent = pathlib.Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[1]
            if int(parent) == first and os.stat(f"/proc/{child}/ns/net").st_ino == network:
                return child
        self.fail("there is no such launcher")

    # By ssh.

    def test_hosts_meet_in_the_order_of_their_places(self):
        process = self.start_on_hosts("--", "python3", "meet.py", lines=[
            f"{ADDRESS(1)} slots=2 topology=/b/1/x", f"{ADDRESS(2)} slots=1 topology=/a/1/y",
            f"{ADDRESS(3)} slots=2 topology=/b/1/z"])
        status, out, err = self.end(process)
        self.assertEqual(status, 0, err)
        # The third host is nearer to the first one than the second.
        hosts = [1, 1, 3, 3, 2]
        for rank, host in enumerate(hosts):
            header, text = self.log(rank).splitlines()
            self.assertIn(f"rank {rank} of 5 on {ADDRESS(host)}", header)
            self.assertIn(f"rank {rank} has met 4 others", text)
        self.assertEqual(sorted(out.splitlines()), [self.log(rank).splitlines()[1] for rank in (0, 1)])
        ranks = [line.split()[:3] for line in (self.logs / "rank-map.txt").read_text().splitlines()[1:]]
        self.assertEqual(ranks, [[str(rank), ADDRESS(host), node] for (rank, host), node in
                                 zip(enumerate(hosts), "00112")])
        self.assertIn(f"{ADDRESS(3)}: welcome to {ADDRESS(3)}", err)

    def test_the_first_failure_is_the_status(self):
        # Rank 5's neighbour takes its time to end; other hosts' ranks fail by themselves soon after. An orphan of rank 0
        # has left its process group.
        command = """
            trap 'sleep 1; exit 3' TERM
            echo "output of $RANK"
            case $RANK in 0) setsid sleep 1000 & ;; esac
            touch up.$RANK; while [ $(ls up.* | wc -l) != 6 ]; do sleep 0.05; done
            case $RANK in 5) touch failed; exit 41 ;; 1) while ! [ -e failed ]; do :; done; sleep 0.3; exit 5 ;; esac
            while true; do sleep 0.05; done"""
        status, _, err = self.end(self.start_on_hosts("--", "sh", "-c", command))
        self.assertEqual(status, 41, err)
        self.assertIn(f"rank 5 on {ADDRESS(3)} ended with status 41 (logs/rank-5.log)", err)
        for rank in range(6):
            self.assertIn(f"output of {rank}\n", self.log(rank))

    def test_a_host_whose_launcher_is_killed(self):
        process = self.start_on_hosts("--", "sh", "-c", "echo here; touch up.$RANK; sleep 1000 & sleep 1000")
        self.wait_for_ranks(6)
        os.kill(self.launcher_on(2, process.pid), signal.SIGKILL)
        status, _, err = self.end(process)
        self.assertEqual(status, 1, err)
        self.assertIn(f"{ADDRESS(2)} went away", err)
        for rank in range(6):
            self.assertIn("here\n", self.log(rank))

    def test_a_killed_first_launcher_takes_all_along(self):
        process = self.start_on_hosts("--", "sh", "-c", "touch up.$RANK; sleep 1000 & sleep 1000")
        self.wait_for_ranks(6)
        process.kill()
        self.end(process)  # and tearDown() sees that nothing is left

    def test_ssh_fails(self):
        (self.folder / "ssh").write_text(f'#!/bin/sh\n[ $1 = {ADDRESS(2)} ] && {{ echo "no route" >&2; exit 255; }}\n'
                                         'exec ip netns exec "$1" sh -c "$2"\n')
        status, _, err = self.end(self.start_on_hosts("--", "true"))
        self.assertEqual(status, 255, err)
        self.assertIn(f"{ADDRESS(2)}: no route", err)
        self.assertIn(f"{ADDRESS(2)}: './ssh' ended with status 255 before", err)

    def test_a_launcher_behind_ssh_that_wants_no_ranks(self):
        hello = self.hello_of(node=0, nodes=0, ranks=0)
        (self.folder / "hello").write_bytes(hello)
        (self.folder / "ssh").write_text("#!/bin/sh\ncat hello; exec sleep 1000\n")
        status, _, err = self.end(self.start_on_hosts("--", "true", lines=[ADDRESS(1)]))
        self.assertEqual(status, 1, err)
        self.assertIn(f"{ADDRESS(1)}: it wants to start 0 ranks, allowed: 1 to 128", err)

    # Under a scheduler.

    def test_pods_wait_for_the_first_one(self):
        # Its name is known late, and it is started even later.
        hosts = self.folder / "hosts"
        hosts.write_text("127.0.0.1 localhost\n")
        run("mount", "--bind", str(hosts), "/etc/hosts")
        self.addCleanup(run, "umount", "/etc/hosts")
        said = {index: self.folder / f"said.{index}" for index in (2, 1, 0)}
        pods = []
        for index, file in said.items():
            if index == 0:
                for other in (2, 1):
                    self.wait_for_text(said[other], "waits for the first node at ep-0.ep port")
                hosts.write_text(f"127.0.0.1 localhost\n{ADDRESS(1)} ep-0.ep\n")
                time.sleep(0.4)  # in which they find the name, but nobody there
            with file.open("w") as err:
                pods.append(self.start_pod(index, "--", "python3", "meet.py", master="ep-0.ep", stderr=err))
        for pod, file in zip(pods, said.values()):
            status, out, _ = self.end(pod)
            self.assertEqual(status, 0, file.read_text())
            self.assertEqual(out.count("has met 5 others"), 2)
        for rank in range(6):
            self.assertIn(f"rank {rank} has met 5 others on {rank % 2} of {rank // 2}", self.log(rank))

    def test_pods_end_with_the_status_of_the_first_failure(self):
        command = """touch up.$RANK; while [ $(ls up.* | wc -l) != 6 ]; do sleep 0.05; done
                     [ $RANK = 4 ] && exit 17; while true; do sleep 0.05; done"""
        pods = [self.start_pod(index, "--", "sh", "-c", command) for index in range(NODES)]
        for pod in pods:
            status, _, err = self.end(pod)
            self.assertEqual(status, 17, err)
            self.assertRegex(err, r"rank 4 on node 2 \(.*\) ended with status 17")

    def test_a_killed_pod_ends_the_others(self):
        for victim, message in ((2, r"node 2 \(.*\) went away"), (0, "the launcher of the first node went away")):
            with self.subTest(victim=victim):
                for file in self.folder.glob("up.*"):
                    file.unlink()
                self.port += 5
                pods = [self.start_pod(index, "--", "sh", "-c", "touch up.$RANK; sleep 1000") for index in range(NODES)]
                self.wait_for_ranks(6)
                pods[victim].kill()
                for pod in pods:
                    status, _, err = self.end(pod)
                    self.assertEqual(status, -signal.SIGKILL if pod is pods[victim] else 1, err)
                    self.assertTrue(pod is pods[victim] or err, err)
                    if pod is not pods[victim]:
                        self.assertRegex(err, message)

    def test_a_cut_link_ends_both_sides(self):
        words = ("--lost-after", "5", "--", "sh", "-c", "touch up.$RANK; sleep 1000")
        pods = [self.start_pod(index, *words) for index in range(NODES)]
        self.wait_for_ranks(6)
        run("ip", "link", "set", "port3", "down")
        self.addCleanup(run, "ip", "link", "set", "port3", "up")
        for pod, message in zip(pods, (r"nothing was heard of node 2 \(.*\) for 5 s", r"nothing was heard of node 2",
                                       "first node went away: nothing was heard of it for 5 s")):
            status, _, err = self.end(pod)
            self.assertEqual(status, 1, err)
            self.assertRegex(err, message)

    def test_who_does_not_come_and_who_does_not_belong(self):
        said = self.folder / "said"
        with said.open("w") as err:
            other = self.start_pod(1, "--", "true", nodes=2, stderr=err)
        self.wait_for_text(said, "waits for the first node")
        first = self.start_pod(0, "--join-timeout", "5", "--", "true")
        status, _, _ = self.end(other)
        err = said.read_text()
        self.assertEqual(status, 2, err)
        self.assertIn("it is told of 2 nodes, the first node of 3", err)
        status, _, err = self.end(first)
        self.assertEqual(status, 1, err)
        self.assertIn("2 of 3 nodes did not join within 5 s: 1, 2", err)
        status, _, err = self.end(self.start_pod(1, "--join-timeout", "2", "--", "true"))
        self.assertEqual(status, 1, err)
        self.assertIn(f"called the first node at {ADDRESS(1)} port {self.port + 2} for 2 s: Connection refused", err)

    def test_a_call_does_not_meet_itself(self):
        # The only port from which calls are made here is the one that is called.
        port = self.port + 2
        lines = [f"echo {port} {port} > /proc/sys/net/ipv4/ip_local_port_range", 'exec "$@"']
        variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        words = ["--scheduler", "nodes", "--ranks", "1", "--join-timeout", "2", "--", "true"]
        process = subprocess.run(["unshare", "--net", "sh", "-ec", f"ip link set lo up; {'; '.join(lines)}", "sh", TOOL,
                                  "launch", *words], env=os.environ | variables, capture_output=True, text=True,
                                 timeout=PATIENCE, stdin=subprocess.DEVNULL)
        self.assertEqual(process.returncode, 1, process.stderr)
        # Nor does such a call leave the port in use, where the first node shall listen.
        self.assertIn(f"called the first node at 127.0.0.1 port {port} for 2 s: Connection refused", process.stderr)

    def start_first_of_two(self):
        """Of a run on this network; the test itself is the second."""
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        return self.start("--scheduler", "nodes", "--ranks", "2", "--logs", "logs", "--", "true",
                          variables=variables)

    def hello_of(self, **changes):
        """What a launcher of node 1 says first, but for the changes; None leaves something out."""
        version = subprocess.run([TOOL, "--version"], capture_output=True, text=True, timeout=PATIENCE).stdout.split()
        hello = {"version": version[0], "node": 1, "nodes": 2, "ranks": 2, "host": "test", "topology": ""} | changes
        body = json.dumps({name: value for name, value in hello.items() if value is not None}).encode()
        return b"\ndeep_ep launch 1\nh" + struct.pack("<I", len(body)) + body

    def say_hello(self, **changes):
        """Calls the first launcher, which starts; what it answers, until the verdict."""
        hello = self.hello_of(**changes)
        end = time.monotonic() + PATIENCE
        while True:
            try:
                caller = socket.create_connection(("127.0.0.1", self.port + 2), timeout=PATIENCE)
                break
            except ConnectionRefusedError:
                self.assertLess(time.monotonic(), end)
                time.sleep(0.02)
        with caller:
            caller.sendall(hello)
            text = b""
            while b'"status":' not in text:
                piece = caller.recv(65536)
                if not piece:
                    break
                text += piece
        return text.decode(errors="replace")

    def test_a_hello_that_cannot_be(self):
        first = self.start_first_of_two()
        for ranks in (0, -1, 129, 30_000_000):
            answer = self.say_hello(ranks=ranks)
            self.assertIn(f"node 1 (test) cannot join: it wants to start {ranks} ranks, allowed: 1 to 128", answer)
        # Of another layout: what is missing, of another type, or no int at all.
        for changes in ({"ranks": None}, {"node": "1"}, {"ranks": 1e30}):
            self.assertIn("a caller cannot join: it says what no launcher of deep_ep", self.say_hello(**changes))
        self.assertIsNone(first.poll())  # it goes on waiting
        first.terminate()
        status, _, err = self.end(first)
        self.assertEqual(status, 143, err)
        self.assertEqual(err.count("cannot join"), 7, err)

    def test_too_many_ranks_and_another_version(self):
        first = self.start_first_of_two()
        self.assertIn("launch: 130 ranks on 2 nodes, allowed: at most 128 ranks", self.say_hello(ranks=128))
        self.assertEqual(self.end(first)[0], 2)
        first = self.start_first_of_two()
        version = "0.2.0-g0000000000"
        an_hour_ago = int((time.time() - 3600) * 1000)
        answer = self.say_hello(version=version, clock_ms=an_hour_ago)
        self.assertIn(f"node 1 (test) runs deep_ep {version}, the first node", answer)
        status, _, err = self.end(first)
        self.assertEqual(status, 1)
        self.assertRegex(err, r"the clock of node 1 \(test\) is 36\d\d s behind that of the first node")

    @unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
    def test_mpirun_starts_the_launchers(self):
        (self.folder / "agent").symlink_to("ssh")  # to what is called ssh, mpirun gives an option of ssh
        for command, expected in ((("python3", "meet.py"), 0), (("sh", "-c", "exit $((20 + RANK))"), None)):
            mpirun = ["mpirun", "--allow-run-as-root", "--host", f"{ADDRESS(1)},{ADDRESS(2)}", "--map-by", "ppr:1:node",
                      "--mca", "plm_rsh_agent", str(self.folder / "agent"), "-x", f"MASTER_ADDR={ADDRESS(1)}", "-x",
                      f"MASTER_PORT={self.port}", TOOL, "launch", "--scheduler", "auto", "--ranks", "2", "--", *command]
            result = subprocess.run(["ip", "netns", "exec", ADDRESS(1), *mpirun], cwd=self.folder, capture_output=True,
                                    text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)
            if expected == 0:
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertEqual(result.stdout.count("has met 3 others"), 4, result.stdout)
            else:
                self.assertIn(result.returncode, range(20, 24), result.stderr)

    def test_benchmarks_under_two_launchers(self):
        # Side by side, as they take a few seconds each; see above why on one network.
        kinds = {"internode": ["--nodes", "2", "--experts", "8", "--topk", "4"],
                 "low-latency": ["--nodes", "2", "--experts", "8", "--topk", "2"]}
        pods = []
        for i, (kind, words) in enumerate(kinds.items()):
            for index in range(2):
                variables = {"RANK": str(index), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                             "MASTER_PORT": str(self.port + 4 * i), "DEEP_EP_HOST_THREADS": "2"}
                pods.append(self.start("--scheduler", "nodes", "--ranks", "2", "--", TOOL, "bench", kind, "--device", "cpu",
                                       "--tokens", "4", "--hidden", "512", "--iterations", "1", "--check", *words,
                                       variables=variables))
        texts = []
        for pod in pods:
            status, out, err = self.end(pod)
            self.assertEqual(status, 0, err)
            texts.append(out)
        self.assertIn("Every checked result is exact", texts[0])
        self.assertIn("Every checked result is right", texts[2])

    # On one host.

    def test_a_second_interrupt_kills(self):
        for on_hosts in (False, True):
            with self.subTest(on_hosts=on_hosts):
                # Side by side with a run that is interrupted once, and waits for ranks that do not want to end.
                words = ("--", "sh", "-c", "trap '' TERM INT; touch up.$$; while true; do sleep 0.05; done")
                said = [self.folder / name for name in ("patient", "killed")]
                runs = []
                for file in said:
                    with file.open("w") as err:
                        runs.append(self.start_on_hosts(*words, stderr=err) if on_hosts else
                                    self.start("--ranks", "2", *words, stderr=err))
                self.wait_for_ranks(12 if on_hosts else 4)
                for process, file in zip(runs, said):
                    process.send_signal(signal.SIGINT)
                    self.wait_for_text(file, "asked to end by signal 2")
                patient, killed = runs
                # Not behind the end of the other's 5 seconds, which began first.
                killed.send_signal(signal.SIGINT)
                self.assertEqual(killed.wait(timeout=PATIENCE), 130)
                self.assertIsNone(patient.poll(), "it waited for ranks that do not want to end")
                patient.send_signal(signal.SIGINT)
                self.assertEqual(patient.wait(timeout=PATIENCE), 130)
                for file in self.folder.glob("up.*"):
                    file.unlink()

    def test_what_is_older_than_the_launcher_lives_on(self):
        script = 'sleep 1000 & echo $! > sidecar; exec "$@"'
        command = "setsid sleep 1000 & echo $! > orphan"
        status = subprocess.run(["sh", "-c", script, "sh", TOOL, "launch", "--ranks", "1", "--", "sh", "-c", command],
                                cwd=self.folder, timeout=PATIENCE, stdin=subprocess.DEVNULL).returncode
        self.assertEqual(status, 0)
        sidecar, orphan = (int((self.folder / name).read_text()) for name in ("sidecar", "orphan"))
        left = children()
        self.assertIn(sidecar, left)
        os.kill(sidecar, signal.SIGKILL)
        self.assertNotIn(orphan, left)

    def test_a_command_that_cannot_be_started(self):
        (self.folder / "text").write_text("no program")
        torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        for command, expected in (("./nothing", 127), ("./text", 126)):
            for words in (("--ranks", "2"), ("--scheduler", "torchrun")):
                status, _, err = self.end(self.start(*words, "--", command, variables=torchrun))
                self.assertEqual(status, expected, err)
                self.assertIn(f"cannot start '{command}'", err)

    def test_output_that_nobody_reads(self):
        # Far more than a pipe and the launcher hold; the ranks end all the same.
        script = "import os; print(('y' * 99 + '\\n') * 60000, end='', flush=True); open('up.' + str(os.getpid()), 'w')"
        command = ("--", "python3", "-c", script)
        reader, writer = os.pipe()
        blocked = self.start("--ranks", "2", "--logs", "logs", *command, stdout=writer)
        os.close(writer)
        with open("/dev/full", "w") as full:
            into_full = self.start("--ranks", "1", *command, stdout=full)
        self.wait_for_ranks(3)
        for process, why in ((into_full, "No space left on device"), (blocked, "nobody reads it")):
            self.assertEqual(process.wait(timeout=PATIENCE), 1)
            self.assertIn(f"of standard output were not written: {why}", process.stderr.read())
        os.close(reader)
        for rank in range(2):
            self.assertEqual(len(self.log(rank).split("\n", 1)[1]), 60000 * 100)

    def test_output_is_complete(self):
        # More than any pipe or launcher holds, from all hosts at once, and read slowly.
        lines = 15000
        process = self.start_on_hosts("--", "sh", "-c", f"yes $RANK$RANK | head -c {lines * 100}; echo end of $RANK >&2")
        text = ""
        while piece := process.stdout.read(1 << 20):
            text += piece
            time.sleep(0.01)
        status, _, err = self.end(process)
        self.assertEqual(status, 0, err)
        self.assertEqual(len(text), 2 * lines * 100)
        for rank in range(6):
            log = self.log(rank).split("\n", 1)[1]
            self.assertIn(f"end of {rank}\n", log)
            self.assertEqual(log.count(str(rank)), lines * 100 - lines * 100 // 3 + 1)

    def read_slowly(self, reader, pause):
        size = 0
        while piece := os.read(reader, 1 << 16):
            size += len(piece)
            time.sleep(pause)
        os.close(reader)
        return size

    def test_output_of_many_ranks_is_complete(self):
        # One look at so many pipes brings more than is kept of what nobody reads.
        ranks, size = 64, 200_000
        reader, writer = os.pipe()
        process = self.start("--ranks", str(ranks), "--", "sh", "-c",
                             f"touch up.$RANK; while ! [ -e go ]; do sleep 0.1; done; yes $RANK | head -c {size}",
                             stdout=writer)
        os.close(writer)
        self.wait_for_ranks(ranks)
        (self.folder / "go").touch()
        self.assertEqual(self.read_slowly(reader, 0.004), ranks * size)
        status, _, err = self.end(process)
        self.assertEqual((status, err), (0, ""))

    def test_a_log_that_fails_costs_no_output(self):
        self.logs.mkdir()
        (self.logs / "rank-0.log").symlink_to("/dev/full")
        reader, writer = os.pipe()
        process = self.start("--ranks", "1", "--logs", "logs", "--", "seq", "200000", stdout=writer)
        os.close(writer)
        self.assertEqual(self.read_slowly(reader, 0.02), len("".join(f"{i}\n" for i in range(1, 200001))))
        status, _, err = self.end(process)
        self.assertEqual(status, 1, err)
        self.assertIn("logs/rank-0.log is not complete: No space left on device", err)

    def test_logs_of_a_larger_run_are_removed(self):
        self.logs.mkdir()
        kept = ["rank-2.log.old", "rank-02.log", "rank-x.log", "rank-.log", "my-rank-2.log", "rank--2.log"]
        for name in (*kept, "rank-0.log", "rank-2.log", "rank-17.log"):
            (self.logs / name).write_text("old\n")
        (self.logs / "rank-3.log").mkdir()
        status, _, err = self.end(self.start("--ranks", "2", "--logs", "logs", "--", "echo", "new"))
        self.assertEqual(status, 0, err)
        self.assertEqual(sorted(os.listdir(self.logs)),
                         sorted([*kept, "rank-0.log", "rank-1.log", "rank-3.log", "rank-map.txt"]))
        self.assertTrue(self.log(0).endswith("\nnew\n"))

    def test_a_full_disk_is_reported(self):
        self.logs.mkdir()
        run("mount", "-t", "tmpfs", "-o", "size=64k", "none", str(self.logs))
        self.addCleanup(run, "umount", str(self.logs))
        status, out, err = self.end(self.start("--ranks", "1", "--logs", "logs", "--", "seq", "30000"))
        self.assertEqual(status, 1)
        self.assertEqual(out.splitlines()[-1], "30000")
        self.assertIn("logs/rank-0.log is not complete: No space left on device", err)


if __name__ == "__main__":
    if os.getpid() != 1 or "DEEP_EP_TEST_INSIDE" not in os.environ:
        enter_namespaces()
    del os.environ["DEEP_EP_TEST_INSIDE"]
    make_nodes()
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
