"""The command of deploy/k8s/base/internode-job.yaml as the pods would run it, by the real program on the CPU: two "pods" on
this machine, two ranks each."""

import os
import pathlib
import subprocess
import sys
import unittest

from support import DEPLOY, main, render, tool

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from held_ports import held_ports  # noqa: E402


def pods(more, port):
    """What each pod is started with."""
    documents = render(DEPLOY / "k8s/overlays/hostnetwork")
    [job] = [d for d in documents if d["kind"] == "Job" and d["metadata"]["name"] == "deep-ep-internode"]
    container = job["spec"]["template"]["spec"]["containers"][0]
    command = [tool() if word.endswith("/bin/deep_ep") else word for word in container["command"]]
    command[command.index("--spawn") + 1] = "2"
    variables = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    variables.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "OMPI_", "PMI_"))}
    for index in range(job["spec"]["completions"]):
        yield command + more, {**clean, **variables, "RANK": str(index)}


class Job(unittest.TestCase):
    def start(self, *more):
        with held_ports() as port:
            running = [
                subprocess.Popen(command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                for command, variables in pods(list(more), port)
            ]
            texts = [one.communicate(timeout=280)[0] for one in running]
        return [one.returncode for one in running], texts

    def test_it_runs(self):
        statuses, texts = self.start("--device", "cpu", "--experts", "8", "--topk", "2", "--tokens", "4", "--hidden", "256", "--iterations", "2")
        self.assertEqual(statuses, [0, 0], texts)
        self.assertIn("\nEvery checked result is exact", texts[0])

    def test_the_pod_of_one_node_runs(self):
        documents = render(DEPLOY / "k8s/overlays/hostnetwork")
        [pod] = [d for d in documents if d["kind"] == "Pod" and d["metadata"]["name"] == "deep-ep-intranode"]
        command = pod["spec"]["containers"][0]["command"]
        small = ["--ranks", "2", "--device", "cpu", "--experts", "8", "--topk", "2", "--tokens", "4", "--hidden", "256", "--iterations", "2"]
        done = subprocess.run([tool(), *command[1:], *small], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=280)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("Every checked result is exact", done.stdout)

    def test_both_pods_fail(self):
        statuses, texts = self.start("--device", "cpu", "--topk", "0")  # each rank refuses it before it meets others
        self.assertEqual(statuses, [2, 2], texts)


main()
