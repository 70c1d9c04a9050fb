"""Every script of deploy/, those inside manifests included, by shellcheck."""

import re
import unittest

from support import DEPLOY, ROOT, documents, main, needs, run


def scripts():
    """(name, text) of all, with the files as they are and those of manifests taken out."""
    for path in sorted(DEPLOY.rglob("*")):
        if not path.is_file():
            continue
        name = str(path.relative_to(ROOT))
        if path.suffix in (".sh", ".sbatch") or path.read_text().startswith("#!"):
            yield name, path.read_text()
        elif path.suffix == ".yaml" and "templates" not in path.parts:
            for document in documents(path):
                yield from inside(name, document)


def inside(name, document):
    if document.get("kind") == "ConfigMap":
        for key, text in document["data"].items():
            if text.startswith("#!"):
                yield f"{name}:{key}", text
    for container in containers(document):
        words = container.get("command", []) + container.get("args", [])
        for first, second in zip(words, words[1:]):
            if re.fullmatch(r"-[a-z]*c", str(first)):
                shell = "bash" if "bash" in str(words[0]) else "sh"
                yield f"{name}:{container['name']}", f"#!/bin/{shell}\n{second}\n"


def containers(value):
    """All objects of lists named containers or initContainers, wherever they are; and steps of Cloud Build."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("containers", "initContainers") and isinstance(inner, list):
                yield from inner
            yield from containers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from containers(inner)


class Scripts(unittest.TestCase):
    def test_there_are_some(self):
        names = [name for name, _ in scripts()]
        self.assertIn("deploy/k8s/base/installer-daemonset.yaml:install.sh", names)
        self.assertIn("deploy/k8s/base/installer-daemonset.yaml:ready", names)
        self.assertIn("deploy/k8s/collect-logs.sh", names)

    def test_shellcheck(self):
        needs("shellcheck")
        for name, text in scripts():
            with self.subTest(name):
                # What a file sources is beside it.
                words = ["-x", name] if (ROOT / name).exists() else ["-"]
                self.assertEqual(run(["shellcheck", "-P", "SCRIPTDIR", *words], input=text, cwd=ROOT), (0, "", ""))


main()
