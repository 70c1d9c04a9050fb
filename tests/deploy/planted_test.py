"""Mistakes planted in good manifests: each must be found, and by its own rule. They are those that were found in the
manifests people have used for this job, and those that a slip of the hand makes."""

import copy
import re
import unittest

from support import DEPLOY, ROOT, main, variables

import kustomize
import lint
import strict
import yaml

GOOD = kustomize.render(DEPLOY / "k8s/overlays/gke-a4")


def planted(change):
    objects = {f"{d['kind']}/{d['metadata']['name']}": d for d in copy.deepcopy(GOOD)}
    job = objects["Job/deep-ep-internode"]["spec"]
    change(objects, job, job["template"]["spec"], job["template"]["spec"]["containers"][0])
    return list(objects.values())


def env(container, name, value):
    next(item for item in container["env"] if item["name"] == name)["value"] = value


def remove_gpus(container):
    del container["resources"]["limits"]


def rename(objects, old, new):
    objects[old]["metadata"]["name"] = new


# What is done to the objects, the Job, its pod and its container; what the rule says.
MISTAKES = {
    "host_root": (lambda o, j, p, c: p["volumes"].append({"name": "root", "hostPath": {"path": "/"}}), "mounts the node's /"),
    "no_gpu": (lambda o, j, p, c: remove_gpus(c), "asks for no GPU"),
    "no_anti_affinity": (lambda o, j, p, c: p["affinity"].pop("podAntiAffinity"), "no anti-affinity"),
    "anti_affinity_to_others": (
        lambda o, j, p, c: j["template"]["metadata"]["labels"].pop("deep-ep/uses-gpus"),
        "no anti-affinity",
    ),
    "nodes_hardcoded": (lambda o, j, p, c: j.update(completions=4, parallelism=4), "DEEP_EP_NODES 2 is not completions 4"),
    "parallelism": (lambda o, j, p, c: j.update(parallelism=1), "parallelism 1 is not completions 2"),
    "tried_again": (lambda o, j, p, c: j.update(backoffLimitPerIndex=1), "backoffLimitPerIndex is not 0"),
    "logs_deleted": (lambda o, j, p, c: j.update(backoffLimit=0), "no backoffLimit, no maxFailedIndexes"),
    "logs_deleted_at_the_deadline": (lambda o, j, p, c: p.pop("activeDeadlineSeconds"), "no activeDeadlineSeconds before the Job's"),
    "deadlines_are_one": (
        lambda o, j, p, c: p.update(activeDeadlineSeconds=j["activeDeadlineSeconds"]),
        "no activeDeadlineSeconds before the Job's",
    ),
    "backoff": (lambda o, j, p, c: o["Job/deep-ep-collect-logs"]["spec"].pop("backoffLimit"), "backoffLimit is not 0"),
    "priority": (
        lambda o, j, p, c: o["DaemonSet/deep-ep-installer"]["spec"]["template"]["spec"].update(priorityClassName="system-node-critical"),
        "GKE refuses priorityClassName system-node-critical",
    ),
    "no_deadline": (lambda o, j, p, c: j.pop("activeDeadlineSeconds"), "no activeDeadlineSeconds"),
    "restarts": (lambda o, j, p, c: p.update(restartPolicy="OnFailure"), "restartPolicy is not Never"),
    "pod_restarts": (lambda o, j, p, c: o["Pod/deep-ep-intranode"]["spec"].pop("restartPolicy"), "restartPolicy is not Never"),
    "latest": (lambda o, j, p, c: c.update(image="registry/x:latest"), "no digest or fixed tag"),
    "no_tag": (lambda o, j, p, c: c.update(image="registry/x"), "no digest or fixed tag"),
    "dns_race": (
        lambda o, j, p, c: o["Service/deep-ep-internode"]["spec"].pop("publishNotReadyAddresses"),
        "publishNotReadyAddresses",
    ),
    "service_selector": (
        lambda o, j, p, c: o["Service/deep-ep-internode"]["spec"].update(selector={"app": "other"}),
        "selects no pod",
    ),
    "service_name": (lambda o, j, p, c: rename(o, "Service/deep-ep-internode", "other"), "there is no Service"),
    "subdomain": (lambda o, j, p, c: p.update(subdomain="other"), "there is no Service 'other'"),
    "master": (lambda o, j, p, c: env(c, "MASTER_ADDR", "deepep-job-0.deep-ep-internode"), "MASTER_ADDR is"),
    "host_pid": (lambda o, j, p, c: p.update(hostPID=True), "processes of the node"),
    "host_network_and_interfaces": (
        lambda o, j, p, c: p.update(hostNetwork=True, dnsPolicy="ClusterFirstWithHostNet"),
        "interfaces of its own, and hostNetwork",
    ),
    "host_network_dns": (lambda o, j, p, c: p.update(hostNetwork=True), "without dnsPolicy"),
    "interfaces_text": (
        lambda o, j, p, c: j["template"]["metadata"]["annotations"].update({"networking.gke.io/interfaces": "[{"}),
        "is no list of interfaces",
    ),
    "interface_twice": (
        lambda o, j, p, c: j["template"]["metadata"]["annotations"].update(
            {"networking.gke.io/interfaces": '[{"network": "rdma-0"}, {"network": "rdma-0"}]'}
        ),
        "network comes twice",
    ),
    "gcsfuse": (
        lambda o, j, p, c: j["template"]["metadata"]["annotations"].update({"gke-gcsfuse/volumes": "true"}),
        "gcsfuse annotation without such a volume",
    ),
    "one_host": (
        lambda o, j, p, c: j["template"]["metadata"]["annotations"].update(
            {"kueue.x-k8s.io/podset-required-topology": "kubernetes.io/hostname"}
        ),
        "all pods on one node",
    ),
    "no_queue": (
        lambda o, j, p, c: j["template"]["metadata"]["annotations"].update(
            {"kueue.x-k8s.io/podset-preferred-topology": "cloud.google.com/gce-topology-block"}
        ),
        "without a queue has no effect",
    ),
    "pool_name": (
        lambda o, j, p, c: p["nodeSelector"].update({"cloud.google.com/gke-nodepool": "a4-highgpu-ubuntu"}),
        "bound to a node pool by name",
    ),
    "wrong_label": (
        lambda o, j, p, c: p["nodeSelector"].update({"cloud.google.com/gke-accelerator": "nvidia-a4-high-8g"}),
        "no node has the label",
    ),
    "driver_writable": (
        lambda o, j, p, c: next(m for m in c["volumeMounts"] if m["name"] == "driver").pop("readOnly"),
        "can write the node's folder /home/kubernetes/bin/nvidia",
    ),
    "devices_writable": (
        lambda o, j, p, c: next(m for m in c["volumeMounts"] if m["name"] == "infiniband").pop("readOnly"),
        "can write the node's folder /dev/infiniband",
    ),
    "volume_missing": (lambda o, j, p, c: p["volumes"].pop(), "which is no volume"),
    "volume_unused": (lambda o, j, p, c: p["volumes"].append({"name": "x", "emptyDir": {}}), "nothing mounts the volume 'x'"),
    "volume_unnamed": (lambda o, j, p, c: p["volumes"].append({"name": "", "emptyDir": {}}), "empty name"),
    "mounted_twice": (
        lambda o, j, p, c: c["volumeMounts"].append({"name": "infiniband", "mountPath": "/dev/shm"}),
        "mounts two volumes at /dev/shm",
    ),
    "apt": (lambda o, j, p, c: c.update(args=["apt-get update && exec bench"]), "at run time: apt-get"),
    "pip": (lambda o, j, p, c: c.update(args=["pip3 install torch"]), "at run time: pip3"),
    "persistence_mode": (lambda o, j, p, c: c.update(args=["nvidia-smi -pm 1"]), "at run time: nvidia-smi -pm"),
    "installer_reboots": (
        lambda o, j, p, c: o["ConfigMap/deep-ep-installer"]["data"].update({"install.sh": "dpkg -i x.deb\nreboot\n"}),
        "install.sh changes or loads something at run time",
    ),
    "sleeps": (lambda o, j, p, c: c.update(args=["bench; sleep infinity"]), "it never ends"),
    "key": (
        lambda o, j, p, c: o["ConfigMap/deep-ep-installer"]["data"].update(key="-----BEGIN OPENSSH PRIVATE " + "KEY-----"),
        "there is key material",
    ),
    "token": (lambda o, j, p, c: c["env"].append({"name": "HF_TOKEN", "value": "x"}), "HF_TOKEN is written out"),
    "capabilities": (lambda o, j, p, c: c["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]), "other than IPC_LOCK"),
    "capabilities_kept": (lambda o, j, p, c: c.pop("securityContext"), "keeps capabilities"),
    "variable_unknown": (lambda o, j, p, c: c["env"].append({"name": "DEEP_EP_IBTC", "value": "1"}), "DEEP_EP_IBTC is unknown"),
    "variable_twice": (lambda o, j, p, c: c["env"].append({"name": "MASTER_PORT", "value": "1"}), "MASTER_PORT is set twice"),
    "container_twice": (lambda o, j, p, c: p["containers"].append(c), "comes twice"),
    "account": (lambda o, j, p, c: p.update(serviceAccountName="workload-identity-k8s-sa"), "no ServiceAccount"),
    "role": (lambda o, j, p, c: o.pop("ClusterRole/deep-ep-installer"), "there is no ClusterRole"),
    "subject": (lambda o, j, p, c: o.pop("ServiceAccount/deep-ep-installer"), "there is no ServiceAccount"),
    "config_map": (lambda o, j, p, c: o.pop("ConfigMap/deep-ep-installer"), "there is no ConfigMap"),
    "selector": (
        lambda o, j, p, c: o["DaemonSet/deep-ep-installer"]["spec"]["selector"].update(matchLabels={"app": "x"}),
        "its selector does not select its pods",
    ),
    "twice": (lambda o, j, p, c: o.update(again=copy.deepcopy(o["Job/deep-ep-internode"])), "it comes twice"),
}

# What the schema says.
WRONG = {
    "unknown_field": (lambda o, j, p, c: c.update(comand=[]), "the field 'comand' is unknown"),
    "unknown_field_of_job": (lambda o, j, p, c: j.update(defaultArguments=[]), "'defaultArguments' is unknown"),
    "text_for_number": (lambda o, j, p, c: j.update(completions="2"), "'2' is no int"),
    "number_for_text": (lambda o, j, p, c: env(c, "MASTER_PORT", 29500), "29500 is no str"),
    "text_for_flag": (lambda o, j, p, c: p.update(hostNetwork="true"), "'true' is no bool"),
    "object_for_list": (lambda o, j, p, c: p.update(volumes={}), "is no list"),
    "text_for_object": (lambda o, j, p, c: p.update(affinity="near"), "is no object"),
    "no_value": (lambda o, j, p, c: c.update(env=None), "there is no value"),
    "missing": (lambda o, j, p, c: c.pop("name"), "`name`"),
    "kind": (lambda o, j, p, c: o["Pod/deep-ep-intranode"].update(kind="Pot"), "is unknown"),
    "api": (lambda o, j, p, c: o["Pod/deep-ep-intranode"].update(apiVersion="v2"), "is unknown"),
}


class Planted(unittest.TestCase):
    def test_the_good_one_has_none(self):
        self.assertEqual(list(lint.problems_of(GOOD, variables())), [])

    def test_lint_finds_each(self):
        for name, (change, text) in MISTAKES.items():
            with self.subTest(name):
                if name == "variable_unknown" and variables() is None:
                    continue
                found = list(lint.problems_of(planted(change), variables()))
                self.assertTrue([problem for problem in found if text in problem], found)

    def test_the_schema_finds_each(self):
        for name, (change, text) in WRONG.items():
            with self.subTest(name):
                found = [problem for document in planted(change) for problem in strict.problems_of(document)]
                self.assertTrue([problem for problem in found if text in problem], found)

    def test_every_rule_has_its_mistake(self):
        """Each text of lint.py comes out for some planted mistake."""
        said = {p for change, _ in MISTAKES.values() for p in lint.problems_of(planted(change), variables())}
        source = (ROOT / "tests/deploy/lint.py").read_text()
        texts = re.findall(r'yield f"((?:[^"\\]|\\.)*)"', source)
        self.assertGreater(len(texts), 45)
        for text in texts:
            longest = max((part.strip() for part in re.split(r"\{[^}]*\}", text)), key=len)
            if longest not in ELSEWHERE and (variables() is not None or "the variable" not in longest):
                self.assertTrue([p for p in said if longest in p], longest)


# Planted by chart_test.py, in objects of the chart.
ELSEWHERE = {
    ": its pods have no names: enableDNSHostnames is needed",
    "' names no claim",
    ": there is no ResourceClaimTemplate '",
}


class Renderer(unittest.TestCase):
    """The subset of kustomize says what it does not know."""

    def test_patch_without_target(self):
        patch = {"target": {"kind": "Job", "name": "absent"}, "patch": "[]"}
        with self.assertRaises(kustomize.Refused):
            kustomize.patched(GOOD, patch, DEPLOY)

    def test_removal_of_nothing(self):
        with self.assertRaises(kustomize.Refused):
            kustomize.apply_json_patch({"a": 1}, [{"op": "remove", "path": "/b"}])

    def test_merge(self):
        base = yaml.safe_load("{a: {b: 1, c: 2}, env: [{name: x, value: '1'}, {name: y, value: '2'}], args: [1, 2]}")
        patch = yaml.safe_load("{a: {b: null}, env: [{name: y, value: '3'}, {name: z, value: '4'}, {name: x, $patch: delete}], args: [3]}")
        self.assertEqual(
            kustomize.merge(base, patch),
            {"a": {"c": 2}, "env": [{"name": "z", "value": "4"}, {"name": "y", "value": "3"}], "args": [3]},
        )


main()
