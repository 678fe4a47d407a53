"""/hub/own gives a browser the cookie by which the proxy lets it to the server of its own attendee, and no other.

GET /user/ada/lab --proxy--> /hub/own?next=/user/ada/lab --for ada--> /user/ada/lab with the cookie of ada
                                                         --for eve--> 403
"""

import hmac

from jupyterhub.handlers import BaseHandler
from tornado import web

from .settings import API_TOKEN, Settings, read


class OwnHandler(BaseHandler):
    """Redirects an attendee who is logged in to a page of their own server."""

    @web.authenticated
    def get(self) -> None:
        name, there, given = self.current_user.name, self.get_argument("next", ""), read() or Settings()
        if not there.startswith(f"{self.base_url}user/{name}/"):
            raise web.HTTPError(
                403, "It is on the server of somebody else, who alone can open it", reason="Not your page"
            )
        proof = hmac.new((given.private / API_TOKEN).read_bytes(), name.encode(), "sha256").hexdigest()
        # "__Host-": no page of another port of this machine can have set it. Browsers take it by TLS, be it of a web
        # server in front of this one, and only by TLS, or on this machine, do they say what they fetch.
        safe = bool(given.certificate) or ("Sec-Fetch-Mode" in self.request.headers and not given.loopback)
        cookie, how = "__Host-hpdl-own" if safe else "hpdl-own", {"httponly": True, "samesite": "Lax"}
        self.set_cookie(cookie, f"{name}.{proof}", path="/", secure=safe, expires_days=1, **how)
        self.redirect(there)
