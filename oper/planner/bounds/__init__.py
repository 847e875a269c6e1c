"""Lower bounds on the objective, the certificate they give, and the exact reference.

In: `Problem`. Out: `Certificate`. Imports: problem, lp; never modules that place rows.
"""
