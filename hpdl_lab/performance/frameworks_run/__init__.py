"""A net trained on two hosts by PyTorch, JAX, TensorFlow and gRPC, with the bytes on the links: `make frameworks`."""
