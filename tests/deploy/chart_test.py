"""deploy/helm: Helm renders values files to objects that are valid and fit together, and refuses wrong values."""

import unittest

import rules
from support import CHART, DEPLOY, Failed, documents, main, needs, render_chart

EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
IMAGE = {"image": "registry.example/deep-ep@sha256:" + "0" * 64}


def main_object(objects):
    [found] = [d for d in objects if d["kind"] in ("JobSet", "Job") and d["metadata"]["name"] == "testbed"]
    return found


def pod_of(document):
    [(metadata, spec)] = rules.pods(document)
    return metadata, spec


class Chart(unittest.TestCase):
    def setUp(self):
        needs("helm")

    def test_every_example_is_valid_and_fits(self):
        self.assertGreaterEqual(len(EXAMPLES), 6)
        for extra in [IMAGE, *EXAMPLES]:
            with self.subTest(str(extra)):
                values = extra if isinstance(extra, dict) else documents(extra)[0]
                rules.check(self, render_chart(extra), {values.get("workload", {}).get("serviceAccount")})

    def test_numbers_follow_the_gpus(self):
        for gpus, nodes in ((8, 1), (8192, 1024)):
            for controller in ("job", "jobset"):
                workload = {"gpus": gpus, "deadlineSeconds": 600, "controller": controller}
                document = main_object(render_chart({**IMAGE, "workload": workload}))
                [job] = rules.jobs(document)
                self.assertEqual((job["parallelism"], job["completions"]), (nodes, nodes))
                self.assertEqual(rules.variable(pod_of(document)[1]["containers"][0], "TESTBED_NODES"), str(nodes))
                # Pods end before their Job deletes them.
                self.assertEqual((job["activeDeadlineSeconds"], job["template"]["spec"]["activeDeadlineSeconds"]), (600, 540))

    def test_a_device_plugin_takes_the_place_of_the_folder(self):
        extra = {**IMAGE, "network": {"mode": "host", "rdmaResource": "rdma/hca_shared_devices_a"}}
        _, spec = pod_of(main_object(render_chart(extra)))
        self.assertEqual(spec["containers"][0]["resources"]["limits"]["rdma/hca_shared_devices_a"], 1)
        self.assertNotIn("infiniband", {volume["name"] for volume in spec["volumes"]})
        self.assertNotIn("/dev/infiniband", {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]})

    def test_the_images_rdma_core_comes_before_the_nodes(self):
        for folder, wanted in (
            ("", "/usr/lib/x86_64-linux-gnu:/usr/local/nvidia/lib64"),
            ("/home/kubernetes/bin/gib", "/usr/local/nvidia/lib64:/usr/local/gib/lib64"),
        ):
            document = main_object(render_chart({**IMAGE, "workload": {"gibFolder": folder}}))
            self.assertEqual(rules.variable(pod_of(document)[1]["containers"][0], "LD_LIBRARY_PATH"), wanted)

    def test_kueue_and_topology(self):
        def annotated(extra):
            document = main_object(render_chart({**IMAGE, **extra}))
            metadata, spec = pod_of(document)
            keys = [key for key in metadata.get("annotations", {}) if key.startswith("kueue")]
            near = spec["affinity"].get("podAffinity", {})
            return document["metadata"]["labels"].get("kueue.x-k8s.io/queue-name"), keys, list(near)

        prefix = "DuringSchedulingIgnoredDuringExecution"
        for topology in ("preferred", "required"):
            extra = {"topology": {"mode": topology}}
            self.assertEqual(annotated({"queue": "q", **extra}), ("q", [f"kueue.x-k8s.io/podset-{topology}-topology"], []))
            self.assertEqual(annotated(extra), (None, [], [topology + prefix]))
        self.assertEqual(annotated({"queue": "q", "topology": {"mode": "none"}}), ("q", [], []))
        self.assertEqual(annotated({"topology": {"mode": "none"}}), (None, [], []))
        values = documents(CHART / "values.yaml")[0]
        [topology] = documents(DEPLOY / "kueue/topology.yaml")
        self.assertIn(values["topology"]["level"], [level["nodeLabel"] for level in topology["spec"]["levels"]])
        [queue] = documents(DEPLOY / "kueue/local-queue.yaml")
        self.assertEqual(documents(CHART / "examples/four-nodes.yaml")[0]["queue"], queue["metadata"]["name"])

    def test_the_key_of_ssh(self):
        """It is made in the cluster before the pods, goes with the release, and is nowhere without NCCL's test."""
        objects = {(d["kind"], d["metadata"]["name"]): d for d in render_chart(IMAGE)}
        hooks = {key: d["metadata"]["annotations"] for key, d in objects.items() if "helm.sh/hook" in d["metadata"].get("annotations", {})}
        weight = {key: int(annotations.get("helm.sh/hook-weight", 0)) for key, annotations in hooks.items()}
        self.assertLess(weight["Role", "testbed-ssh"], weight["Job", "testbed-ssh"])
        # Not at an upgrade: pods of a Job that runs have the key already.
        self.assertEqual(hooks["Job", "testbed-ssh"]["helm.sh/hook"], "pre-install")
        self.assertEqual(hooks["Job", "testbed-ssh-remove"]["helm.sh/hook"], "post-delete")
        self.assertIn("post-delete", hooks["ServiceAccount", "testbed-ssh"]["helm.sh/hook"])
        names = {v["secret"]["secretName"] for v in pod_of(objects["JobSet", "testbed"])[1]["volumes"] if "secret" in v}
        command = objects["Job", "testbed-ssh"]["spec"]["template"]["spec"]["containers"][0]["command"]
        self.assertEqual(names, {command[4]})
        without = render_chart({**IMAGE, "tests": {"nccl": {"enabled": False}}})
        self.assertNotIn("ssh", {volume["name"] for volume in pod_of(main_object(without))[1]["volumes"]})
        self.assertFalse([d for d in without if d["kind"] in ("Role", "ServiceAccount")])

    def test_scripts(self):
        [config] = [d for d in render_chart(IMAGE) if d["kind"] == "ConfigMap"]
        for path in (CHART / "scripts").iterdir():
            self.assertEqual(config["data"][path.name], path.read_text())
        self.assertEqual(config["data"]["nccl.args"].split()[:3], ["/opt/nccl-tests/build/all_reduce_perf", "-b", "2M"])
        objects = render_chart({**IMAGE, "workload": {"launcher": "#!/bin/bash\necho mine\n"}})
        [config] = [d for d in objects if d["kind"] == "ConfigMap"]
        self.assertEqual(config["data"]["launcher.sh"], "#!/bin/bash\necho mine\n")
        self.assertEqual(rules.variable(pod_of(main_object(objects))[1]["containers"][0], "TESTBED_STAGES"), "launcher")

    def test_wrong_values_are_refused_in_words(self):
        for extra, words in (
            ({}, "image is missing: --set image="),
            ({"image": "a/b:latest"}, "'/image'"),
            ({"image": "a/b"}, "'/image'"),
            ({"workload": {"gpus": 12}}, "'/workload/gpus': multipleOf: got 12, want 8"),
            ({"workload": {"gpus": 0}}, "'/workload/gpus': minimum: got 0, want 8"),
            ({"workload": {"deadlineSeconds": 60}}, "'/workload/deadlineSeconds': minimum: got 60, want 120"),
            ({"workload": {"gpus": "16"}}, "'/workload/gpus': got string, want integer"),
            ({"workload": {"gpu": 16}}, "'/workload': additional properties 'gpu' not allowed"),
            ({"queue": 1}, "'/queue': got number, want string"),
            ({"workload": {"gpus": None}}, "'/workload': missing property 'gpus'"),
            ({"topology": {"mode": "near"}}, "'/topology/mode': value must be one of"),
            ({"topology": {"level": "kubernetes.io/hostname"}}, "'/topology/level'"),
            ({"workload": {"env": {"HF_TOKEN": "x"}}}, "HF_TOKEN"),
            ({"workload": {"env": {"MASTER_PORT": "1"}}}, "MASTER_PORT"),
            ({"results": {"kind": "claim"}}, "results.claim names none"),
            ({"results": {"kind": "bucket", "bucket": "b"}}, "workload.serviceAccount names none"),
            ({"results": {"kind": "bucket"}, "workload": {"serviceAccount": "s"}}, "results.bucket names none"),
            ({"results": {"kind": "bucket", "bucket": "gs://b"}}, "'/results/bucket'"),
            ({"network": {"networks": []}}, "network.networks is empty"),
        ):
            with self.subTest(extra=extra):
                with self.assertRaises(Failed) as failed:
                    render_chart({**IMAGE, **extra} if extra else {})
                self.assertIn(words, str(failed.exception))
        with self.assertRaisesRegex(Failed, "too long"):
            render_chart(IMAGE, release="x" * 41)


main()
