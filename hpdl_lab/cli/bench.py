"""`hpdl bench`: what can be measured, one file or more for each kind of bench."""

from . import bench_collectives, bench_ddp, bench_hybrid, bench_pipeline, bench_reduction, bench_run, bench_scaling

BENCHES = (bench_collectives, bench_ddp, bench_hybrid, bench_pipeline, bench_reduction, bench_run, bench_scaling)


def add(commands):
    benches = commands.add_parser("bench", help="measure").add_subparsers(required=True, metavar="BENCH")
    for kind in BENCHES:
        kind.add(benches)
