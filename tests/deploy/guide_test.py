"""docs/how-to/gke.md and docs/how-to/testbed.md: their commands are run, as they stand, with stand-ins for what reaches a cluster; folders
and values are rendered by the real programs, and what the guides name is there."""

import json
import re
import shutil
import unittest

from support import CHART, DEPLOY, ROOT, InFolder, documents, environment, load_all, main, needs, render, run, stand_in, tool

GUIDES = {name: (ROOT / "docs/how-to" / name).read_text() for name in ("gke.md", "testbed.md")}
# Nothing is there before it is made.
GCLOUD = r"""
echo "$*" >>"$CALLS"
case "$*" in
  "artifacts docker images describe "*) echo "${5%:*}@sha256:$(printf 'ab%.0s' {1..32})" ;;
  *" describe "*) exit 1 ;;
esac
"""
KUBECTL = r"""
echo "kubectl $*" >>"$CALLS"
case "$*" in
  "apply -k "* | "delete -k "*) "$KUBECTL" kustomize "$3" ;;
  "apply -f -") cat >"$CALLS.applied" ;;
  *jsonpath=*range*items*) printf 'pod-0 0\npod-1 1\n' ;;
  "get "*/*) echo "$RUN" ;;
  "logs "*) echo "Every checked result is exact" ;;
esac
"""
HELM = r"""
[ "$1" != install ] || "$HELM" template "${@:2}"
"""


def blocks(guide):
    return re.findall(r"^```sh\n(.*?)^```", GUIDES[guide], re.M | re.S)


def edited(text):
    """The example of the settings as a user changes it."""
    return text.replace("my-project", "our-project").replace("0" * 64, "12" * 32)


class Run(InFolder):
    def setUp(self):
        needs("kubectl", "helm")
        super().setUp()
        shutil.copytree(DEPLOY, self.top / "deploy")
        for name, script in (("gcloud", GCLOUD), ("kubectl", KUBECTL), ("helm", HELM), ("git", "echo 0123456789\n")):
            stand_in(self.top / "bin", name, script)
        self.real = {name.upper(): shutil.which(name) for name in ("kubectl", "helm")}
        self.calls = self.top / "calls"

    def start(self, script, result="Complete"):
        settings = {**self.real, "RUN": result, "CALLS": str(self.calls), "USER": "me"}
        return run(["bash", "-c", "set -euo pipefail\n" + script], cwd=self.top, env=environment(self.top / "bin", **settings), timeout=280)

    def test_gke(self):
        parts = blocks("gke.md")
        copied, read_in = parts[0].split("\n", 1)
        self.assertEqual(self.start(copied)[0], 0)
        settings = self.top / "deploy/gke/.env"
        settings.write_text(edited(settings.read_text()))
        status, text, errors = self.start(read_in + "".join(parts[1:5]))
        self.assertEqual((status, errors), (0, ""), text)
        self.assertIn("Every checked result is exact", text)
        status, _, errors = self.start(parts[4], "Failed")
        self.assertEqual(status, 1)
        self.assertIn("job/deep-ep-internode: it failed", errors)
        [job] = [d for d in render(self.top / "deploy/k8s/overlays/gke-a4") if d["metadata"]["name"] == "deep-ep-internode" and d["kind"] == "Job"]
        image = "asia-southeast1-docker.pkg.dev/our-project/images/deep-ep@sha256:" + "ab" * 32
        self.assertEqual(job["spec"]["template"]["spec"]["containers"][0]["image"], image)
        networks = {d["metadata"]["name"] for d in load_all((self.top / "calls.applied").read_text())}
        self.assertEqual(networks, {"gvnic-1"} | {f"rdma-{i}" for i in range(8)})
        calls = self.calls.read_text()
        self.assertEqual(len(re.findall("^[^k].* create ", calls, re.M)), 3 + 1 + 8 + 1)
        # The image knows its commit, although the sources are sent without .git.
        self.assertIn(",_COMMIT=0123456789", calls)
        # The rest, with the settings read in again as in the same shell.
        status, text, errors = self.start("set -a; . deploy/gke/.env; set +a\n" + "".join(parts[5:]))
        self.assertEqual((status, errors), (0, ""), text)

    def test_testbed(self):
        (self.top / "deploy/gke/.env").write_text(edited((DEPLOY / "gke/env.example").read_text()))
        status, text, errors = self.start("".join(blocks("testbed.md")))
        self.assertEqual((status, errors), (0, ""), text)
        self.assertTrue((self.top / "testbed-logs/pod-logs/coordinator.log").exists())
        status, _, errors = self.start("".join(blocks("testbed.md")), "Failed")
        self.assertEqual(status, 1)
        self.assertIn("jobset/me-testbed: it failed", errors)


