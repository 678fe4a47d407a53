"""One attendee as the hub sees a browser: log in, start a server, open a kernel, run cells; all through the proxy.

    browser --HTTP, WebSocket--> proxy --/hub--> hub            login form, server's start and its progress
                                   `---/user/ada--> server      session, kernel, messages of the cells

The drill has one of these per attendee, each in a thread of its own. It keeps the cookies that a browser would keep and
uses no token of an administrator.
"""

import json
import time
import uuid
from urllib.parse import quote, urlsplit

import requests
import websocket

HTTP_SECONDS = 60  # that one request may take where a whole class comes at once


class Trouble(RuntimeError):
    """What kept this attendee from going on: one sentence, without the name and the step, which the drill knows."""


class CellFailed(Trouble):
    """An exception in a cell: its name and the first line of what it says."""


class Attendee:
    """`name` at the hub of `url` ("http://127.0.0.1:8000"). The calls below are made in this order, then `leave`."""

    def __init__(self, url, name, password):
        self.url, self.name, self.password = url.rstrip("/"), name, password
        self.server = f"/user/{quote(name)}"  # the path of the server
        self.http = requests.Session()
        self.http.trust_env = False  # a proxy of the site's network does not lead to this machine
        self.kernel, self.socket = None, None

    def log_in(self):
        """Fill in the login form. Raises Trouble where the hub does not let the attendee in."""
        self._ask("GET", "/hub/login")
        form = {"username": self.name, "password": self.password, "_xsrf": self._xsrf("/hub/")}
        reply = self._ask("POST", "/hub/login", data=form, allow_redirects=False)
        if reply.status_code != 302:
            raise Trouble(f"the hub does not accept this name and password (HTTP {reply.status_code})")

    def start_server(self, seconds):
        """Ask for a server and follow its progress for `seconds` at most, as the page with the bar does."""
        give_up = time.monotonic() + seconds
        reply = self._ask("POST", f"/hub/api/users/{quote(self.name)}/server", json={}, xsrf="/hub/")
        while reply.status_code == 429:  # the hub starts only so many at once, and a browser tries again
            if time.monotonic() > give_up:
                raise Trouble(f"the hub was still busy with the servers of others after {seconds:g} s (HTTP 429)")
            time.sleep(float(reply.headers.get("Retry-After", 1)))
            reply = self._ask("POST", f"/hub/api/users/{quote(self.name)}/server", json={}, xsrf="/hub/")
        if reply.status_code not in (201, 202):
            raise Trouble(f"the hub did not start the server: {why(reply)}")
        self._follow(give_up, seconds)
        self.enter_server()

    def enter_server(self):
        """Open JupyterLab on a server that runs: it asks the hub who this is, and leaves its cookie."""
        self._ask("GET", f"{self.server}/lab")

    def _follow(self, give_up, seconds):
        """Return when the server is ready. Raises Trouble with what the hub says of a start that failed."""
        path = f"/hub/api/users/{quote(self.name)}/server/progress"
        with self._ask("GET", path, xsrf="/hub/", stream=True) as events:
            for line in lines_of(events):
                if line.startswith(b"data:"):
                    event = json.loads(line[5:])
                    if event.get("failed"):
                        raise Trouble(f"the server did not start: {event['message'].strip().rstrip('.')}")
                    if event.get("ready"):
                        return
                if time.monotonic() > give_up:
                    raise Trouble(f"the server was not ready after {seconds:g} s")
        raise Trouble("the hub ended its report on the server's start before it was ready")

    def open_notebook(self, path):
        """Start a kernel for the notebook `path` of the server's folder, and connect to it."""
        asked = {"path": path, "name": path, "type": "notebook", "kernel": {"name": "python3"}}
        reply = self._ask("POST", f"{self.server}/api/sessions", json=asked, xsrf=f"{self.server}/")
        if reply.status_code != 201:
            raise Trouble(f"the server did not start a kernel: {why(reply)}")
        self.kernel = reply.json()["kernel"]["id"]
        address = f"ws{self.url.removeprefix('http')}{self.server}/api/kernels/{self.kernel}/channels"
        request = requests.Request("GET", f"{self.url}{self.server}/api/kernels")
        cookies = self.http.prepare_request(request).headers.get("Cookie", "")
        try:
            self.socket = websocket.create_connection(
                f"{address}?session_id={uuid.uuid4().hex}", cookie=cookies, timeout=HTTP_SECONDS
            )
        except (OSError, websocket.WebSocketException) as error:
            raise Trouble(f"no WebSocket to the kernel through the proxy: {error}") from None
        self.run("None", HTTP_SECONDS)

    def run(self, code, seconds):
        """Run one cell; returns what it printed. Raises CellFailed; Trouble after `seconds`."""
        number, printed, wrong, left = uuid.uuid4().hex, [], None, {"reply", "idle"}
        self._send(number, code)
        give_up = time.monotonic() + seconds
        while left:
            message = self._receive(give_up, seconds)
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] in ("dead", "restarting", "autorestarting"):
                raise Trouble("the kernel died")
            if message["parent_header"].get("msg_id") != number:
                continue
            if kind == "stream":
                printed.append(content["text"])
            elif kind == "error":
                wrong = f"{content['ename']}: {content['evalue'].strip().partition(chr(10))[0]}"
            elif kind == "execute_reply":
                if content["status"] == "aborted":
                    wrong = wrong or "the kernel dropped the cell"
                left.discard("reply")
            elif kind == "status" and content["execution_state"] == "idle":
                left.discard("idle")
        if wrong:  # told only now: what is sent before the kernel is idle again would be dropped
            raise CellFailed(wrong)
        return "".join(printed)

    def stop_server(self):
        """Stop the server, with its kernels and their engines."""
        reply = self._ask("DELETE", f"/hub/api/users/{quote(self.name)}/server", xsrf="/hub/")
        if reply.status_code not in (202, 204):
            raise Trouble(f"the hub did not stop the server: {why(reply)}")

    def leave(self):
        """Close the browser; servers and kernels stay."""
        if self.socket is not None:
            self.socket.close()
        self.http.close()

    # -- how it is said -----------------------------------------------------------------------------------------------

    def _ask(self, method, path, xsrf=None, **how):
        """One request. xsrf: the path whose cookie proves that the request is meant."""
        headers = {} if xsrf is None else {"X-XSRFToken": self._xsrf(xsrf)}
        try:
            reply = self.http.request(method, self.url + path, headers=headers, timeout=HTTP_SECONDS, **how)
        except requests.RequestException as error:
            raise Trouble(f"no answer to {method} {path}: {error}") from None
        if reply.status_code >= 500:
            raise Trouble(f"{method} {path}: {why(reply)}")
        return reply

    def _xsrf(self, path):
        """The token that belongs to `path`; hub and server have one each."""
        found = [cookie.value for cookie in self.http.cookies if cookie.name == "_xsrf" and cookie.path == path]
        if not found:
            raise Trouble(f"{urlsplit(self.url).netloc}{path} left no _xsrf cookie: is this a JupyterHub?")
        return found[0]

    def _send(self, number, code):
        header = {
            "msg_id": number,
            "msg_type": "execute_request",
            "username": self.name,
            "session": "",
            "version": "5.3",
        }
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": True}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        try:
            self.socket.send(json.dumps(message))
        except (OSError, websocket.WebSocketException) as error:
            raise Trouble(f"the connection to the kernel broke: {error}") from None

    def _receive(self, give_up, seconds):
        """The next message of the kernel."""
        self.socket.settimeout(max(0.01, give_up - time.monotonic()))
        try:
            frame = self.socket.recv()
        except websocket.WebSocketTimeoutException:
            raise Trouble(f"a cell took more than {seconds:g} s") from None
        except (OSError, websocket.WebSocketException) as error:
            raise Trouble(f"the connection to the kernel broke: {error}") from None
        if not frame:
            raise Trouble("the server closed the connection to the kernel")
        return json.loads(frame)


def lines_of(events):
    """The lines of a reply as they come. Raises Trouble where it breaks off, or says nothing for HTTP_SECONDS."""
    try:
        yield from events.iter_lines()
    except requests.RequestException as error:
        raise Trouble(f"the hub's report on the server's start broke off: {error}") from None


def why(reply):
    """What an error reply says, in one line."""
    try:
        text = reply.json()["message"]
    except (ValueError, KeyError, TypeError):
        text = reply.reason
    return f"{text} (HTTP {reply.status_code})"
