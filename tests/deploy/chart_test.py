"""deploy/helm and deploy/kueue: values files render to objects that are valid and fit together; wrong values are refused."""

import copy
import json
import shutil
import unittest

from support import DEPLOY, main, run, tool, variables

import charts
import kustomize
import lint
import strict

EXAMPLES = sorted((charts.CHART / "examples").glob("*.yaml"))
IMAGE = {"image": "registry.example/deep-ep@sha256:" + "0" * 64}


def problems(objects, accounts=()):
    found = [problem for document in objects for problem in strict.problems_of(document)]
    return found + list(lint.problems_of(objects, variables(), accounts))


def main_object(objects):
    [found] = [d for d in objects if d["kind"] in ("JobSet", "Job") and d["metadata"]["name"] == "testbed"]
    return found


def pod_of(document):
    [(metadata, spec)] = lint.templates(document)
    return metadata, spec


class Chart(unittest.TestCase):
    def setUp(self):
        if charts.mini_helm() is None:
            self.skipTest("there is no Go with sprig to render the chart: scripts/setup --deploy installs it")

    def test_every_example_is_valid_and_fits(self):
        self.assertGreaterEqual(len(EXAMPLES), 6)
        for extra in [IMAGE, *EXAMPLES]:
            with self.subTest(str(extra)):
                values = charts.values(extra)
                self.assertEqual(problems(charts.render(values), {values["workload"]["serviceAccount"]}), [])

    def test_every_render_is_the_same(self):
        for extra in (IMAGE, EXAMPLES[0]):
            self.assertEqual(charts.render_text(charts.values(extra)), charts.render_text(charts.values(extra)))

    def test_as_helm_renders_it(self):
        if shutil.which("helm") is None:
            self.skipTest("there is no helm to compare with")
        for extra in EXAMPLES:
            with self.subTest(extra.name):
                status, text, errors = run(["helm", "template", "testbed", charts.CHART, "-f", extra])
                self.assertEqual((status, errors), (0, ""))
                key = lambda d: (d["kind"], d["metadata"]["name"])  # noqa: E731
                self.assertEqual(
                    sorted(kustomize.load_all(text), key=key), sorted(charts.render(charts.values(extra)), key=key)
                )

    def test_numbers_follow_the_gpus(self):
        for gpus, nodes in ((8, 1), (16, 2), (128, 16), (8192, 1024)):
            document = main_object(charts.render(charts.values(IMAGE, {"workload": {"gpus": gpus}})))
            [job] = lint.job_specs(document)
            self.assertEqual((job["parallelism"], job["completions"]), (nodes, nodes))
            self.assertEqual(lint.variable(pod_of(document)[1]["containers"][0], "DEEP_EP_NODES"), str(nodes))

    def test_a_device_plugin_takes_the_place_of_the_folder(self):
        extra = {"network": {"mode": "host", "rdmaResource": "rdma/hca_shared_devices_a"}}
        _, spec = pod_of(main_object(charts.render(charts.values(IMAGE, extra))))
        self.assertEqual(spec["containers"][0]["resources"]["limits"]["rdma/hca_shared_devices_a"], 1)
        self.assertNotIn("infiniband", {volume["name"] for volume in spec["volumes"]})
        self.assertNotIn("/dev/infiniband", {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]})

    def test_the_images_rdma_core_comes_before_the_nodes(self):
        for folder, wanted in (
            ("", "/usr/lib/x86_64-linux-gnu:/usr/local/nvidia/lib64"),
            ("/home/kubernetes/bin/gib", "/usr/local/nvidia/lib64:/usr/local/gib/lib64"),
        ):
            document = main_object(charts.render(charts.values(IMAGE, {"workload": {"gibFolder": folder}})))
            self.assertEqual(lint.variable(pod_of(document)[1]["containers"][0], "LD_LIBRARY_PATH"), wanted)

    def test_pods_end_before_their_job_deletes_them(self):
        for controller in ("job", "jobset"):
            objects = charts.render(charts.values(IMAGE, {"workload": {"deadlineSeconds": 600, "controller": controller}}))
            [job] = lint.job_specs(main_object(objects))
            self.assertEqual((job["activeDeadlineSeconds"], job["template"]["spec"]["activeDeadlineSeconds"]), (600, 540))
            self.assertEqual((job["backoffLimitPerIndex"], job.get("backoffLimit")), (0, None))

    def test_kueue_and_topology(self):
        def annotated(extra):
            document = main_object(charts.render(charts.values(IMAGE, extra)))
            metadata, spec = pod_of(document)
            keys = [key for key in metadata.get("annotations", {}) if key.startswith("kueue")]
            near = spec["affinity"].get("podAffinity", {})
            return document["metadata"]["labels"].get("kueue.x-k8s.io/queue-name"), keys, list(near)

        prefix = "DuringSchedulingIgnoredDuringExecution"
        self.assertEqual(annotated({"queue": "a4-high"}), ("a4-high", ["kueue.x-k8s.io/podset-preferred-topology"], []))
        self.assertEqual(
            annotated({"queue": "q", "topology": {"mode": "required"}}), ("q", ["kueue.x-k8s.io/podset-required-topology"], [])
        )
        self.assertEqual(annotated({"queue": "q", "topology": {"mode": "none"}}), ("q", [], []))
        self.assertEqual(annotated({}), (None, [], ["preferred" + prefix]))
        self.assertEqual(annotated({"topology": {"mode": "required"}}), (None, [], ["required" + prefix]))
        self.assertEqual(annotated({"topology": {"mode": "none"}}), (None, [], []))

    def test_what_is_cleared_is_gone(self):
        plain = main_object(charts.render(charts.values(charts.CHART / "examples/plain-job.yaml")))
        _, spec = pod_of(plain)
        self.assertNotIn("nodeSelector", spec)
        self.assertNotIn("driver", {volume["name"] for volume in spec["volumes"]})

    def test_values_that_deep_ep_env_prints(self):
        status, text, errors = run([tool(), "env", "--profile", "gke-a4", "--nccl", "--format", "helm"])
        self.assertEqual((status, errors), (0, ""))
        [printed] = kustomize.load_all(text)
        objects = charts.render(charts.values(IMAGE, {"workload": {"gibFolder": "/home/kubernetes/bin/gib"}}, printed))
        self.assertEqual(problems(objects), [])
        container = pod_of(main_object(objects))[1]["containers"][0]
        self.assertEqual(lint.variable(container, "DEEP_EP_RDMA_TRAFFIC_CLASS"), str(charts.values()["network"]["trafficClass"]))
        self.assertEqual(lint.variable(container, "NCCL_NET"), "gIB")
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        self.assertTrue(mounts["/usr/local/gib"]["readOnly"])

    def test_no_key_and_no_sshd_without_nccl(self):
        without = charts.render(charts.values(IMAGE, {"tests": {"nccl": {"enabled": False}}}))
        self.assertNotIn("ssh", {volume["name"] for volume in pod_of(main_object(without))[1]["volumes"]})
        self.assertFalse([d for d in without if d["kind"] in ("Role", "ServiceAccount")])
        self.assertNotIn("Secret", {d["kind"] for d in charts.render(charts.values(IMAGE))})  # made in the cluster

    def test_the_launcher_replaces_the_tests(self):
        objects = charts.render(charts.values(IMAGE, {"workload": {"launcher": "#!/bin/bash\necho mine\n"}}))
        [config] = [d for d in objects if d["kind"] == "ConfigMap"]
        self.assertEqual(config["data"]["launcher.sh"], "#!/bin/bash\necho mine\n")
        self.assertEqual(lint.variable(pod_of(main_object(objects))[1]["containers"][0], "TESTBED_STAGES"), "launcher")

    def test_scripts_arrive_as_they_are(self):
        [config] = [d for d in charts.render(charts.values(IMAGE)) if d["kind"] == "ConfigMap"]
        for path in (charts.CHART / "scripts").iterdir():
            self.assertEqual(config["data"][path.name], path.read_text())
        self.assertEqual(config["data"]["nccl.args"].split()[:3], ["/opt/nccl-tests/build/all_reduce_perf", "-b", "2M"])

    def test_wrong_values_are_refused_in_words(self):
        for extra, words in (
            ({}, "image is missing: --set image="),
            ({"image": "a/b:latest"}, "image: 'a/b:latest'"),
            ({"image": "a/b"}, "image: 'a/b'"),
            ({**IMAGE, "workload": {"gpus": 12}}, "workload.gpus: 12 is not a multiple of 8"),
            ({**IMAGE, "workload": {"gpus": 0}}, "workload.gpus: 0 is less than the minimum of 8"),
            ({**IMAGE, "workload": {"deadlineSeconds": 60}}, "workload.deadlineSeconds: 60 is less than the minimum of 120"),
            ({**IMAGE, "workload": {"gpus": "16"}}, "workload.gpus: '16' is not of type 'integer'"),
            ({**IMAGE, "workload": {"gpu": 16}}, "workload: Additional properties are not allowed ('gpu' was unexpected)"),
            ({**IMAGE, "subnetworks[]": []}, "'subnetworks[]' was unexpected"),
            ({**IMAGE, "queue": 1}, "queue: 1 is not of type 'string'"),
            ({**IMAGE, "workload": {"gpus": None}}, "workload: 'gpus' is a required property"),
            ({**IMAGE, "topology": {"mode": "near"}}, "topology.mode: 'near' is not one of"),
            ({**IMAGE, "topology": {"level": "kubernetes.io/hostname"}}, "topology.level: 'kubernetes.io/hostname'"),
            ({**IMAGE, "workload": {"env": {"HF_TOKEN": "x"}}}, "'HF_TOKEN'"),
            ({**IMAGE, "workload": {"env": {"MASTER_PORT": "1"}}}, "'MASTER_PORT'"),
            ({**IMAGE, "results": {"kind": "claim"}}, "results.claim names none"),
            ({**IMAGE, "results": {"kind": "bucket", "bucket": "b"}}, "workload.serviceAccount names none"),
            ({**IMAGE, "results": {"kind": "bucket"}, "workload": {"serviceAccount": "s"}}, "results.bucket names none"),
            ({**IMAGE, "results": {"kind": "bucket", "bucket": "gs://b"}}, "results.bucket: 'gs://b'"),
            ({**IMAGE, "network": {"networks": []}}, "network.networks is empty"),
        ):
            with self.subTest(extra=extra):
                with self.assertRaises(charts.Failed) as failed:
                    charts.render(charts.values(extra))
                self.assertIn(words, str(failed.exception))
        with self.assertRaises(charts.Failed) as failed:
            charts.render(charts.values(IMAGE), release="x" * 41)
        self.assertIn("too long", str(failed.exception))

    def test_the_schema_knows_every_value(self):
        """All keys of values.yaml, and no others."""

        def compare(values, schema, place):
            if "properties" in schema:
                self.assertEqual(set(values) | {"global"}, set(schema["properties"]) | {"global"}, place)
                self.assertIs(schema["additionalProperties"], False, place)
                for key, value in values.items():
                    compare(value, schema["properties"][key], f"{place}.{key}")

        compare(charts.values(), json.loads((charts.CHART / "values.schema.json").read_text()), "values")

    def test_planted_mistakes(self):
        bad = charts.render(charts.values(IMAGE))
        job_set = main_object(bad)
        job_set["spec"]["network"]["enableDNSHostnames"] = False
        self.assertIn("enableDNSHostnames is needed", "".join(problems(bad)))
        claims = charts.render(charts.values(charts.CHART / "examples/claim.yaml"))
        volumes = pod_of(main_object(claims))[1]["volumes"]
        next(v for v in volumes if v["name"] == "results")["persistentVolumeClaim"]["claimName"] = ""
        self.assertIn("names no claim", "".join(problems(claims)))
        for change, words in (
            (lambda d: d["spec"].update(nfs={}), "'nfs' was unexpected"),
            (lambda d: d["spec"]["replicatedJobs"][0].update(name="a4u_workload"), "'a4u_workload' does not match"),
            (lambda d: d["spec"].pop("replicatedJobs"), "'replicatedJobs' is a required property"),
            (lambda d: d["spec"]["replicatedJobs"][0]["template"].update(queue=""), "the field 'queue' is unknown"),
        ):
            document = copy.deepcopy(main_object(charts.render(charts.values(IMAGE))))
            change(document)
            self.assertIn(words, "".join(strict.problems_of(document)))


