"""Answers to exercise 5.5 that the check must reject or accept; CI proves both."""


def in_one_function(comm_stream, x, stream, all_reduce):
    """The event is kept, and what is launched is a function of its own."""
    produced = stream.record_event()
    comm_stream.wait_event(produced)

    def reduce_it(comm, x):
        all_reduce(comm, x)

    comm_stream.launch(reduce_it, x)
    reduced = comm_stream.record_event()
    stream.wait_event(reduced)


WRONG = {
    "5.5": """
early: began after 0 s
    -     comm_stream.wait_event(stream.record_event())
order: has read it before
    -     stream.wait_event(comm_stream.record_event())
host: synchronize and wait() the host
    -     stream.wait_event(comm_stream.record_event())
    +     comm_stream.synchronize()
host: With 2 ranks, the sums are right
    comm_stream.wait_event(stream.record_event()) => stream.record_event().synchronize()
host: the host waited
    stream.synchronize()
    comm_stream.launch(all_reduce, x)
    comm_stream.synchronize()
communicator: Only the communicator of comm_stream
    stream.launch(all_reduce, x)
order: has read it before
    comm_stream.wait_event(stream.record_event())
    stream.wait_event(comm_stream.record_event())
    comm_stream.launch(all_reduce, x)
early: wait for an event that `stream` has recorded
    comm_stream.launch(all_reduce, x)
    comm_stream.wait_event(stream.record_event())
    stream.wait_event(comm_stream.record_event())
twice: With 2 ranks, rank 0 calls all_reduce 4 times for 2 vectors
    -     comm_stream.launch(all_reduce, x)
    +     comm_stream.launch(all_reduce, x)
    +     comm_stream.launch(all_reduce, x)
launch: nothing is added up
    comm_stream.wait_event(stream.record_event())
    stream.wait_event(comm_stream.record_event())
raises: needs what record_event() returns
    comm_stream.wait_event(stream.record_event()) => comm_stream.wait_event(stream)
raises: missing 1 required positional argument
    -     comm_stream.launch(all_reduce, x)
    +     comm_stream.launch(all_reduce)
""",
}
RIGHT = {
    "5.5": (in_one_function,),
}
COMPLETED = {
    "5.5": ["stream.wait_event(comm_stream.record_event())"],
}
