#!/usr/bin/env python3
"""scripts/gpu_check with stand-ins for nvidia-smi and CMake: it builds for the GPUs that are there, and a step that fails counts."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
NVIDIA_SMI = r"""
[ -n "$GPU" ] || exit 9
case "$*" in
  *=index*) printf '0\n1\n' ;;
  *=name*) printf '%s\n%s\n' "$GPU" "$GPU" ;;
  *=compute_cap*) printf '%s\n%s\n' "$CAPABILITY" "$CAPABILITY" ;;
esac
"""


class GpuCheck(unittest.TestCase):
    def test_it_builds_for_the_gpus_that_are_there(self):
        for gpu, capability, status, words in (
            ("NVIDIA B200", "10.0", 0, ("2 GPUs:", " 2 NVIDIA B200;", "-DCMAKE_CUDA_ARCHITECTURES=100a-real")),
            ("NVIDIA H200", "9.0", 0, ("-DCMAKE_CUDA_ARCHITECTURES=90a-real",)),
            ("NVIDIA H200", "9.0", 3, ("FAILED (3)",)),
            ("", "", 0, ("0 GPUs:",)),
        ):
            with self.subTest(gpu=gpu, status=status), tempfile.TemporaryDirectory() as folder:
                top = pathlib.Path(folder)
                (top / "scripts").mkdir()
                shutil.copy(SCRIPTS / "gpu_check", top / "scripts")
                programs = {"scripts/cuda_environment": "", "cmake": f"exit {status}", "nvidia-smi": NVIDIA_SMI}
                for name, script in programs.items():
                    (top / name).write_text("#!/bin/bash\n" + script)
                    (top / name).chmod(0o755)
                environment = {**os.environ, "PATH": f"{top}:{os.environ['PATH']}", "GPU": gpu, "CAPABILITY": capability}
                done = subprocess.run([top / "scripts/gpu_check", top / "out", "build"], env=environment, capture_output=True, text=True)
                self.assertEqual(done.returncode, min(status, 1), done.stderr)
                for word in words:
                    self.assertIn(word, done.stdout)


if __name__ == "__main__":
    unittest.main()
