"""What a machine has for GPUs, and the reason for each no: found without a GPU, by looking at files."""

import types

import pytest

from hpdl_lab.engines import launch, layout
from hpdl_lab.engines.errors import EngineError
from hpdl_lab.features import gpu, nccl, table


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """The folder in which packages would be."""
    monkeypatch.setattr(nccl, "get_path", lambda name: str(tmp_path))
    return tmp_path


def test_the_nccl_of_a_wheel_is_read_from_its_name(packages):
    assert nccl.installed() is None
    (packages / "nvidia_nccl_cu13-2.32.3.dist-info").mkdir()
    assert nccl.installed() == (2, 32, 3) and nccl.text_of((2, 32, 3)) == "2.32.3"


def test_nccl_is_a_row():
    assert table.nccl_library({"nccl": [2, 32, 3]}).text == "2.32.3 in torch"
    assert not table.nccl_library({}).ok and not table.nccl_library({"nccl": []}).needed


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
        (2, None, "2.21.5", 2, True),
        (1, None, "2.21.5", 2, False),
        (1, None, "2.30.0", 2, True),
        (4, "3", "2.21.5", 2, False),
        (4, "0,1", "2.21.5", 2, True),
        (1, None, None, 2, False),
    ],
)
def test_nccl_serves_ranks_that_share_a_gpu_from_2_30_on(monkeypatch, packages, gpus, visible, version, ranks, serves):
    monkeypatch.setattr(
        gpu, "glob", types.SimpleNamespace(glob=lambda pattern: [f"/dev/nvidia{i}" for i in range(gpus)])
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if version is not None:
        (packages / f"nvidia_nccl_cu13-{version}.dist-info").mkdir()
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
        launch.check_layout(layout.wanted(2, device="cuda"))
