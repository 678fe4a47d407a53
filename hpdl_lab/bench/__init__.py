"""Benchmarks on real ranks: correct first, timed second, as tables with the columns of nccl-tests."""
