"""Measuring the links of ranks, on the CPU or on devices, with the runtime's own kernels.

In: ranks. Out: `Measurement`, a topology. Imports: runtime, topology.
"""
