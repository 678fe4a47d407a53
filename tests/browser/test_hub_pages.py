"""A page that one attendee made, in the browser of another who opens it: with one web address for all, and with names.

Eve's server is a program of her own: it answers without asking who comes.
"""

import contextlib
import os
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect

from hpdl_lab.classroom import hub, sockets

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="user ids for attendees need root"),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="there is no bwrap"),
]
HERE = Path(__file__).resolve().parent
ADA, EVE = "ada", "eve"
PASSWORD, MADE_BY_EVE = "correct horse", "THIS PAGE IS EVE'S"
WAIT_MS = 300_000

SERVER = f"""
from tornado import web
find = web.Application.find_handler
class Page(web.RequestHandler):
    def get(self):
        self.finish("<h1>{MADE_BY_EVE}</h1>")
def find_mine(self, request, **how):
    return self.get_handler_delegate(request, Page) if "/page" in request.path else find(self, request, **how)
web.Application.find_handler = find_mine
"""

# What a page tries in the hub at `hub` and in the server of Ada at `server`; {name: what it got}, "no" for nothing.
TRY = """async ([hub, server]) => {
  const got = {};
  const attempt = async (name, take) => {
    try { got[name] = await take(); } catch (error) { got[name] = "no"; }
  };
  const read = async (url, how) => {
    const reply = await fetch(url, { credentials: "include", ...how });
    const said = await reply.text();
    return reply.ok || said.includes("<html") ? said.slice(0, 80) || reply.type : "no";
  };
  for (const mode of ["cors", "no-cors"])
    await attempt(`home by fetch, ${mode}`, async () => {
      const said = await read(`${hub}/hub/home`, { mode });
      return said === "opaque" ? "no" : said;
    });
  for (const path of ["/hub/apiX", "/hub/logoX", "/hub/api/oauth2/authorize", "/hub/none"])
    await attempt(`${path} by fetch`, () => read(hub + path, { mode: "no-cors" }));
  await attempt("logout", async () => {
    await fetch(`${hub}/hub/logout`, { mode: "no-cors", credentials: "include" });
    const reply = await fetch(`${server}/user/ada/api/me`);
    return reply.ok ? "no" : "logged out";
  });
  for (const path of ["/hub/token", "/hub/home"])
    await attempt(`${path} in a window`, async () => {
      const opened = window.open(hub + path);
      await new Promise((done) => setTimeout(done, 2000));
      return opened.closed ? "no" : opened.document.body.innerText.slice(0, 80);
    });
  await attempt("token page in a frame", async () => {
    const frame = document.createElement("iframe");
    frame.src = `${hub}/hub/token`;
    document.body.append(frame);
    await new Promise((done) => (frame.onload = done));
    return frame.contentDocument.body.innerText.includes("API token") ? "the page" : "no";
  });
  await attempt("cookie that proves that a form is meant", async () => {
    const [path, own] = [location.pathname, document.cookie];
    history.pushState({}, "", "/hub/home");
    const seen = document.cookie;
    history.pushState({}, "", path);
    return seen.includes("_xsrf") && seen !== own ? seen : "no";
  });
  await attempt("token", () => read(`${hub}/hub/api/users/ada/tokens`, { method: "POST", body: "{}" }));
  await attempt("files", () => read(`${server}/user/ada/api/contents`));
  await attempt("kernel", () => read(`${server}/user/ada/api/kernels`, { method: "POST", body: "{}" }));
  return got;
}"""


@contextlib.contextmanager
def class_of_two(**how):
    """A hub for Ada and Eve; her server is the program above."""
    with hub.private([ADA, EVE], engines=2, idle=0, trust_attendees=False, **how) as running:
        account = running.state.account(EVE)
        folder = Path(account.home, ".jupyter")
        folder.mkdir()
        (folder / "jupyter_server_config.py").write_text(SERVER)
        for path in (folder, *folder.iterdir()):
            shutil.chown(path, account.uid, account.uid)
        yield running


@pytest.fixture
def browser_of(chromium):
    """`browser_of(running, name)`: the page of a browser in which JupyterLab of `name` is open."""
    contexts = []

    def come(running, name):
        contexts.append(chromium.new_context(viewport={"width": 1440, "height": 900}))
        contexts[-1].set_default_timeout(WAIT_MS)
        page = contexts[-1].new_page()
        page.goto(running.url)
        page.get_by_label("Username").fill(name)
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Sign in").click()
        expect(page.locator(".jp-DirListing-content")).to_contain_text("00_engines", timeout=WAIT_MS)
        return page

    yield come
    for context in contexts:
        context.close()


def test_where_all_share_an_address_nobody_gets_a_page_of_another(browser_of):
    with class_of_two() as running:
        eve, ada = browser_of(running, EVE), browser_of(running, ADA)
        eve.goto(f"{running.url}/user/{EVE}/page")
        assert MADE_BY_EVE in eve.content()
        for path in (f"/user/{EVE}/page", f"/user/{ADA}/../{EVE}/page", "/user/%65ve/page", f"//user/{EVE}/page"):
            reply = ada.context.request.get(running.url + path)
            assert reply.status in (403, 404) and MADE_BY_EVE not in reply.text(), path
        reply = ada.goto(f"{running.url}/user/{EVE}/page")
        assert reply.status == 403 and MADE_BY_EVE not in ada.content()
        ada.screenshot(path=HERE / "hub_page_of_another.png")
        # If one came into her browser all the same: a script at this address, in a page of her own server.
        ada.goto(f"{running.url}/user/{ADA}/api/status")
        got = ada.evaluate(TRY, [running.url, running.url])
        assert {name: what for name, what in got.items() if what != "no"} == {}


def test_where_each_has_a_name_a_page_of_another_gets_nothing(browser_of):
    """Names below "localhost" lead a browser to this machine."""
    with contextlib.closing(sockets.ReservedPort("127.0.0.1", 0)) as held:
        port = held.port
    with class_of_two(port=port, subdomain_host=f"http://hub.localhost:{port}") as running:
        browser_of(running, EVE)
        ada = browser_of(running, ADA)
        assert ada.url.startswith(f"http://{ADA}.hub.localhost:{port}/user/{ADA}/lab")
        ada.goto(f"http://{EVE}.hub.localhost:{port}/user/{EVE}/page")
        assert MADE_BY_EVE in ada.content()
        assert set(ada.evaluate(TRY, [running.url, f"http://{ADA}.hub.localhost:{port}"]).values()) == {"no"}
        ada.goto(f"http://{ADA}.hub.localhost:{port}/user/{ADA}/lab")
        expect(ada.locator(".jp-DirListing-content")).to_contain_text("00_engines")
        assert hub.forget_password(running.settings.state, ADA)
