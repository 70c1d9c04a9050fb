"""What the installer of deploy/k8s does on a node, with folders in the place of the node's and of the image's."""

import json
import os
import shutil

from support import DEPLOY, InFolder, documents, main, run, tool

[CONFIG] = [d for d in documents(DEPLOY / "k8s/base/installer-daemonset.yaml") if d["kind"] == "ConfigMap"]
TOOL = """#!/bin/sh
case "$1" in
  --version) echo "deep_ep VERSION (git abc1234)" ;;
  doctor)
    [ "$2" = --quick ] || exit 9
    [ ! -e "$(dirname "$0")/broken" ] || { echo 'NIC "mlx5_3" is down \\ 1 problem'; exit 1; }
    ;;
esac
"""


class Installer(InFolder):
    def setUp(self):
        super().setUp()
        self.host = self.top / "host"
        for name in ("host", "status"):
            (self.top / name).mkdir()
        self.script = self.top / "install.sh"
        self.script.write_text(CONFIG["data"]["install.sh"])
        self.image("1.2.3")

    def image(self, version, extra=""):
        programs = self.top / "bundle/bin"
        programs.mkdir(parents=True, exist_ok=True)
        (programs / "deep_ep").write_text(TOOL.replace("VERSION", version) + extra)
        (programs / "deep_ep").chmod(0o755)
        (programs / "deep_ep_again").unlink(missing_ok=True)
        (programs / "deep_ep_again").symlink_to("deep_ep")

    def start(self, what="install", shell="sh"):
        places = {"BUNDLE": "bundle", "HOST": "host", "STATUS": "status"}
        return run([shell, self.script, what], env={**os.environ, **{k: str(self.top / v) for k, v in places.items()}})

    def annotations(self):
        return json.loads((self.top / "status/node.json").read_text())["metadata"]["annotations"]

    def names(self):
        return sorted(path.name for path in self.host.iterdir())

    def test_first_run(self):
        status, text, errors = self.start()
        self.assertEqual((status, errors), (0, ""))
        self.assertEqual([line[:5] for line in text.splitlines()], ["[1/5]", "[2/5]", "[3/5]", "[4/5]", "[5/5]"])
        self.assertTrue(all(line.endswith("ok") for line in text.splitlines()), text)
        self.assertEqual(self.names(), ["1.2.3", "current"])
        self.assertEqual(os.readlink(self.host / "current"), "1.2.3")
        self.assertTrue((self.host / "current/bin/deep_ep_again").is_symlink())
        self.assertEqual(self.annotations(), {"deep-ep/version": "1.2.3", "deep-ep/verdict": "usable"})

    def test_second_run_changes_nothing(self):
        self.start()
        before = (self.host / "1.2.3/bin/deep_ep").stat()
        status, text, _ = self.start()
        self.assertEqual(status, 0)
        self.assertIn("it is there", text)
        self.assertEqual((self.host / "1.2.3/bin/deep_ep").stat().st_ino, before.st_ino)
        self.assertEqual(self.names(), ["1.2.3", "current"])

    def test_update_keeps_the_version_before(self):
        self.start()
        self.image("1.3.0")
        self.assertEqual(self.start()[0], 0)
        self.assertEqual(self.names(), ["1.2.3", "1.3.0", "current"])
        self.image("1.4.0")
        self.assertEqual(self.start()[0], 0)
        self.assertEqual(self.names(), ["1.3.0", "1.4.0", "current"])
        self.assertEqual(os.readlink(self.host / "current"), "1.4.0")

    def test_another_build_of_the_same_version(self):
        self.start()
        self.image("1.2.3", extra="# changed\n")
        self.assertEqual(self.start()[0], 0)
        folder = os.readlink(self.host / "current")
        self.assertRegex(folder, r"^1\.2\.3-[0-9a-f]{8}$")
        self.assertEqual(self.annotations()["deep-ep/version"], folder)

    def test_what_an_interrupted_run_left(self):
        (self.host / ".new.7").mkdir()
        (self.host / "1.2.3").mkdir()  # without its sum: not whole
        self.assertEqual(self.start()[0], 0)
        folder = os.readlink(self.host / "current")
        self.assertTrue((self.host / folder / "bin/deep_ep").exists())
        self.assertNotIn(".new.7", self.names())

    def test_unusable_node_is_said_not_failed(self):
        (self.top / "bundle/bin/broken").touch()
        status, text, _ = self.start()
        self.assertEqual(status, 0)
        self.assertIn("[5/5] doctor: fail: not usable:", text)
        self.assertEqual(self.annotations()["deep-ep/verdict"], "not usable: NIC mlx5_3 is down  1 problem")

    def test_the_real_program(self):
        """Its version is one that the script finds, and its doctor answers."""
        link = self.top / "bundle/bin/deep_ep"
        link.unlink()
        shutil.copy(tool(), link)
        status, text, errors = self.start()
        self.assertEqual((status, errors), (0, ""), text)
        self.assertRegex(text, r"(?m)^\[1/5\] image holds \d+\.\d+\.\d+\S*: ok$")
        self.assertRegex(self.annotations()["deep-ep/verdict"], r"^(usable|not usable: .*\w.*)$")

    def test_uninstall_leaves_nothing(self):
        self.start()
        (self.host / ".current.new").touch()
        status, text, _ = self.start("uninstall")
        self.assertEqual((status, text[:5]), (0, "[1/1]"))
        self.assertEqual(self.names(), [])
        self.assertEqual(self.annotations(), {"deep-ep/version": None, "deep-ep/verdict": None})


main()
