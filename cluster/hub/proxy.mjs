// Loaded into JupyterHub's proxy by `node --import`: what it listens on, whom it asks, and who gets to whose pages.
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
// browser gets to the server of its own attendee only. It proves whose it is by a cookie from /hub/own (own.py), signed
// with a key that hub and proxy share.
const folder = join(process.env.HPDL_HUB, "hub");
const given = JSON.parse(readFileSync(join(folder, "settings.json")));
const key = readFileSync(join(folder, "api_token"));
const loopback = /^(localhost$|::1$|127\.)/.test(given.address);

function isOf(name, headers) {
  const safe = given.certificate || ("sec-fetch-mode" in headers && !loopback); // as in own.py
  const cookie = `${safe ? "__Host-" : ""}hpdl-own=`;
  const proof = Buffer.from(`${name}.${createHmac("sha256", key).update(name).digest("hex")}`);
  const cookies = (headers.cookie ?? "").split(";").map((each) => each.trim());
  const said = cookies.filter((each) => each.startsWith(cookie)).map((each) => Buffer.from(each.slice(cookie.length)));
  return said.some((each) => each.length === proof.length && timingSafeEqual(each, proof));
}

// Pages of the hub are for the address bar, links and forms: no script of another page reads them.
function isNavigation(method, headers) {
  const { "sec-fetch-mode": mode, "sec-fetch-dest": dest, "sec-fetch-site": site } = headers;
  if (mode === undefined) return true; // no browser, or one without TLS and not on this machine
  return mode === "navigate" && dest === "document" && (method === "GET" || ["same-origin", "none"].includes(site));
}

// What is wrong with a request for what is below `prefix`: [HTTP status], [302, where the hub is] if /hub/own can mend it,
// [0] for nothing.
function refusal(kind, req, prefix) {
  const [base, owner] = prefix.split("/user/");
  const navigation = isNavigation(req.method, req.headers);
  if (owner) {
    if (given.subdomain_host || isOf(owner.split("/")[0], req.headers)) return [0];
    return kind === "web" && req.method === "GET" && navigation ? [302, base] : [403];
  }
  if (prefix.includes("/services/")) return [0];
  if (req.headers["content-length"] > BODY_BYTES) return [413];
  const hub = given.subdomain_host || prefix === "/" ? "/hub" : `${prefix}/hub`;
  return [navigation || ["api", "static", "logo"].some((part) => req.url.startsWith(`${hub}/${part}`)) ? 0 : 403];
}

const { ConfigurableProxy } = await import(
  pathToFileURL(join(dirname(realpathSync(process.argv[1])), "..", "lib", "configproxy.js"))
);
const handleProxy = ConfigurableProxy.prototype.handleProxy;
ConfigurableProxy.prototype.handleProxy = async function (kind, req, res, ...rest) {
  const match = await this.targetForReq(req).catch(() => undefined);
  const [status, base] = match ? refusal(kind, req, match.prefix) : [0];
  if (kind === "web" && (status || !match?.prefix.includes("/user/"))) {
    // Who is answered before all was said is not listened to any more; nor does JupyterHub (bounds.py).
    res.on("finish", () => req.complete || req.socket.destroy());
  }
  if (status === 302) return res.writeHead(302, { Location: `${base}/hub/own?next=${encodeURIComponent(req.url)}` }).end();
  if (status === 413) return res.writeHead(413, { Connection: "close" }).end();
  if (status) {
    this.handleProxyError(status, kind, req, res);
    if (kind === "ws") res.destroySoon();
    return;
  }
  return handleProxy.call(this, kind, req, res, ...rest);
};
