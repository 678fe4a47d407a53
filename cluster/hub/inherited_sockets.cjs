// Loaded into the proxy by `node --require`: it listens on the sockets that `hpdl hub` holds open for it.
// HPDL_SOCKETS: {port: file descriptor}, as JSON.
const { Server } = require("net");
const sockets = JSON.parse(process.env.HPDL_SOCKETS);
const listen = Server.prototype.listen;
Server.prototype.listen = function (port, ...rest) {
  return port in sockets ? listen.call(this, { fd: sockets[port] }) : listen.call(this, port, ...rest);
};
// Whom it asks proves to be who is at that address. Node would want a certificate for the name that the browser has typed.
const { Agent } = require("http");
const addRequest = Agent.prototype.addRequest;
Agent.prototype.addRequest = function (request, options, ...rest) {
  return addRequest.call(this, request, Object.assign(options, { servername: "" }), ...rest);
};
