"""The distributed shared memory of a node: heap, mailboxes, addresses of rows in them.

In: `Plan`, `Node`. Out: `Heap`, `Mailboxes`. Imports: comm, plan.
"""
