"""/hub/own gives a browser the cookie by which the proxy (cluster/hub/proxy.mjs) lets it to its own server."""

import hmac
import re
from typing import TYPE_CHECKING, cast

from jupyterhub.handlers import BaseHandler
from tornado import web

from .settings import API_TOKEN, Settings, read_settings

if TYPE_CHECKING:
    from jupyterhub.user import User


class OwnHandler(BaseHandler):
    """A redirection of an attendee who is logged in to a page of their own server."""

    @web.authenticated
    def get(self) -> None:
        user, there, given = (
            cast("User", self.current_user),
            self.get_argument("next", ""),
            read_settings() or Settings(),
        )
        if not there.startswith(f"{self.base_url}user/{user.escaped_name}/"):
            raise web.HTTPError(403, "It is on a server of somebody else, who alone can open it", reason="Not yours")
        said = f"{user.name} {self.get_session_cookie() or ''}".encode()
        proof = hmac.new((given.private / API_TOKEN).read_bytes(), said, "sha256").hexdigest()
        # By TLS, also of a web server in front of this one, a cookie that only this address can set. See proxy.mjs.
        here = re.fullmatch(r"(localhost|127\.[\d.]+|\[::1\])(:\d+)?", self.request.host)
        safe = self.request.protocol == "https" or ("Sec-Fetch-Mode" in self.request.headers and not here)
        cookie, how = "__Host-hpdl-own" if safe else "hpdl-own", {"httponly": True, "samesite": "Lax"}
        self.set_cookie(cookie, proof, path="/", secure=safe, expires_days=30, **how)
        self.redirect(there)
