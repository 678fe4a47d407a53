"""What a machine has for GPUs, and the reason for each no: found without a GPU, by looking at files."""

import ctypes
import subprocess

import pytest

from hpdl_lab.engines import launch, layout
from hpdl_lab.engines.errors import EngineError
from hpdl_lab.features import Missing, gpu, nccl, table

LIBRARY = """
int {name}(int* version) {{ *version = {version}; return {code}; }}
"""


def make_library(path, version=23203, code=0, name="ncclGetVersion"):
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_suffix(".c")
    source.write_text(LIBRARY.format(name=name, version=version, code=code))
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", path], check=True, timeout=60)


@pytest.fixture
def places(monkeypatch, tmp_path):
    """Folders in which the wheel and torch would be; the system has no NCCL."""
    found = {"nvidia": [str(tmp_path / "nvidia")], "torch": [str(tmp_path / "torch")]}
    monkeypatch.setattr(nccl, "folders", lambda package: found[package])
    monkeypatch.setattr(nccl, "on_system", lambda: ("", "libnccl.so.2: no such file"))
    return tmp_path


def test_the_wheel_is_the_first_place(places):
    make_library(places / "nvidia/nccl/lib/libnccl.so.2", 23203)
    make_library(places / "torch/lib/libnccl.so.2", 22105)
    found = nccl.find()
    assert (found.path, found.version) == (f"{places}/nvidia/nccl/lib/libnccl.so.2", 23203)


def test_the_library_inside_torch(places):
    make_library(places / "torch/lib/libtorch_cuda.so", 22105)
    assert nccl.find() == (f"{places}/torch/lib/libtorch_cuda.so", "torch", 22105)


def test_every_place_has_its_reason(places):
    make_library(places / "nvidia/nccl/lib/libnccl.so.2", 2708)
    with pytest.raises(Missing) as caught:
        nccl.find()
    text = str(caught.value)
    assert "libnccl.so.2 is 2.7.8, 2.18.0 or newer is needed" in text
    assert "nor in torch: this torch was built without CUDA" in text
    assert text.endswith("nor in the system's libraries: libnccl.so.2: no such file")


@pytest.mark.parametrize("content", ["code", "no NCCL", "no library"])
def test_a_library_that_is_broken_is_a_reason_and_no_traceback(places, content):
    path = places / "nvidia/nccl/lib/libnccl.so.2"
    make_library(path, code=3, name="another" if content == "no NCCL" else "ncclGetVersion")
    if content == "no library":
        path.write_text("broken")
    expected = {"code": "failed with code 3", "no NCCL": "undefined symbol: ncclGetVersion", "no library": "too short"}
    row = table.nccl_library()
    assert not row.ok and not row.needed and expected[content] in row.text


def test_a_library_is_a_row(places):
    make_library(places / "nvidia/nccl/lib/libnccl.so.2")
    row = table.nccl_library()
    assert row.ok and row.text.startswith("2.32.3 of the nvidia-nccl wheel, ")


def test_versions_are_told_as_people_write_them():
    assert [nccl.text_of(code) for code in (2708, 21800, 23203)] == ["2.7.8", "2.18.0", "2.32.3"]


def test_no_driver_is_the_first_reason(monkeypatch):
    monkeypatch.setattr(gpu.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(gpu.os.path, "exists", lambda path: False)
    assert gpu.why_no_gpu() == "no NVIDIA driver: /dev/nvidia0 does not exist"


@pytest.mark.parametrize(
    ("version", "visible", "why"),
    [
        ("cuda: Optional[str] = '13.0'", None, ""),
        ("cuda: Optional[str] = None", None, "this torch was built without CUDA"),
        ("cuda = None", None, "this torch was built without CUDA"),
        ("cuda = '12.8'", "", "CUDA_VISIBLE_DEVICES='' hides every GPU"),
        ("cuda = '12.8'", "-1", "CUDA_VISIBLE_DEVICES='-1' hides every GPU"),
        ("cuda = '12.8'", "1", ""),
    ],
)
def test_with_a_driver(monkeypatch, tmp_path, version, visible, why):
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{version}\nhip = None\n")
    monkeypatch.setattr(gpu, "folders", lambda package: [str(tmp_path)])
    monkeypatch.setattr(gpu, "no_driver", lambda: "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu.why_no_gpu().startswith(why) and bool(gpu.why_no_gpu()) == bool(why)


@pytest.mark.parametrize(
    ("gpus", "visible", "version", "ranks", "serves"),
    [
        (2, None, 22105, 2, True),
        (1, None, 22105, 2, False),
        (1, None, 23000, 2, True),
        (4, "3", 22105, 2, False),
        (4, "0,1", 22105, 2, True),
        (1, None, None, 2, False),
    ],
)
def test_nccl_serves_ranks_that_share_a_gpu_from_2_30_on(monkeypatch, places, gpus, visible, version, ranks, serves):
    monkeypatch.setattr(gpu.glob, "glob", lambda pattern: [f"/dev/nvidia{i}" for i in range(gpus)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if version is not None:
        make_library(places / "nvidia/nccl/lib/libnccl.so.2", version)
    assert gpu.nccl_serves(ranks) == serves


def test_a_build_without_nvcc_says_so(monkeypatch, tmp_path):
    def absent(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(gpu.importlib, "import_module", absent)
    monkeypatch.setattr(gpu.shutil, "which", lambda name, path: None)
    row = table.cuda_kernels()
    assert not row.ok and row.text.endswith("found no working nvcc: put nvcc on PATH, then make install")
    monkeypatch.setattr(gpu.shutil, "which", lambda name, path: "/opt/cuda/bin/nvcc")
    assert table.cuda_kernels().text.endswith("nvcc is at /opt/cuda/bin/nvcc: make install")


def test_engines_on_gpus_need_one(monkeypatch):
    monkeypatch.setattr(gpu, "why_no_gpu", lambda: "no NVIDIA driver: /dev/nvidia0 does not exist")
    sentence = (
        r"2 engines on GPUs cannot start: no NVIDIA driver: /dev/nvidia0 does not exist. Without a GPU: lab.start\(2\)"
    )
    with pytest.raises(EngineError, match=sentence):
        launch.check(layout.wanted(2, device="cuda"))
    monkeypatch.setattr(gpu, "why_no_gpu", lambda: "")
    with pytest.raises(EngineError, match="no NCCL in the nvidia-nccl wheel"):
        monkeypatch.setattr(nccl, "folders", lambda package: [])
        monkeypatch.setattr(nccl, "on_system", lambda: ("", "not there"))
        launch.check(layout.wanted(2, device="cuda"))


def test_the_real_library_where_it_is_installed():
    """NCCL answers some questions without a GPU: its version, its texts."""
    try:
        path = nccl.find().path
    except Missing as error:
        pytest.skip(str(error))
    text = ctypes.CDLL(path).ncclGetErrorString
    text.restype = ctypes.c_char_p
    assert text(0) == b"no error"
