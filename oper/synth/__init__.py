"""Synthetic logs and profiles of published workloads, with drift and labels.

In: recipes (workloads.yaml). Out: Parquet files, profiles. Imports: base, tables, logs, profiling.
"""
