// Loaded into JupyterHub's proxy by `node --import`: what it listens on, whom it asks, and who gets what.
import { createHmac, timingSafeEqual } from "node:crypto";
import { readFileSync, realpathSync } from "node:fs";
import { Agent } from "node:http";
import { Server } from "node:net";
import { dirname, join } from "node:path";
import { pathToFileURL } from "node:url";

const BODY_BYTES = 65_536; // of a request to the hub, as in bounds.py

// -- sockets that `hpdl hub` holds open for it; HPDL_SOCKETS: {port: file descriptor}, as JSON ------------------------

const sockets = JSON.parse(process.env.HPDL_SOCKETS ?? "{}");
const listen = Server.prototype.listen;
Server.prototype.listen = function (port, ...rest) {
  return port in sockets ? listen.call(this, { fd: sockets[port] }) : listen.call(this, port, ...rest);
};

// -- servers and hub --------------------------------------------------------------------------------------------------

// Whom it asks proves to be who is at that address. Node would want a certificate for the name that the browser typed.
// A connection that nobody uses is closed here after 10 s, before JupyterHub closes it (bounds.py).
const addRequest = Agent.prototype.addRequest;
Agent.prototype.addRequest = function (request, options, ...rest) {
  this.options.timeout = 10_000;
  return addRequest.call(this, request, Object.assign(options, { servername: "" }), ...rest);
};

// -- who gets what --------------------------------------------------------------------------------------------------

// Where all servers share one web address, a page of an attendee's server has the rights of whoever looks at it. So a
// browser gets to the server of its own attendee only. It proves whose it is by a cookie from /hub/own (own.py): the name
// and the session at the hub, signed with a key that hub and proxy share.
const key = readFileSync(join(process.env.HPDL_HUB, "hub", "api_token"));
const SESSION = "jupyterhub-session-id";

function isOf(name, headers, tls) {
  const cookies = (headers.cookie ?? "").split(";").map((each) => each.trim().split("="));
  const valuesOf = (wanted) => cookies.filter(([each]) => each === wanted).map(([, value]) => Buffer.from(value ?? ""));
  // "__Host-": no page of another port has set it. Without TLS, also of a web server in front of this one, a browser does
  // not take it; it then does not say what it fetches, unless the hub is on the browser's own machine.
  const here = /^(localhost|127\.[\d.]+|\[::1\])(:\d+)?$/.test(headers.host);
  const plain = !tls && (here || !("sec-fetch-mode" in headers));
  const proofs = [...valuesOf("__Host-hpdl-own"), ...(plain ? valuesOf("hpdl-own") : [])];
  const mac = createHmac("sha256", key).update(`${name} ${valuesOf(SESSION)[0] ?? ""}`);
  const right = Buffer.from(mac.digest("hex"));
  return proofs.some((proof) => proof.length === right.length && timingSafeEqual(proof, right));
}

// Pages of the hub are for the address bar, links and forms: no script of another page reads them.
function isNavigation(method, headers) {
  const { "sec-fetch-mode": mode, "sec-fetch-dest": dest, "sec-fetch-site": site } = headers;
  if ("service-worker-navigation-preload" in headers) return false;
  if (mode === undefined) return true; // no browser, or one without TLS and not on this machine
  return mode === "navigate" && dest === "document" && (method === "GET" || ["same-origin", "none"].includes(site));
}

// What is wrong with a request for what is below `prefix`: an HTTP status, 302 if /hub/own can mend it, 0 for nothing.
// byName: each server has a web address of its own, with which prefixes begin.
function refusal(kind, req, prefix, tls, byName) {
  const owner = /\/user\/([^/]+)/.exec(prefix)?.[1];
  const navigation = isNavigation(req.method, req.headers);
  if (owner) {
    if (byName || isOf(decodeURIComponent(owner), req.headers, tls)) return 0;
    return kind === "web" && req.method === "GET" && navigation ? 302 : 403;
  }
  if (prefix.includes("/services/")) return 0;
  if (req.headers["content-length"] > BODY_BYTES) return 413;
  if ("transfer-encoding" in req.headers) return 411; // forms have a length
  if (navigation) return 0;
  const hub = hubAt(prefix, byName);
  const path = req.url.split("?")[0];
  if (!path.startsWith(hub)) return 424; // as JupyterHub says to a page of a server that was stopped
  const api = path.startsWith(`${hub}api/`) && !path.startsWith(`${hub}api/oauth2/authorize`);
  return api || path.startsWith(`${hub}static/`) || path === `${hub}logo` ? 0 : 403;
}

// The path of the hub, of the routes of which `prefix` is one.
function hubAt(prefix, byName) {
  return `${byName ? "" : prefix.split("/user/")[0].replace(/\/$/, "")}/hub/`;
}

const { ConfigurableProxy } = await import(
  pathToFileURL(join(dirname(realpathSync(process.argv[1])), "..", "lib", "configproxy.js"))
);
const handleProxy = ConfigurableProxy.prototype.handleProxy;
ConfigurableProxy.prototype.handleProxy = async function (kind, req, res, ...rest) {
  const prefix = (await this.targetForReq(req).catch(() => undefined))?.prefix;
  const status = prefix ? refusal(kind, req, prefix, Boolean(this.options.ssl), this.hostRouting) : 0;
  if (status && kind === "ws") {
    res.on("error", () => {});
    return res.end(`HTTP/1.1 ${status} Refused\r\nContent-Length: 0\r\nConnection: close\r\n\r\n`);
  }
  if (kind === "web" && (status || !prefix?.includes("/user/"))) {
    // Who is answered before all was said is not listened to any more; nor does JupyterHub (bounds.py).
    res.on("finish", () => req.complete || req.socket.destroy());
  }
  if (status === 302) {
    const own = `${hubAt(prefix, this.hostRouting)}own?next=${encodeURIComponent(req.url)}`;
    return res.writeHead(302, { Location: own }).end();
  }
  if (status === 403) return this.handleProxyError(403, kind, req, res);
  if (status) return res.writeHead(status, { Connection: "close" }).end();
  return handleProxy.call(this, kind, req, res, ...rest);
};
