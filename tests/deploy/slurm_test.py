"""deploy/slurm with a stand-in for srun: what is started, and whose status comes back."""

from support import DEPLOY, InFolder, environment, main, run, stand_in


# It starts the second node's process.
SRUN = """echo "$*" >"$CALLS"
while [ "${1#--}" != "$1" ]; do shift; done
SLURM_NODEID=1 "$@" && exit "$STATUS"
"""


class Slurm(InFolder):
    def setUp(self):
        super().setUp()
        stand_in(self.top / "bin", "srun", SRUN)
        stand_in(self.top / "bin", "scontrol", '[ "$*" = "show hostnames gpu[07-08]" ] && printf "gpu07\\ngpu08\\n"')
        stand_in(self.top / "prefix/bin", "deep_ep", 'echo "$RANK/$WORLD_SIZE $MASTER_ADDR $DEEP_EP_JOB_TOKEN $*" >"$CALLS.rank"\n')

    def start(self, script, *arguments, **extra):
        settings = {"CALLS": self.top / "calls", "STATUS": 0, "DEEP_EP_HOME": self.top / "prefix", "SLURM_NNODES": 2,
                    "SLURM_JOB_ID": 77, "SLURM_JOB_NODELIST": "gpu[07-08]"}  # fmt: skip
        settings = {key: str(value) for key, value in {**settings, **extra}.items() if value is not None}
        inherited = environment(self.top / "bin")
        inherited = {key: value for key, value in inherited.items() if not key.startswith(("DEEP_EP_", "SLURM_"))}
        return run(["bash", DEPLOY / "slurm" / script, *arguments], env={**inherited, **settings})

    def test_internode(self):
        self.assertEqual(self.start("internode.sbatch", "--tokens", "128"), (0, "", ""))
        self.assertTrue((self.top / "calls").read_text().startswith("--ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none sh -c "))
        self.assertEqual(
            (self.top / "calls.rank").read_text(), "1/2 gpu07 77 bench internode --spawn 8 --nodes 2 --check --tokens 128\n"
        )
        self.assertEqual(self.start("internode.sbatch", STATUS=9)[0], 9)

    def test_gpus_with_their_type(self):
        for given, ranks in (("4", "4"), ("h200:8", "8"), ("nvidia:b200:2", "2")):
            self.assertEqual(self.start("internode.sbatch", SLURM_GPUS_PER_NODE=given), (0, "", ""))
            self.assertIn(f" --spawn {ranks} ", (self.top / "calls").read_text())
        for given in ("h200:", "h200", "h200:4,b200:4"):
            status, _, errors = self.start("internode.sbatch", SLURM_GPUS_PER_NODE=given)
            self.assertEqual(status, 2)
            self.assertIn(f"SLURM_GPUS_PER_NODE is '{given}', allowed: NUMBER, or TYPE:NUMBER", errors)

    def test_where_install_sh_puts_it_for_a_user(self):
        stand_in(self.top / "home/.local/deep_ep/bin", "deep_ep", "")
        for script in ("internode.sbatch", "doctor.sbatch"):
            self.assertEqual(self.start(script, DEEP_EP_HOME=None, HOME=self.top / "home"), (0, "", ""))
            self.assertIn(f" {self.top}/home/.local/deep_ep/bin/deep_ep ", (self.top / "calls").read_text())

    def test_doctor(self):
        self.assertEqual(self.start("doctor.sbatch", STATUS=1)[0], 1)
        self.assertTrue((self.top / "calls").read_text().endswith("bin/deep_ep doctor\n"))


main()
