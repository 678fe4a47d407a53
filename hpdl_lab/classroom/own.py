"""/hub/own: gives a browser the cookie by which the proxy lets it to the server of its own attendee, and no other.

GET /user/ada/lab --proxy--> /hub/own?next=/user/ada/lab --for ada--> /user/ada/lab with the cookie of ada
                                                         --for eve--> 403
"""

import hmac

from jupyterhub.handlers import BaseHandler
from tornado import web

from .settings import API_TOKEN, Settings


class OwnHandler(BaseHandler):
    """Redirects an attendee who is logged in to a page of their own server."""

    given: Settings

    def initialize(self, given: Settings) -> None:
        super().initialize()
        self.given = given

    @web.authenticated
    def get(self) -> None:
        name, there = self.current_user.name, self.get_argument("next", "")
        if not there.startswith(f"/user/{name}/"):
            raise web.HTTPError(403, "This page is on the server of somebody else, who alone can open it.")
        proof = hmac.new((self.given.private / API_TOKEN).read_bytes(), name.encode(), "sha256").hexdigest()
        # "__Host-": no page of another port of this machine can have set it. Browsers take it by TLS, be it of a web
        # server in front of this one, and only by TLS, or on this machine, say what they fetch.
        browser_has_tls = "Sec-Fetch-Mode" in self.request.headers and not self.given.loopback
        safe = bool(self.given.certificate) or browser_has_tls
        cookie = "__Host-hpdl-own" if safe else "hpdl-own"
        self.set_cookie(cookie, f"{name}.{proof}", path="/", secure=safe, httponly=True, samesite="Lax", expires_days=1)
        self.redirect(there)
