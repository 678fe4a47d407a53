"""An attendee as the hub sees a browser: log in, start a server, open a kernel, run cells; all through the proxy.

browser --HTTP, WebSocket--> proxy --/hub--> hub            login form, server's start and its progress
                               `---/user/ada--> server      session, kernel, messages of the cells
"""

import contextlib
import json
import time
from collections.abc import Collection, Generator
from typing import Any, TypeAlias
from urllib.parse import quote

import requests
import websocket
from jupyter_client.jsonutil import json_default
from jupyter_client.session import Session

Message: TypeAlias = dict[str, Any]  # between browser and kernel
RECEIVE_SECONDS = 1  # shorter than the time between two pings of the server: each ping ends a wait
HTTP_SECONDS = 60  # that one request may take when a whole class comes at once


class Trouble(RuntimeError):
    """The reason why this attendee cannot go on: one sentence, without the name and the step, which the drill adds."""


class CellFailed(Trouble):
    """An exception in a cell: its name and the first line of what it says."""


class Attendee:
    """`name` at the hub of `url` ("http://127.0.0.1:8000"). The calls below are made in this order, then `leave`."""

    def __init__(self, url: str, name: str, password: str) -> None:
        self.url, self.name, self.password = url.rstrip("/"), name, password
        self.server = f"/user/{quote(name)}"  # the path of the server
        self.api = f"/hub/api/users/{quote(name)}/server"
        self.http = requests.Session()
        self.http.trust_env = False  # a proxy of the site's network does not lead to this machine
        self.messages = Session(username=name)
        self.socket: Any = None  # to the kernel, once there is one

    def log_in(self) -> None:
        """Fill in the login form. Raises Trouble if the hub does not let the attendee in."""
        self._ask("GET", "/hub/login")
        form = {"username": self.name, "password": self.password, "_xsrf": self._xsrf("/hub/")}
        reply = self._ask("POST", "/hub/login", known=(401, 403), data=form, allow_redirects=False)
        if reply.status_code != 302:
            raise Trouble(f"the hub does not accept this name and password (HTTP {reply.status_code})")

    def start_server(self, seconds: float) -> None:
        """Ask for a server and follow its progress for `seconds` at most, as the page with the bar does."""
        give_up = time.monotonic() + seconds
        while (reply := self._ask("POST", self.api, "/hub/", (429,), json={})).status_code == 429:
            if time.monotonic() > give_up:
                raise Trouble(f"the hub was still busy with the servers of others after {seconds:g} s (HTTP 429)")
            time.sleep(float(reply.headers.get("Retry-After", 1)))  # the hub starts only so many at once
        with _broken("the hub's report on the server's start broke off"):
            self._read_progress(self._ask("GET", f"{self.api}/progress", xsrf="/hub/", stream=True), give_up, seconds)
        self.enter_server()

    def enter_server(self) -> None:
        """Open JupyterLab on a server that runs: it asks the hub who this is, and leaves its cookie."""
        self._ask("GET", f"{self.server}/lab")

    def _read_progress(self, events: requests.Response, give_up: float, seconds: float) -> None:
        """Return when the server is ready. Raises Trouble with what the hub says of a start that failed."""
        for line in events.iter_lines():
            event = json.loads(line[5:]) if line.startswith(b"data:") else {}
            if event.get("failed"):
                raise Trouble(f"the server did not start: {event['message'].strip().rstrip('.')}")
            if event.get("ready"):
                return events.close()
            if time.monotonic() > give_up:
                raise Trouble(f"the server was not ready after {seconds:g} s")
        raise Trouble("the hub ended its report on the server's start before it was ready")

    def open_notebook(self, path: str) -> None:
        """Start a kernel for the notebook `path` of the server's folder, and connect to it."""
        asked = {"path": path, "name": path, "type": "notebook", "kernel": {"name": "python3"}}
        reply = self._ask("POST", f"{self.server}/api/sessions", json=asked, xsrf=f"{self.server}/")
        kernel = reply.json()["kernel"]["id"]
        channels = f"{self.url}{self.server}/api/kernels/{kernel}/channels?session_id={self.messages.session}"
        cookies = self.http.prepare_request(requests.Request("GET", channels)).headers.get("Cookie", "")
        with _broken("no WebSocket to the kernel through the proxy"):
            address = f"ws{channels.removeprefix('http')}"
            self.socket = websocket.create_connection(address, cookie=cookies, timeout=HTTP_SECONDS)
        self.run("None", HTTP_SECONDS)

    def run(self, code: str, seconds: float) -> str:
        """Run one cell; return what it printed. Raises CellFailed; Trouble after `seconds`."""
        message: Message = self.messages.msg("execute_request", {"code": code, "silent": False})
        number, idle = message["msg_id"], False
        printed: list[str] = []
        reply: Message = {}
        give_up = time.monotonic() + seconds
        with _broken("the connection to the kernel broke"):
            self.socket.send(json.dumps(message | {"channel": "shell"}, default=json_default))
        while not (reply and idle):  # what is sent before the kernel is idle again would be dropped
            message = self._receive(give_up, seconds)
            kind, content = message["msg_type"], message["content"]
            state = content["execution_state"] if kind == "status" else ""
            if state in ("dead", "restarting", "autorestarting"):
                raise Trouble("the kernel died")
            if message["parent_header"].get("msg_id") == number:
                idle |= state == "idle"
                if kind == "stream":
                    printed.append(content["text"])
                elif kind == "execute_reply":
                    reply = content
        if reply["status"] == "error":
            raise CellFailed(f"{reply['ename']}: {reply['evalue'].strip().partition(chr(10))[0]}")
        if reply["status"] == "aborted":
            raise CellFailed("the kernel dropped the cell")
        return "".join(printed)

    def _receive(self, give_up: float, seconds: float) -> Message:
        """Return the next message of the kernel."""
        while time.monotonic() < give_up:
            self.socket.settimeout(RECEIVE_SECONDS)
            with (
                _broken("the connection to the kernel broke"),
                contextlib.suppress(websocket.WebSocketTimeoutException),
            ):
                if not (frame := self.socket.recv()):
                    raise Trouble("the server closed the connection to the kernel")
                return json.loads(frame)
        raise Trouble(f"a cell took more than {seconds:g} s")

    def leave(self) -> None:
        """Close the browser; servers and kernels stay."""
        if self.socket is not None:
            self.socket.close()
        self.http.close()

    def _ask(
        self,
        method: str,
        path: str,
        xsrf: str | None = None,
        known: Collection[int] = (),
        json: Message | None = None,
        data: dict[str, str] | None = None,
        allow_redirects: bool = True,
        stream: bool = False,
    ) -> requests.Response:
        """Return the reply to a request.

        xsrf: the path whose cookie proves that it is meant; known: errors to be returned; the rest as in requests.
        """
        headers = {} if xsrf is None else {"X-XSRFToken": self._xsrf(xsrf)}
        with _broken(f"no answer to {method} {path}"):
            reply = self.http.request(
                *(method, self.url + path),
                headers=headers,
                timeout=HTTP_SECONDS,
                json=json,
                data=data,
                allow_redirects=allow_redirects,
                stream=stream,
            )
        if reply.ok or reply.status_code in known:
            return reply
        try:
            why = reply.json()["message"]
        except (ValueError, KeyError, TypeError):
            why = reply.reason
        raise Trouble(f"{method} {path}: {why} (HTTP {reply.status_code})")

    def _xsrf(self, path: str) -> str:
        """Return the token that belongs to `path`; hub and server have one each."""
        token = self.http.cookies.get("_xsrf", path=path)
        if token is None:
            raise Trouble(f"{self.url}{path} left no _xsrf cookie: is this a JupyterHub?")
        return token


@contextlib.contextmanager
def _broken(what: str) -> Generator[None]:
    """Raise what the network does meanwhile as Trouble("what: why")."""
    try:
        yield
    except (OSError, websocket.WebSocketException) as error:  # errors of requests are OSErrors
        raise Trouble(f"{what}: {error}") from None
