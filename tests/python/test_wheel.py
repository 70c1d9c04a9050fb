"""The built wheel (scripts/test_python names it): what it says, what it needs, and that it works in an empty environment."""

import base64
import email
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest
from time_scale import scaled

FILE = os.environ.get("DEEP_EP_WHEEL", "")
ROOT = pathlib.Path(__file__).resolve().parents[2]
DEBIAN_12 = 'VERSION_ID="12"' in pathlib.Path("/etc/os-release").read_text()
pytestmark = pytest.mark.skipif(not FILE, reason="DEEP_EP_WHEEL names no wheel")

# Parts of every system, and nothing of C++.
ALLOWED = {"libgcc_s.so.1", "libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1",
           "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}  # fmt: skip
# The manylinux tag that docs/reference/python.md promises of builds on Debian 12; newer systems build for themselves and later.
NEWEST_GLIBC = 34 if DEBIAN_12 else max(34, int(os.confstr("CS_GNU_LIBC_VERSION").split(".")[1]))

DISPATCH = """
import torch
import deep_ep

class Alone:
    def Get_rank(self): return 0
    def Get_size(self): return 1
    def allgather(self, value): return [value]

buffer = deep_ep.Buffer(None, 1 << 20, comm=Alone())
x, idx = torch.arange(6 * 64).view(6, 64).to(torch.bfloat16), torch.tensor([[0], [1], [-1], [1], [0], [-1]])
per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 2)
rows, _, _, counts, handle, _ = buffer.dispatch(
    x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=idx,
    topk_weights=torch.ones(6, 1))
assert counts == [2, 2] and torch.equal(rows, x[[0, 1, 3, 4]])
combined = buffer.combine(rows, handle)[0]
assert torch.equal(combined, x * (idx >= 0))
try:
    buffer.combine(rows[:1], handle)
except deep_ep.errors.InvalidArgument as error:
    print("dispatched and combined", deep_ep.__version__, "and an exception crossed:", error)
"""


def run(*command, **options):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "DEEP_EP_WHEEL")}
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd="/", env=environment, timeout=scaled(120), **options
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The Python of an environment that holds the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, check=True)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", FILE, check=True)
    return python


def version():
    return re.search(r"deep_ep\s+VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)


def test_name_and_metadata():
    with zipfile.ZipFile(FILE) as wheel:
        names = wheel.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        said = email.message_from_bytes(wheel.read(metadata))
        record = wheel.read(metadata.replace("METADATA", "RECORD")).decode().splitlines()
        recorded = dict(line.split(",")[:2] for line in record)
        for name in [name for name in names if not name.endswith("/")]:  # what was renamed is recorded as it is
            digest = base64.urlsafe_b64encode(hashlib.sha256(wheel.read(name)).digest()).rstrip(b"=").decode()
            assert name.endswith("/RECORD") or recorded.pop(name) == f"sha256={digest}", name
    assert not [name for name in recorded if not name.endswith("/RECORD")]
    assert re.fullmatch(r"deep_ep_(cpu|cu\d+)", said["Name"]) and said["Version"] == version(), "names that PyPI takes"
    abi = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tag = rf"{abi}-{abi}-manylinux_2_(\d+)_\w+"
    assert re.fullmatch(rf"{said['Name']}-{re.escape(version())}-{tag}\.whl", os.path.basename(FILE))
    assert int(re.search("manylinux_2_([0-9]+)", FILE).group(1)) <= NEWEST_GLIBC
    assert said["Requires-Python"] == ">=3.9" and said["Summary"] and said["License-Expression"] == "MIT"
    assert said.get_payload().startswith("# deep_ep") and said["Description-Content-Type"].startswith("text/markdown")
    assert all("extra ==" in each for each in said.get_all("Requires-Dist"))
    assert any(name.endswith("LICENSE") for name in names) and {"deep_ep/py.typed", "deep_ep/_native.pyi"} <= set(names)
    linked = [file for file in said.get_all("License-File") if file.startswith("linked/")]
    assert not os.path.exists("/usr/share/doc/libfmt-dev/copyright") or "linked/fmt.txt" in linked
    assert {metadata.replace("METADATA", f"licenses/{file}") for file in linked} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.endswith((".a", ".hpp", ".h"))]


