"""Facts of a plan, of a row and of two plans, typed, for the modules that show them.

In: `Plan`, `Profile`. Out: objects whose fields the command line, the report page, notebooks and
TorchRec's statistics put into words. Imports: plan, profiling and below.
"""
