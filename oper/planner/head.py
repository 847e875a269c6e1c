"""The integer head: a lower bound that knows that the hottest rows cannot be split.

The Lagrangian of `bound.py` lets every row be held in parts. Where single rows are a sizeable part
of a rank's time, the rows of the hottest classes (the head) are kept whole here, in a mixed
integer programme; all others (the tail) enter by what they take on each rank: t_r seconds, u_j
bytes and e bytes of extra copies, of which any prices λ, μ, ν ≥ 0 tell

    Σ λ_r t_r + Σ μ_j u_j + ν e ≥ Σ_{c in tail} rows_c · (least price of a row of class c)

so the tail is there exactly class by class, without a variable for any. Cuts come in turn (Benders'
decomposition): the programme places the head, the tail is priced around it, its prices are the
next cut. Each programme's own dual bound is a bound on every plan, whenever one stops.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from oper.cost import Floats, Method, Workload
from oper.errors import OperError
from oper.planner import programme
from oper.planner.bound import Bound, SAFETY, good_prices, lagrangian, usable_methods
from oper.planner.classes import Classes
from oper.planner.patterns import Demand, Prices, cheapest, demand, everywhere_seconds, looks_alike
from oper.topology import Topology

HEAD_ROWS = 60  # kept whole, at most
HEAD_SHARE = 1e-3  # of the bound: rows that take less of a rank's time are left to the tail
CUTS = 20  # rounds of them
NODES = 500  # of branch and bound in each round: a limit on work that is the same in every run
TOLERANCE = 1e-4  # of the bound, to which a round's programme and the rounds are taken
