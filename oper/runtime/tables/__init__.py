"""Tables as the engine trains them: buckets, optimizers, the structs of the kernels.

In: `Plan`. Out: `Bucket`, `Optimizer`. Imports: base, plan.
"""