class Hooks(unittest.TestCase):
    """The key of ssh comes before the pods, and goes with the release."""

    def test_order(self):
        if charts.mini_helm() is None:
            self.skipTest("there is no Go with sprig to render the chart: scripts/setup --deploy installs it")
        objects = {(d["kind"], d["metadata"]["name"]): d for d in charts.render(charts.values(IMAGE))}
        weights = {}
        for key, document in objects.items():
            annotations = document["metadata"].get("annotations", {})
            if "helm.sh/hook" in annotations:
                weights[key] = (int(annotations.get("helm.sh/hook-weight", 0)), annotations["helm.sh/hook"])
        self.assertLess(weights["Role", "testbed-ssh"][0], weights["Job", "testbed-ssh"][0])
        # Not at an upgrade: pods of a Job that runs have the key already.
        self.assertEqual(weights["Job", "testbed-ssh"][1], "pre-install")
        self.assertEqual(weights["Job", "testbed-ssh-remove"][1], "post-delete")
        self.assertIn("post-delete", weights["ServiceAccount", "testbed-ssh"][1])
        pod = pod_of(objects["JobSet", "testbed"])[1]
        names = {v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
        command = objects["Job", "testbed-ssh"]["spec"]["template"]["spec"]["containers"][0]["command"]
        self.assertEqual(names, {command[4]})


class Kueue(unittest.TestCase):
    def test_valid_and_fitting(self):
        objects = {d["kind"]: d for d in kustomize.render(DEPLOY / "kueue")}
        self.assertEqual([p for d in objects.values() for p in strict.problems_of(d)], [])
        flavor, queue = objects["ResourceFlavor"], objects["ClusterQueue"]
        self.assertEqual(flavor["spec"]["topologyName"], objects["Topology"]["metadata"]["name"])
        [group] = queue["spec"]["resourceGroups"]
        self.assertEqual(group["flavors"][0]["name"], flavor["metadata"]["name"])
        self.assertEqual([r["name"] for r in group["flavors"][0]["resources"]], group["coveredResources"])
        self.assertEqual(objects["LocalQueue"]["spec"]["clusterQueue"], queue["metadata"]["name"])
        levels = [level["nodeLabel"] for level in objects["Topology"]["spec"]["levels"]]
        self.assertIn(charts.values()["topology"]["level"], levels)
        example = kustomize.documents(charts.CHART / "examples/four-nodes.yaml")[0]
        self.assertEqual(example["queue"], objects["LocalQueue"]["metadata"]["name"])
        settings = (DEPLOY / "gke/env.example").read_text()
        self.assertIn(f"\nKUEUE_NAME={example['queue']}\n", settings)
        self.assertEqual(flavor["spec"]["nodeLabels"]["cloud.google.com/gke-accelerator"], lint.A4_GPU)


main()
