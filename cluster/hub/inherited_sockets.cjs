// Loaded into the proxy by `node --require`: it listens on the sockets that `hpdl hub` holds open for it.
// HPDL_SOCKETS: {port: file descriptor}, as JSON.
const { Server } = require("net");
const sockets = JSON.parse(process.env.HPDL_SOCKETS);
const listen = Server.prototype.listen;
Server.prototype.listen = function (port, ...rest) {
  return port in sockets ? listen.call(this, { fd: sockets[port] }) : listen.call(this, port, ...rest);
};
