"""Pipeline parallelism: an unchanged model in stages, and any schedule carried out on them."""
