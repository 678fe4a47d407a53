"""A hands-on laboratory for high-performance and distributed deep learning.

A gradient leaves a notebook cell, goes down through the rooms to the wire, and its measurements come back up as events:

    notebook cell -> lab -> engines -> parallel -> collectives -> comm -> csrc (MPI, shared memory, CUDA)
         ^                                                                 |
         +-------- plots <-------- events, rows <-------- trace <----------+

Every distributed function is `f(comm, x, ...)`: communicator first, tensor second. The same function runs on simulated
ranks (`hpdl_lab.comm.sim.run`), on the engine cluster (`hpdl_lab.lab.run`) and under `mpiexec`
(`hpdl_lab.comm.world()`).

    lab          the attendee's verbs: start, run, check, hint, solution, measure, train, scaling, show, watch ...
    verbs        what a verb does in a notebook
    engines      the cluster under the notebook: start, run, interrupt, restart, stop; here, emulated, in a Slurm job
    classroom    a hub for many attendees, its plan and its rehearsal; release: notebooks for them
    checks       exercises and their checks; zoo: broken programs to diagnose
    plots        pure functions of rows and events; report: a course as one page
    bench        sweeps: correctness first, time second
    inference    an engine that generates tokens
    watch        what is wrong with a script of torchrun or mpiexec
    performance, resilience, race    where the time goes; failures; the race
    parallel     training strategies
    collectives  the family of collectives, each as code, as data and with its cost; the selector
    models, optim, data    MLP, CNN, GPT, ViT, LLaMA, DeepSeek; optimizers; data, how it is shared and read
    kernels      GPU kernels, and a CPU that runs them thread by thread
    torch_backend    torch.distributed's backend "hpdl": DDP on the compiled collectives
    schedules    pipeline schedules as data: which rank runs which micro-batch in which stage, and when
    predict      the model of time that needs no ranks: a graph of tasks, and the messages of a schedule on a network
    mesh         ranks on a grid of named axes (dp, pp, tp, cp, ep), with a communicator along each
    comm         the communicator on simulated ranks, on ranks of mpiexec and of torchrun, and its errors
    symptoms     what is known to go wrong on a machine, with the fix; `hpdl doctor` and a failed start say it
    trace        the one event log and the only clock
    features     what this machine and build can do, with the reason for each "no"

docs/house.md has a section for each, with the files to read first.
"""


def __getattr__(name: str) -> str:
    """Return `__version__` when it is asked for: to read it takes as long as all else that a small process imports."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("hpdl_lab")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+source"