def test_needs_no_other_library(tmp_path):
    binaries = []
    with zipfile.ZipFile(FILE) as wheel:
        for name in wheel.namelist():
            if wheel.read(name)[:4] == b"\x7fELF":
                binaries.append(wheel.extract(name, tmp_path))
    assert len(binaries) == 2, "the extension module and the command"
    for binary in binaries:
        content = pathlib.Path(binary).read_bytes()
        assert str(ROOT).encode() + b"/" not in content, "a path of this machine"
        dynamic = run("readelf", "--wide", "--dynamic", binary, check=True).stdout
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
        assert needed and needed <= ALLOWED, f"{binary} needs {sorted(needed - ALLOWED)}"
        assert not re.search(r"\((RPATH|RUNPATH)\).*[\[:]/", dynamic), "a path of this machine"
        symbols = run("readelf", "--wide", "--dyn-syms", binary, check=True).stdout
        newest = max(int(minor) for minor in re.findall(r"@GLIBC_2\.(\d+)", symbols))
        assert newest <= NEWEST_GLIBC, f"{binary} needs glibc 2.{newest}: on older systems than this one it does not run"
        if "_native" in binary:
            given = [line.split()[-1] for line in symbols.splitlines() if re.search(r" (GLOBAL|WEAK|UNIQUE) +DEFAULT +\d+ ", line)]
            # The others are what PyTorch's pools call.
            wanted = ["PyInit__native", "deep_ep_allocate_segment", "deep_ep_free_segment"]
            assert sorted(given) == wanted, "other extensions may have other C++ libraries"


def test_command_needs_no_pytorch(installed):
    done = run(installed.parent / "deep_ep", "--version")
    assert done.returncode == 0 and done.stderr == "", (done.stdout, done.stderr)
    assert re.match(rf"{re.escape(version())}(-g[0-9a-f]+(-dirty)?)?\n", done.stdout), done.stdout
    done = run(installed.parent / "deep_ep", "no-such-command")
    assert done.returncode not in (0, 1) and "no-such-command" in done.stderr + done.stdout, "arguments and status pass"


def test_dispatch_in_a_clean_environment(installed):
    import torch

    packages = pathlib.Path(torch.__file__).resolve().parents[1]
    (site,) = installed.parents[1].glob("lib/python*/site-packages")
    path = site / "of_the_tests.pth"  # behind what is installed there
    path.write_text(f"{packages}\n")
    # Two kinds of wheel hold the same files, which pip does not notice.
    other = site / "deep_ep_other-1.0.dist-info"
    other.mkdir()
    try:
        done = run(installed, "-c", DISPATCH)
    finally:
        path.unlink()
        other.rmdir()
    assert done.returncode == 0 and f"dispatched and combined {version()} and an exception" in done.stdout, done.stderr
    assert re.search(r"installed more than once, as deep_ep_\w+, deep_ep_other, .*pip uninstall deep_ep", done.stderr), done.stderr


def test_addresses_and_other_wheels(tmp_path):
    """--url reaches the metadata, and a wheel has its kind only once."""
    original = tmp_path / os.path.basename(FILE).replace(re.match("deep_ep_[^-]+", os.path.basename(FILE)).group(), "deep_ep")
    with zipfile.ZipFile(FILE) as wheel, zipfile.ZipFile(original, "w") as out:
        for entry in wheel.infolist():
            data = wheel.read(entry)
            entry.filename = re.sub(r"^deep_ep_[^-/]+-", "deep_ep-", entry.filename)
            if entry.filename.endswith("/METADATA"):
                data = re.sub(rb"(?m)^Name: .*$", b"Name: deep_ep", data)
            out.writestr(entry, data)
    script = ROOT / "scripts" / "name_wheel.py"
    out = tmp_path / "out"
    out.mkdir()
    done = run(sys.executable, script, original, out, "Source=https://example.org/deep_ep")
    assert done.returncode == 0 and os.path.basename(done.stdout.strip()) == os.path.basename(FILE), done.stderr
    with zipfile.ZipFile(done.stdout.strip()) as wheel:
        (metadata,) = [entry for entry in wheel.namelist() if entry.endswith("/METADATA")]
        said = email.message_from_bytes(wheel.read(metadata))
    assert said["Project-URL"] == "Source, https://example.org/deep_ep"
    links = re.findall(r'(?:\]\(|src(?:set)?=")([^)"]+)', said.get_payload())
    assert links and all(link.startswith(("https://", "#")) for link in links), "an index has no files beside the description"
    assert "https://example.org/deep_ep/blob/HEAD/docs/how-to/install.md" in links
    done = run(sys.executable, script, FILE, out)
    assert done.returncode == 1 and "has its name already" in done.stderr


@pytest.mark.parametrize("cuda, kind", [("13.0.88", "cu13"), ("12.8.61", "cu12"), ("none: kernels run on the CPU", "cpu")])
def test_kind_is_what_the_command_says(tmp_path, cuda, kind):
    with zipfile.ZipFile(tmp_path / "deep_ep-9.9-cp311-cp311-linux_x86_64.whl", "w") as wheel:
        wheel.writestr("deep_ep/bin/deep_ep", f"#!/bin/sh\necho '9.9-g0123abc'\necho '  cuda        {cuda}'\n")
        wheel.writestr("deep_ep-9.9.dist-info/METADATA", "Metadata-Version: 2.4\nName: deep_ep\nVersion: 9.9\n\nText\n")
    done = run(sys.executable, ROOT / "scripts" / "name_wheel.py", wheel.filename, tmp_path)
    assert os.path.basename(done.stdout.strip()) == f"deep_ep_{kind}-9.9-cp311-cp311-linux_x86_64.whl", done.stderr
