"""Topologies for tests of the bound and the reference, with latencies that let rows be copied."""

from dataclasses import replace

from hypothesis import strategies as st

from oper.topology.latency import Latency
from oper.topology.topology import Topology


@st.composite
def any_latency(draw: st.DrawFn, drawn: st.SearchStrategy[Topology]) -> Topology:
    """The same with real hops, or next to none, so that even small problems replicate."""
    hop = draw(st.sampled_from([2e-6, 1e-12]))
    return replace(draw(drawn), latency=Latency.of_hops(hop))
