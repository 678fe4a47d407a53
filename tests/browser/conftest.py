"""JupyterLab as `make lab` serves it, on a copy of the notebooks, and Debian's Chromium to look at it."""

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

ROOT = Path(__file__).resolve().parent.parent.parent
START_SECONDS = 600
WAIT_MS = 300_000  # for what the page, or the kernel, does in a moment where they have a core
ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(address with token, folder of the notebooks) of a JupyterLab that cluster/laptop/lab.py has started."""
    folder = tmp_path_factory.mktemp("clone")
    ignore = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    for part in ("cluster", "notebooks"):
        shutil.copytree(ROOT / part, folder / part, ignore=ignore)
    for private in ("home", "run"):  # nothing of the user's, and no engines that already run
        (folder / private).mkdir(mode=0o700)
    environment = {**os.environ, "HOME": str(folder / "home"), "XDG_RUNTIME_DIR": str(folder / "run")}
    command = [sys.executable, folder / "cluster" / "laptop" / "lab.py", "--browser=no"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    lines, ready = [], threading.Event()

    def read():
        for line in server.stdout:
            lines.append(line)
            if "?token=" in line:
                ready.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        if not ready.wait(START_SECONDS):
            pytest.fail(f"JupyterLab did not say its address within {START_SECONDS} s:\n{''.join(lines)}")
        yield re.search(r"http://\S+", "".join(lines))[0], folder / "notebooks"
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.fixture(scope="session")
def chromium():
    """A headless browser."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.fail("no Chromium on this machine: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGS))
        yield browser
        browser.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Leave on the test what became of it, for the fixture below."""
    report = yield
    item.failed_in_call = call.when == "call" and report.failed
    return report


@pytest.fixture(scope="module")
def kept():
    """{"page": the page of the test before}, where there is one that passed: to load JupyterLab costs 4 s of a core."""
    return {}


@pytest.fixture
def page(chromium, kept, request):
    """A page as large as JupyterLab on a laptop. A test that fails leaves failed.png and prints what the cells said."""
    page = kept.pop("page", None) or chromium.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    yield page
    if request.node.failed_in_call:
        page.screenshot(path=Path(__file__).parent / "failed.png")
        print(*page.locator(".jp-OutputArea-output").all_text_contents(), sep="\n---\n")
        page.close()
    else:
        kept["page"] = page
