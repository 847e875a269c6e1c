"""Measuring the links of CPU ranks with the runtime's own kernels.

In: ranks. Out: `Measurement`, a topology. Imports: runtime, topology.
"""
