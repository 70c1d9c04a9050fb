"""deploy/slurm with a stand-in for srun: what is started, and whose status comes back."""

import pathlib
import tempfile
import unittest

from support import DEPLOY, environment, main, run, stand_in


class Slurm(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.top = pathlib.Path(folder.name)
        stand_in(self.top / "bin", "srun", 'echo "$*" >"$CALLS"\nexit "$STATUS"\n')
        stand_in(self.top / "prefix/bin", "deep_ep", "")

    def start(self, script, *arguments, **extra):
        settings = {"CALLS": self.top / "calls", "STATUS": 0, "DEEP_EP_HOME": self.top / "prefix", "SLURM_NNODES": 4, "SLURM_JOB_ID": 7}
        settings = {key: str(value) for key, value in {**settings, **extra}.items()}
        return run(["bash", DEPLOY / "slurm" / script, *arguments], env=environment(self.top / "bin", **settings))

    def test_internode(self):
        self.assertEqual(self.start("internode.sbatch", "--tokens", "128"), (0, "", ""))
        program = self.top / "prefix/bin/deep_ep"
        self.assertEqual(
            (self.top / "calls").read_text(),
            f"--kill-on-bad-exit=1 {program} launch --scheduler slurm --ranks 8 --logs deep-ep-7 -- "
            f"{program} bench internode --nodes 4 --check --tokens 128\n",
        )
        self.assertEqual(self.start("internode.sbatch", STATUS=9)[0], 9)

    def test_doctor(self):
        self.assertEqual(self.start("doctor.sbatch", STATUS=1)[0], 1)
        self.assertTrue((self.top / "calls").read_text().endswith("bin/deep_ep doctor\n"))

    def test_no_program(self):
        for script in ("internode.sbatch", "doctor.sbatch"):
            status, _, errors = self.start(script, DEEP_EP_HOME="/nonexistent")
            self.assertEqual(status, 2)
            self.assertIn("there is no program /nonexistent/bin/deep_ep", errors)


main()