class Names(unittest.TestCase):
    def test_values_of_the_chart(self):
        [values] = documents(CHART / "values.yaml")
        for name in set(re.findall(r"`([a-z][A-Za-z.]*)`", GUIDES["testbed.md"].split("## Values")[1].split("## When")[0])) | set(
            re.findall(r"--set(?:-file)? \"?([a-zA-Z.]+)=", GUIDES["testbed.md"])
        ):
            if name in ("job", "jobset", "host", "pod", "none", "claim", "bucket", "interfaces", "preferred", "mpirun"):
                continue
            place = values
            for part in name.split("."):
                if part == "NCCL_DEBUG" or (isinstance(place, dict) and not place and name.startswith("workload.env.")):
                    break
                self.assertIn(part, place, name)
                place = place[part]

    def test_objects_components_and_overlays(self):
        objects = [d for overlay in ("gke-a4", "dra") for d in render(DEPLOY / "k8s/overlays" / overlay)]
        names = {d["metadata"]["name"] for d in objects}
        for name in re.findall(r"\bdeep-ep-[a-z-]+", GUIDES["gke.md"]):
            self.assertIn(re.sub(r"-(\d+-)?x*$", "", name).rstrip("-"), names)
        there = {(d["kind"].lower(), d["metadata"]["name"]) for d in objects}
        self.assertLessEqual(set(re.findall(r"\b(job|pod|daemonset)/(deep-ep[a-z-]+)", GUIDES["gke.md"])), there)
        components = {d["metadata"]["labels"]["app.kubernetes.io/component"] for d in objects}
        named = set(re.findall(r"app\.kubernetes\.io/component=([a-z-]+)", "".join(GUIDES.values())))
        self.assertTrue(named and named <= components, named)
        table = set(re.findall(r"^\| `([a-z0-9-]+)` \|", GUIDES["gke.md"].split("## Overlays")[1], re.M))
        self.assertEqual(table, {path.name for path in (DEPLOY / "k8s/overlays").iterdir()})

    def test_commands_and_flags_of_deep_ep(self):
        """In the guides, the manifests and the scripts of the chart."""
        program = tool()
        texts = list(GUIDES.values())
        for document in render(DEPLOY / "k8s/overlays/gke-a4"):
            for found in re.findall(r'"command": (\[[^\]]*\])', json.dumps(document)):
                words = json.loads(found)
                if words[0].endswith("bin/deep_ep"):
                    texts.append("deep_ep " + " ".join(words[1:]).replace("/opt/deep_ep/bin/deep_ep", "\ndeep_ep"))
        for path in [*(CHART / "scripts").iterdir(), *(DEPLOY / "slurm").iterdir()]:
            texts.append(re.sub(r'"\$\{?(?:deep_ep|TESTBED_DEEP_EP)[^"]*"', "\ndeep_ep", path.read_text().replace("\\\n", " ")))
        seen = set()
        for text in texts:
            for line in re.findall(r"\bdeep_ep ((?:doctor|bench|env|size)\b[^\n`|]*)", text):
                words = line.split(" -- ")[0].split()
                command = [words[0]]
                if words[0] == "bench" and len(words) > 1:
                    command.append(words[1])
                seen.add((tuple(command), tuple(re.findall(r"(?<!\S)(--[a-z][a-z-]*)", " ".join(words)))))
        self.assertIn((("bench", "internode"), ("--spawn", "--nodes", "--check")), seen)
        for command, flags in seen:
            status, text, _ = run([program, *command, "--help"])
            self.assertEqual(status, 0, command)
            self.assertIn("Usage: deep_ep " + " ".join(command), text)
            for flag in flags:
                self.assertRegex(text, rf"(?m)^\s+(-\w,)?{flag}\b", f"{command} {flag}")


main()
