"""What follows from plans, for whoever shows it: facts of a plan, of a row, of two plans, typed.

In: `Plan`, `Profile`. Out: objects whose fields the command line, the report page, notebooks and
TorchRec's statistics put into words. Imports: plan, profiling and below.
"""
