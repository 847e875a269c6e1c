"""Cached rows of a host tier: assignment of samples to workers, and transmissions between caches.

In: batches of row ids (`oper.logs`), tables, links. Out: assignments, and the transmissions between
the caches of M workers and the tier that holds all rows. Imports: profiling, plan, logs, tables and
base. Kernels: csrc/include/oper/scheduler.

Sources: HET (VLDB 2022), Herald (APNet 2022, NSDI 2024), ESD (arXiv 2512.21615), FAE in Herald's
form. The files of the methods: docs/architecture.md.
"""
