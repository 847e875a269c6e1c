"""The distributed shared memory of a node: heap, mailboxes, addresses and runs of rows in them.

In: `Plan`, `Node`. Out: `Heap`, `Mailboxes`, `Runs`. Imports: comm, tables, plan.
"""
