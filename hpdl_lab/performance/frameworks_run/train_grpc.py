"""A parameter server over gRPC. It answers when it has the gradients of all workers, so that training is synchronous.

worker 0 --gradients-->  server:           --weights--> worker 0
worker 1 --gradients-->  takes the step    --weights--> worker 1
"""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc  # pyrefly: ignore[missing-import]
import numpy as np
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ..frameworks import two_layers
from . import net

OPTIONS = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]  # by default 4 MiB at most


def _serve() -> None:
    """Serve one call: it takes the gradients of a worker as bytes, and returns the new weights."""
    weights, gradients = np.concatenate([array.ravel() for array in net.weights()]), []

    def descend() -> None:
        weights[:] -= np.float32(net.RATE / net.WORKERS) * sum(gradients)
        gradients.clear()

    all_have_come = threading.Barrier(net.WORKERS, action=descend)

    def step(request: bytes, context: grpc.ServicerContext) -> bytes:  # in a thread for each call, so that it may wait
        gradients.append(np.frombuffer(request, np.float32))
        all_have_come.wait()
        return weights.tobytes()

    server = grpc.server(ThreadPoolExecutor(net.WORKERS), options=OPTIONS)
    methods = {"step": grpc.unary_unary_rpc_method_handler(step)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("server", methods)])
    server.add_insecure_port(net.HOSTS[-1])
    server.start()
    server.wait_for_termination()


def work(number: int) -> None:
    call = grpc.insecure_channel(net.HOSTS[-1], OPTIONS).unary_unary("/server/step")
    x, y = map(torch.from_numpy, net.examples(number))
    weights = [torch.from_numpy(array).requires_grad_() for array in net.weights()]

    def step() -> None:
        gradients = torch.autograd.grad(two_layers(x, y, *weights), weights)
        answer = call(parameters_to_vector(gradients).numpy().tobytes(), wait_for_ready=True)
        vector_to_parameters(torch.frombuffer(bytearray(answer), dtype=torch.float32), weights)

    net.train_and_print("grpcio", step, lambda: two_layers(x, y, *weights).item())


if __name__ == "__main__":
    _serve() if sys.argv[2] == "server" else work(int(sys.argv[3]))
