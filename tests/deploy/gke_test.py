"""deploy/gke: what the scripts would do, what they refuse, and the objects of the networks."""

import os
import shlex
import unittest

from support import DEPLOY, InFolder, documents, environment, main, run, stand_in

GKE = DEPLOY / "gke"
SETTINGS = dict(
    line.split("=", 1) for line in (GKE / "env.example").read_text().splitlines() if line and not line.startswith("#")
)


# What everyone must change in the example.
EDITED = {
    "PROJECT_ID": "our-project",
    "ARTIFACT_REGISTRY": SETTINGS["ARTIFACT_REGISTRY"].replace("my-project", "our-project"),
    "BASE_IMAGE": "docker.io/library/debian@sha256:" + "12" * 32,
}


def start(script, *arguments, **changes):
    settings = {**os.environ, **SETTINGS, **changes}
    return run([GKE / script, *arguments], env={key: value for key, value in settings.items() if value is not None})


def command_of(text):
    """The words of a printed command, and its flags with their values."""
    words = shlex.split(text.replace("\\\n", " "))
    flags = {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            value = words[index + 1] if index + 1 < len(words) and not words[index + 1].startswith("--") else ""
            flags.setdefault(word, []).append(value)
    return words, flags


class NodePool(unittest.TestCase):
    def command(self, *arguments, **changes):
        status, text, errors = start("create-nodepool.sh", "--dry-run", *arguments, **changes)
        self.assertEqual((status, errors), (0, ""))
        return command_of(text)

    def test_provisioning(self):
        self.assertIn("--spot", self.command()[1])
        flags = self.command("--provisioning", "reservation", RESERVATION_NAME="mine")[1]
        self.assertEqual(flags["--reservation"], ["mine"])
        self.assertNotIn("--placement-type", flags)
        self.assertNotIn("--spot", self.command("--provisioning", "on-demand")[1])

    def test_wrong_settings_are_all_said_at_once(self):
        status, text, errors = start("create-nodepool.sh", "--dry-run", NODES="0", REGION=None, PROVISIONING="free")
        self.assertEqual((status, text), (2, ""))
        self.assertIn("create-nodepool.sh: NODES is '0', allowed: such as 2\n", errors)
        self.assertIn("REGION is not set", errors)
        self.assertIn("PROVISIONING is 'free', allowed: such as spot, on-demand, reservation", errors)
        for changes, words in (
            ({"ZONE": "us-central1-a"}, "is not in REGION"),
            ({"NODE_VERSION": "1.31.7-gke.1265000"}, "1.32 or later"),
            ({"PROVISIONING": "reservation"}, "RESERVATION_NAME names none"),
            ({"CLUSTER_NAME": "a b; reboot"}, "CLUSTER_NAME is 'a b; reboot'"),
        ):
            with self.subTest(changes):
                status, _, errors = start("create-nodepool.sh", "--dry-run", **changes)
                self.assertEqual(status, 2)
                self.assertIn(words, errors)

    def test_delete(self):
        words, flags = command_of(start("delete-nodepool.sh", "--yes", "--dry-run")[1])
        self.assertEqual(words[:5], ["gcloud", "container", "node-pools", "delete", "a4"])
        self.assertIn("--quiet", flags)
        self.assertNotIn("--quiet", start("delete-nodepool.sh", "--dry-run")[1])


class Networks(InFolder):
    def test_the_file_is_what_the_script_prints(self):
        self.assertEqual(start("networks.sh"), (0, (GKE / "networks.yaml").read_text(), ""))

    def test_names_fit(self):
        objects = documents(GKE / "networks.yaml")
        names = {kind: [d["metadata"]["name"] for d in objects if d["kind"] == kind] for kind in ("Network", "GKENetworkParamSet")}
        self.assertEqual(names["Network"], ["gvnic-1"] + [f"rdma-{nic}" for nic in range(8)])
        self.assertEqual(names["Network"], names["GKENetworkParamSet"])
        for document in objects:
            if document["kind"] == "Network":
                self.assertEqual(document["spec"]["parametersRef"]["name"], document["metadata"]["name"])
        # The same subnets as the node pool's.
        _, flags = command_of(start("create-nodepool.sh", "--dry-run")[1])
        pairs = [f"network={d['spec']['vpc']},subnetwork={d['spec']['vpcSubnet']}" for d in objects if d["kind"] != "Network"]
        self.assertEqual(pairs, flags["--additional-node-network"])

    def test_creation_leaves_what_is_there(self):
        stand_in(self.top / "bin", "gcloud", f'echo "$*" >>{self.top}/calls\n[[ "$*" != *describe*rdma-sub-3* ]]\n')
        status, text, _ = run([GKE / "create-networks.sh"], env=environment(self.top / "bin", **SETTINGS))
        self.assertEqual(status, 0)
        created = [line for line in (self.top / "calls").read_text().splitlines() if " create " in line]
        self.assertEqual(len(created), 1)
        self.assertIn("my-cluster-rdma-sub-3", created[0])
        self.assertIn("subnets my-cluster-rdma-sub-2: it is there", text)


class Environment(InFolder):
    def setUp(self):
        super().setUp()
        self.bin = self.top / "bin"
        for name in ("gcloud", "kubectl"):
            stand_in(self.bin, name, "")

    def check(self, **changes):
        settings = {**SETTINGS, **EDITED, **changes}
        return run([GKE / "check-env.sh"], env=environment(self.bin, **settings))

    def test_the_example_alone_does_not_pass(self):
        status, _, errors = self.check(**SETTINGS)
        self.assertEqual(status, 2)
        self.assertEqual([line.split()[1] for line in errors.splitlines()], ["PROJECT_ID", "ARTIFACT_REGISTRY", "BASE_IMAGE"])

    def test_the_edited_example_passes(self):
        status, text, errors = self.check()
        self.assertEqual((status, errors), (0, ""))
        self.assertIn("2 nodes a4-highgpu-8g as pool a4", text)

    def test_each_variable_is_checked(self):
        optional = {"RESERVATION_NAME", "GCS_BUCKET", "NODE_VERSION", "GPU_DRIVER_VERSION"}
        for name in SETTINGS:
            with self.subTest(name):
                wrong = self.check(**{name: "NO GOOD"})
                missing = self.check(**{name: ""})
                if name != "RESERVATION_NAME":
                    self.assertEqual(wrong[0], 2)
                    self.assertIn(name, wrong[2])
                self.assertEqual(missing[0], 0 if name in optional else 2)
        self.assertIn("allowed: one that stays", self.check(IMAGE_TAG="latest")[2])


main()
